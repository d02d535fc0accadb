"""Tokens per second of every gear, on native kernels and on MLX's own."""

import argparse
import statistics
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache
from rich.progress import Progress

from ...cli import terminal
from ...cli.gears import settle_gears
from ...errors import GearbxError
from ...gears.cost import break_even_tokens
from ...gears.gearbox import Gearbox
from ...gears.ladder import Ladder
from ...loading import load
from .kernels import GIGABYTE, INT8, INT16, MLX, NATIVE, bandwidth_reader, native_module, timed

SLOW_TOKENS = 2  # of MLX's own kernels
PATHS = ((NATIVE, "native", "float"), (INT16, "native", "int16"), (INT8, "native", "int8"), (MLX, "mlx", "float"))
PROMPT = [1, 2, 3]


def random_llama(shape: str) -> nn.Module:
    """A Llama of WIDTHxLAYERS in bfloat16: MLP 2.75 times as wide, heads of 64, half as many for keys and values.

    Raises:
        GearbxError: a shape that is not of that form.
    """
    try:
        width, layers = (int(part) for part in shape.split("x"))
    except ValueError as error:
        raise GearbxError(f"--shape '{shape}' is not WIDTHxLAYERS, such as 1024x24") from error
    if width % 256 or width < 256 or layers < 1:
        raise GearbxError(f"--shape '{shape}': the width is a multiple of 256, and there is a layer")
    mx.random.seed(0)
    sizes = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(sizes))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def model_of(args: argparse.Namespace) -> nn.Module:
    return load(args.model)[0] if args.model else random_llama(args.shape)


def decode_seconds(model: nn.Module, tokens: int, context: int = 0) -> float:
    """Seconds per token of mlx-lm's greedy decoding, after the first token.

    Args:
        context: further tokens before the prompt, whose keys and values are random.

    Raises:
        GearbxError: a context for a model whose cache is another.
    """
    cache = make_prompt_cache(model)
    if context:
        model(mx.array([PROMPT]), cache=cache)  # to learn the shapes
        for layer in cache:
            if not isinstance(layer, KVCache):
                raise GearbxError(f"--context {context}: the model has a {type(layer).__name__}; leave it out")
            shapes = ((*held.shape[:2], context, held.shape[3]) for held in (layer.keys, layer.values))
            layer.update_and_fetch(
                *(mx.random.normal(shape, layer.keys.dtype, key=mx.random.key(0)) for shape in shapes)
            )
        mx.eval([layer.state for layer in cache])
    steps = generate_step(mx.array(PROMPT), model, max_tokens=tokens + 1, prompt_cache=cache)
    next(steps)
    return timed(lambda: [token for token, _ in steps]) / tokens


def benchmark_decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each gear on each path; trials go through all of them in turn.

    Raises:
        GearbxError: no native kernels, a shape or ladder that does not exist, a context below 0.
    """
    if args.context < 0:
        raise GearbxError(f"--context is {args.context}; give 0 or more")
    settle_gears(args)
    module, ladder = native_module(), Ladder.parse(args.gears)
    read_bandwidth = bandwidth_reader(module)
    boxes = {
        path: Gearbox(model_of(args), ladder, kernels=kernels, activations=activations)
        for path, kernels, activations in PATHS
    }
    # Weights that are not packed meet activations as they are.
    cases = [(path, gear) for path in boxes for gear in ladder if path not in (INT16, INT8) or not gear.dense]
    seconds: dict[tuple, list[float]] = {case: [] for case in cases}
    shifts: dict[tuple, list[float]] = {case: [] for case in cases}
    peaks: dict[tuple, int] = {}
    bandwidths: list[float] = []
    with Progress(console=terminal.messages, transient=True) as progress:
        for number in progress.track(range(args.trials + 1), description="trials"):
            for case in cases:
                path, gear = case
                bandwidths.append(read_bandwidth())
                shift = boxes[path].shift(gear)
                mx.reset_peak_memory()
                tokens = args.tokens if path != MLX else SLOW_TOKENS
                spent = decode_seconds(boxes[path].model, tokens, args.context)
                peaks[case] = mx.get_peak_memory()
                if number:  # the first round is a warm-up
                    seconds[case].append(spent)
                    shifts[case].append(shift)

    def top_of(path: str) -> tuple:
        return (path, ladder.top) if (path, ladder.top) in seconds else (NATIVE, ladder.top)

    median = {case: statistics.median(spent) for case, spent in seconds.items()}
    base = median[MLX, ladder.top]
    return [
        {
            "gear": gear.name,
            "bits": gear.bits,
            "path": path,
            "context": args.context,
            "tokens_per_second": 1 / median[path, gear],
            "ratio": base / median[path, gear],
            "spread": [base / max(spent), base / min(spent)],
            "weight_bytes_per_token": boxes[path].weight_bytes_per_token(gear),
            "speedup": median[top_of(path)] / median[path, gear],
            "predicted_speedup": boxes[path].predicted_speedup(gear),
            "shift_seconds": statistics.median(shifts[path, gear]),
            "roofline_share": boxes[path].weight_bytes_per_token(gear)
            / (statistics.median(bandwidths) * GIGABYTE)
            / median[path, gear],
            "break_even_tokens": break_even_tokens(
                statistics.median(shifts[path, gear]), median[top_of(path)], median[path, gear]
            ),
            "peak_memory_bytes": peaks[path, gear],
            "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
            "threads": module.threads(),
            "trials": args.trials,
        }
        for (path, gear), spent in seconds.items()
    ]
