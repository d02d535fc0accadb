"""GPTQ-calibrated bases: agreement of drafts, quality as a 4-bit model, and cost."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Adam
from mlx_lm.quant import dwq as mlx_lm_dwq
from mlx_lm.quant import gptq as mlx_lm_gptq
from mlx_lm.utils import quantize_model, save
from pages import table

from gearbx_mlx import Gearbox, load, stream_generate
from gearbx_mlx.cli.bases import answered, text_of
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.evaluate.run import KLD_COLUMNS
from gearbx_mlx.evaluation.predictions import (
    TextPrediction,
    joined_recordings,
    quality,
    read_at_once,
    read_documents,
    read_rows,
    recording_of,
    windows_of,
)
from gearbx_mlx.formats import get_format
from gearbx_mlx.gears.ladder import DEFAULT_GROUP_SIZE, Gear
from gearbx_mlx.loading import find

from .evaluation.report import markdown_table
from .lossless import shipped_base
from .studies import HELD_OUT, Found, named, study

CHAT = """Why do leaves change colour in autumn?
Write a short thank-you note to a teacher.
What is the capital of Australia, and what is it known for?
How can I sleep better at night?
Tell me a short story about a lighthouse.
What is the difference between weather and climate?
Give me tips for a job interview.
Who wrote Hamlet, and what is it about?
How do bees make honey?
Plan a birthday party for a child of six.
What are the benefits of walking every day?
Describe the planet Mars."""
CODE = """Write a Python function that checks whether a number is prime.
Write a function in JavaScript that adds two numbers.
How do I sort a list of dictionaries by a key in Python?
Write a SQL query that finds the five most expensive products.
Explain what a loop is, with an example in C.
Write a Python script that counts the words in a file.
Write a CSS rule that centers a heading.
How do I make a new branch in git?
Write a Python function that merges two sorted lists.
Write a Java class for a rectangle with an area method.
What is recursion? Show it with factorial in Python.
Write a Python decorator that prints how long a function takes."""
LENGTH = 48  # tokens of an answer
CONTEXT = 512  # tokens of a window of text, of which the second half counts: as llama.cpp measures KL

Gears = dict[str, tuple[int, Callable[[], dict[str, Any]]]]  # label to bits, and what makes keywords of Gearbox


@study("docs/convert.md", "docs/evaluate.md", minutes=20)
def calibrated_base(
    model: str = "smollm2",
    bits: list[int] = [4, 6, 8],  # noqa: B006 - nothing changes it
    prompts: int = 12,
    formats: list[str] = ["planes", "exact"],  # noqa: B006
    others: list[Path] = [],  # noqa: B006
    data: Path | None = None,
    tokens: int = 4096,
) -> Found:
    """Measure how often a low gear chooses the original's token, with RTN and with a GPTQ-calibrated 4-bit base.

    Args:
        model: Bfloat16 model; demo: the bundled one.
        bits: Bits of the lowest gear, with RTN and by mlx-lm's own quantization.
        prompts: Number of prompts of each kind.
        formats: Formats to calibrate. Calibrated codes of exact stay close enough to restore the original.
        others: 4-bit checkpoints of the model by other quantizers, such as by `gptq`, as the lowest gear.
        data: Text for the lowest gear as a model of its own, such as WikiText-2's test set.
        tokens: Tokens of that text.
    """
    name = None if model == "demo" else model
    original, tokenizer = load(name)
    gearbox = Gearbox(original, "4,16", kernels="native")
    answers = written(gearbox, tokenizer, prompts)
    windows = windows_of(tokenizer, read_documents(data), CONTEXT, tokens, str(data), CONTEXT // 2) if data else []
    top = [list(predicted(gearbox, window, gearbox.ladder.top)) for window in windows]
    rows, figures = [], []
    del original, gearbox  # of several models, the memory would not suffice
    for label, (lowest, gear) in lowest_gears(name, bits, formats, others).items():
        own, _ = load(name)
        # In planes, which compute the same codes as format exact does, and are made faster.
        gearbox = Gearbox(own, f"{lowest},16", kernels="native", **gear())
        found, alone = agreement(gearbox, answers), against_top(gearbox, windows, top)
        figures.append({"name": label, "agreement": found} | alone)
        shown = [f"{found[kind]:.3f}" for kind in ("mathematics", "chat", "code", "all")]
        rows.append([label, *shown, *(f"{alone[name]:.3f}" for name in ("perplexity_ratio", "kl_mean") if alone)])
        del own, gearbox
    head = ["lowest gear", "mathematics", "chat", "code", "all", *(["perplexity", "KL"] if windows else [])]
    tables = {f"calibrated_base_{named(model)}": table(head, rows)}
    if windows:
        tables[f"kld_{named(model)}"] = markdown_table(KLD_COLUMNS, figures)
    return Found(tables, figures)


def lowest_gears(name: str | None, bits: Sequence[int], formats: Sequence[str], others: Sequence[Path]) -> Gears:
    """Return, by its label, the bits of each lowest gear and what makes it."""
    rtn: Gears = {f"RTN, {each} bits": (each, lambda: {"base": {}}) for each in bits}
    calibrated = {f"calibrated, {format}": (4, partial(base_of, name, format)) for format in formats}
    by_mlx_lm = {f"mlx-lm, {each} bits": (each, partial(quantized, name, each)) for each in bits}
    checkpoints = {path.name: (4, partial(loaded, path)) for path in others}
    return rtn | calibrated | by_mlx_lm | checkpoints


def quantized(name: str | None, bits: int) -> dict[str, Any]:
    """Return a lowest gear by mlx-lm's own quantization, as `mlx_lm.convert -q` has it."""
    model, _ = load(name)
    nn.quantize(model, DEFAULT_GROUP_SIZE, bits)
    return {"low_model": model}


def loaded(path: Path) -> dict[str, Any]:
    return {"low_model": load(path)[0]}


def product(a: mx.array, b: mx.array) -> mx.array:
    """Return a @ b in float32 by NumPy: MLX's own products take up to fifty times as long on a CPU."""
    made: mx.array = multiply(a, b)
    return made


def numpy_product(a: mx.array, b: mx.array) -> mx.array:
    return mx.array(np.array(a.astype(mx.float32)) @ np.array(b.astype(mx.float32)))


def gradients(factors: tuple[mx.array, mx.array], gradient: mx.array, _made: mx.array) -> tuple[mx.array, mx.array]:
    a, b = factors
    return product(gradient, b.swapaxes(-1, -2)), product(a.swapaxes(-1, -2), gradient)


multiply: Any = mx.custom_function(numpy_product)
multiply.vjp(gradients)


def quantized_product(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, transpose: bool, **quantization: Any
) -> mx.array:
    """Return mx.quantized_matmul's product (transposed, as layers have it), by `product`."""
    dense = mx.dequantize(weight, scales, biases, **quantization)
    return product(x.flatten(0, -2), dense.T).reshape(*x.shape[:-1], -1)


def causal_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: str | None, sinks: None = None
) -> mx.array:
    """Return mx.fast.scaled_dot_product_attention of whole sequences, by `product`.

    Args:
        queries: (batch, heads, tokens, head size); keys and values may have fewer heads.
    """
    keys, values = (mx.repeat(each, queries.shape[1] // each.shape[1], 1) for each in (keys, values))
    scores = product(scale * queries, keys.swapaxes(-1, -2))
    visible = mx.tri(queries.shape[-2], dtype=mx.bool_)
    return product(mx.softmax(mx.where(visible, scores, -mx.inf), -1), values).astype(queries.dtype)


class Recorder(mlx_lm_gptq.Catcher):
    """mlx-lm's record of a layer's inputs."""

    H: mx.array

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows = x.flatten(0, -2)
        self.H = self.H + product(rows.T, rows)
        made = product(rows, self.module.weight.T).reshape(*x.shape[:-1], -1)
        return made + self.module.bias if "bias" in self.module else made


@study(minutes=15)
def gptq(folder: Path, model: str = "smollm2", windows: int = 64, length: int = 256) -> None:
    """Make a 4-bit checkpoint by mlx-lm's GPTQ on this package's calibration data, for `calibrated-base`.

    Args:
        folder: Directory for the checkpoint.
        windows: Number of consecutive windows of the data.
        length: Tokens of a window.
    """
    read = calibration_tokens(model, windows, length)
    original, tokenizer, config = load(model, return_config=True)
    original.set_dtype(mx.float32)  # which NumPy has
    mlx_lm_gptq.Catcher = Recorder
    made, config["quantization"] = mlx_lm_gptq.gptq_quantize(
        original, read, bits=4, group_size=64, fallback_bits=4, fallback_group_size=64, batch_size=4
    )
    made.set_dtype(mx.bfloat16)
    save(folder, find(model), made, tokenizer, config)


@study(minutes=30)
def dwq(
    folder: Path,
    model: str = "smollm2",
    windows: int = 64,
    length: int = 256,
    rounds: int = 4,
    learning_rate: float = 1e-5,
) -> None:
    """Make a 4-bit checkpoint by mlx-lm's DWQ on this package's calibration data, for `calibrated-base`.

    Its own default is 2048 samples at a rate of 1e-6, which takes a GPU.

    Args:
        folder: Directory for the checkpoint.
        windows: Number of consecutive windows of the data. One in eight validates.
        length: Tokens of a window.
        rounds: Number of times that the data is read.
        learning_rate: Of Adam.
    """
    read = [(window, 0) for window in np.array(calibration_tokens(model, windows, length)).tolist()]
    validation, training = read[::8], [pair for place, pair in enumerate(read) if place % 8]
    original, tokenizer, config = load(model, return_config=True)
    made, config = quantize_model(load(model)[0], config, DEFAULT_GROUP_SIZE, 4)
    made.set_dtype(mx.float32)  # which NumPy has
    teacher = Gearbox(original, "4,16", kernels="native")
    teacher.shift(teacher.ladder.top)
    with (
        patch.object(mx, "quantized_matmul", quantized_product),
        patch.object(mx.fast, "scaled_dot_product_attention", causal_attention),
    ):
        mlx_lm_dwq.dwq_quantize(
            made,
            lambda batch, number, split: original(batch),
            Adam(learning_rate=learning_rate, bias_correction=True),
            training * rounds,
            validation,
            batch_size=4,
            max_seq_length=length + 1,
            seed=0,
            dtype=mx.float32,
        )
    made.set_dtype(mx.bfloat16)
    save(folder, find(model), made, tokenizer, config)


def calibration_tokens(model: str, windows: int, length: int) -> mx.array:
    """Return this package's calibration data for a model, (windows, length) tokens: texts, and its own answers."""
    geared, tokenizer = load(model)
    text = text_of(tokenizer, None)
    with progress_bar() as progress:
        texts = text.sequences + answered(geared, tokenizer, text.requests, progress)
    tokens = [token for each in texts for token in each][: windows * length]
    return mx.array(tokens[: len(tokens) // length * length]).reshape(-1, length)


def base_of(name: str | None, format: str) -> dict[str, Any]:
    """Return a lowest gear that is calibrated with what ships."""
    model, tokenizer = load(name)
    return {"base": shipped_base(model, tokenizer, get_format(format), (4, 16)).layers}


def written(gearbox: Gearbox, tokenizer: Any, prompts: int) -> list[tuple[str, list[int], list[int]]]:
    """Kind, prompt and the original's greedy answer, as tokens."""
    questions = [row["question"] for row in read_rows(HELD_OUT, ("question",))]
    kinds = {"mathematics": questions, "chat": CHAT.splitlines(), "code": CODE.splitlines()}
    made = []
    for kind, texts in kinds.items():
        for text in texts[:prompts]:
            prompt = encoded(tokenizer, text)
            responses = stream_generate(gearbox.model, tokenizer, prompt, LENGTH, mode="static", gearbox=gearbox)
            made.append((kind, prompt, [response.token for response in responses]))
    return made


def encoded(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(f"Question: {text}\nAnswer:"))
    message = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def agreement(gearbox: Gearbox, answers: Sequence[tuple[str, list[int], list[int]]]) -> dict[str, float]:
    """Return the share of the answers' tokens that the lowest gear chooses too, by kind."""
    gearbox.shift(gearbox.ladder[0])
    right: dict[str, list[np.ndarray]] = {}
    for kind, prompt, answer in answers:
        logits = gearbox.model(mx.array([prompt + answer]))[0, len(prompt) - 1 : -1]
        right.setdefault(kind, []).append(np.array(mx.argmax(logits, -1)) == np.array(answer))
    shares = {kind: float(np.concatenate(agrees).mean()) for kind, agrees in right.items()}
    return shares | {"all": float(np.concatenate([agrees for each in right.values() for agrees in each]).mean())}


def predicted(gearbox: Gearbox, window: Sequence[int], gear: Gear) -> Iterable[TextPrediction]:
    """Return a gear's predictions of a window's second half."""
    return islice(read_at_once(gearbox, window, gear), CONTEXT // 2, None)


def against_top(
    gearbox: Gearbox, windows: Sequence[Sequence[int]], top: Sequence[Sequence[TextPrediction]]
) -> dict[str, float]:
    """Return the figures of llama.cpp's --kl-divergence for the lowest gear; {} without windows."""
    if not windows:
        return {}
    parts = [
        recording_of(predicted(gearbox, window, gearbox.ladder[0]), [each.logprobs for each in reference])
        for window, reference in zip(windows, top)
    ]
    low = joined_recordings(parts)
    top_nll = np.array([-each.logprobs[each.target] for reference in top for each in reference])
    return quality(low.nll, low.kl, low.kl_reverse, low.agree, top_nll)
