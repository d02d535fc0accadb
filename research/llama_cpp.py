"""Comparison of gears with llama.cpp, alternating within one run.

compare-llama-cpp: decoding and prefill of a random Llama in several widths. same-file: ms/token of a real model from
one GGUF file, and the savings of drafts on both sides.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from urllib.request import Request, urlopen

import gguf
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from pages import table
from rich.progress import track

from gearbx_mlx import Gearbox, Lossless
from gearbx_mlx.benchmark import parse_shape
from gearbx_mlx.benchmark.decode import FIRST_TOKENS, decode_seconds, random_llama
from gearbx_mlx.benchmark.measuring import BandwidthMeter, spread_of, timed
from gearbx_mlx.cli.prompt import read_prompts
from gearbx_mlx.cli.tables import speed
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.files import smollm2
from gearbx_mlx.files.writing import write_text
from gearbx_mlx.loading import find, read_config

from . import ROOT
from .lossless import ASSISTANT, Writer, first_prompts, written_in_turn
from .real_models import gguf_of
from .studies import (
    HELD_OUT,
    Found,
    by_kernels,
    named,
    native_kernels,
    ratios,
    results_in_turn,
    spread,
    study,
    table_here,
)

BEST, GREEDY_TOKENS = 5, 16
ODD_TEXTS = (
    "The 3 brothers paid $1,234.50 on 12/03/2024.",
    "def f(x):\n    return x ** 2\n\n\tprint(f(10))\n",
    "naïve café, 漢字かな, Привет, 🙂👍🏽, don't",
    " a  b\tc   \n\n  d",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "https://example.org/a_b?c=1&d=%20#e",
)
TYPES = {4: "Q4_0", 8: "Q8_0", 16: "F16"}  # of llama.cpp, by the bits of our gears
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(path: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    owner = path.removesuffix(".weight")
    if owner in NAMES:
        return f"{NAMES[owner]}.weight"
    number, _, rest = owner.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection in llama.cpp's order of rotation.

    mlx-lm rotates row i of a head together with row i + half, llama.cpp rows 2 i and 2 i + 1.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def in_their_order(path: str, weight: np.ndarray, args: Any) -> np.ndarray:
    """Return a weight as llama.cpp expects it: queries and keys have their rows interleaved."""
    if "q_proj" in path:
        return interleaved(weight, args.num_attention_heads)
    if "k_proj" in path:
        return interleaved(weight, args.num_key_value_heads)
    return weight


def write_gguf(model: Any, file: Path, kind: str, context: int) -> None:
    """Write every matrix in a type of llama.cpp, and norms in float32. A tied head is the embeddings there too.

    There is no tokenizer: llama.cpp takes and gives token ids alone.

    Args:
        kind: Q4_0, Q8_0, F16 or F32.
        context: tokens that the model is said to be for.
    """
    args, target = model.args, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_rope_dimension_count(args.hidden_size // args.num_attention_heads)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_vocab_size(args.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for path, array in tree_flatten(model.parameters()):
        weight = in_their_order(path, np.array(array.astype(mx.float32)), args)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(path), weight)
        else:
            writer.add_tensor(gguf_name(path), gguf.quants.quantize(weight, target), raw_dtype=target)
    write_out(writer)


def write_out(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BATCH = 512  # llama.cpp's default


def open_model(file: Path, context: int, threads: int) -> Any:
    """Return a GGUF file in memory, as a `llama_cpp.Llama`, with its flash attention and a KV cache in float16.

    Args:
        context: tokens that its KV cache has room for.
    """
    import llama_cpp

    return llama_cpp.Llama(
        str(file),
        n_ctx=context,
        n_batch=BATCH,
        n_threads=threads,
        n_threads_batch=threads,
        use_mmap=False,  # so that q4_0 is put into the order of its fastest product
        flash_attn=True,
        verbose=False,
    )


def favourite(model: Any) -> int:
    """Return the token with the largest of the last logits."""
    import llama_cpp

    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())


def read_again(model: Any, tokens: Sequence[int], keep: int = 0) -> None:
    """Compute the tokens that follow the first `keep` ones of the KV cache; forget what followed them before."""
    model.n_tokens = keep
    model.eval(tokens)


def follow(model: Any) -> Iterator[int]:
    """Yield the greedy continuation of what the model has read, computed as it is asked for."""
    while True:
        token = favourite(model)
        yield token
        model.eval([token])


THEIRS = "llama.cpp"
PAUSE = 0.02  # seconds until threads that wait for work sleep

Clock = Callable[[], float]  # seconds per token, when called


def spent_in_turn(clocks: Mapping[str, Clock], trials: int, read_bandwidth: Clock) -> tuple[dict[str, Any], float]:
    """Return seconds per token of each clock and trial, alternating after a warm-up, and the median bandwidth, GB/s."""

    def after_a_pause(clock: Clock) -> float:
        time.sleep(PAUSE)
        seconds = clock()
        mx.synchronize()  # mlx-lm begins one token more than it hands out
        return seconds

    works = {name: partial(after_a_pause, clock) for name, clock in clocks.items()}
    found = results_in_turn({"bandwidth": read_bandwidth, **works}, trials)
    return found, statistics.median(found.pop("bandwidth"))


def compared(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return tokens per second of both, and the speed over llama.cpp's: median, smallest and largest of the trials."""
    times = ratios(theirs, ours)
    return {
        "tokens_per_second": 1 / statistics.median(ours),
        "llama_cpp_tokens_per_second": 1 / statistics.median(theirs),
        "ratio": statistics.median(times),
        "spread": spread_of(times),
    }


def rows_of(spent: Mapping[str, list[float]], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each activations of ours, beside llama.cpp's times."""
    return [
        shared | {"activations": name} | compared(seconds, spent[THEIRS])
        for name, seconds in spent.items()
        if name != THEIRS
    ]


GEARS = ",".join(map(str, TYPES))
STEP = 256  # tokens, to which llama.cpp rounds the room for a context

Rows = list[dict[str, Any]]


class RandomModels:
    """The same random Llama for both sides: a gearbox for each kind of activations, and each type of llama.cpp.

    Args:
        room: tokens that llama.cpp's KV cache has to take.
    """

    def __init__(
        self, shape: tuple[int, int], activations: Sequence[str], room: int, trials: int, folder: Path, threads: int
    ) -> None:
        room = -(-room // STEP) * STEP
        self.gearboxes = {
            name: Gearbox(random_llama(shape), GEARS, kernels="native", activations=name) for name in activations
        }
        self.peers, self.bytes, self.trials, self.read_bandwidth = {}, {}, trials, BandwidthMeter()
        model = random_llama(shape)
        self.vocabulary = model.args.vocab_size
        for bits, kind in TYPES.items():
            file = folder / f"{kind}.gguf"
            write_gguf(model, file, kind, room)
            self.bytes[bits] = file.stat().st_size
            self.peers[bits] = open_model(file, room, threads)
            file.unlink()

    def tokens(self, count: int) -> list[int]:
        return np.random.default_rng(0).integers(self.vocabulary, size=count).tolist()

    def compare(self, bits: int, ours: Callable[[Any], float], theirs: Clock, shared: dict[str, Any]) -> Rows:
        """Time the gear of some bits of each gearbox, and llama.cpp's type of as many.

        Args:
            ours: seconds per token of a model.
        """
        gearboxes = self.gearboxes
        if bits == 16:  # beside weights of bfloat16 all activations but `float` are rounded alike
            first = next(iter(gearboxes))
            gearboxes = {"float" if first == "float" else "bfloat16": gearboxes[first]}
        clocks: dict[str, Clock] = {}
        for name, gearbox in gearboxes.items():
            gearbox.shift(bits)
            clocks[name] = partial(ours, gearbox.model)
        spent, bandwidth = spent_in_turn(clocks | {THEIRS: theirs}, self.trials, self.read_bandwidth)
        sizes = {
            "bits": bits,
            "llama_cpp_type": TYPES[bits].lower(),
            "weight_bytes_per_token": gearbox.weight_bytes_per_token(gearbox.gear),
            "llama_cpp_file_bytes": self.bytes[bits],
            "read_bandwidth_gigabytes_per_second": bandwidth,
        }
        return rows_of(spent, sizes | shared)


def decode_rows(models: RandomModels, contexts: Sequence[int], tokens: int) -> Rows:
    """Greedy tokens after each context. Our keys and values of a context are random, which does not change the time."""
    rows: Rows = []
    text, kept = models.tokens(max(contexts) + len(FIRST_TOKENS)), 0
    for context in sorted(contexts):
        read = text[: context + len(FIRST_TOKENS)]  # decode_seconds puts its prompt after the context
        ours = partial(decode_seconds, tokens=tokens, context=context)
        for bits, peer in track(models.peers.items(), f"context {context}"):
            read_again(peer, read[kept:], kept)
            theirs = partial(decoding_seconds, peer, read, tokens)
            rows += models.compare(bits, ours, theirs, {"context": context})
        kept = len(read)
    return rows


def decoding_seconds(peer: Any, read: list[int], tokens: int) -> float:
    """Return seconds per token of llama.cpp, after tokens that its KV cache begins with."""
    read_again(peer, read[-1:], len(read) - 1)
    return timed(lambda: [*islice(follow(peer), tokens + 1)]) / tokens  # the first one is known already


def prompt_rows(models: RandomModels, lengths: Sequence[int]) -> Rows:
    """Prompts up to the first token of their answers: seconds per token of a prompt."""
    rows: Rows = []
    for length in lengths:
        prompt = models.tokens(length)
        ours = partial(first_token_seconds, prompt=prompt)
        for bits, peer in track(models.peers.items(), f"prompt {length}"):
            rows += models.compare(bits, ours, partial(reading_seconds, peer, prompt), {"prompt_tokens": length})
    return rows


def reading_seconds(peer: Any, prompt: list[int]) -> float:
    """Return seconds per token of a prompt, until llama.cpp knows the first token after it."""

    def first_after() -> int:
        read_again(peer, prompt)
        return favourite(peer)

    return timed(first_after) / len(prompt)


def first_token_seconds(model: Any, prompt: list[int]) -> float:
    """Return seconds per token of the prompt, until mlx-lm hands out the first token after it."""
    steps = generate_step(mx.array(prompt), model, max_tokens=1)
    return timed(lambda: next(steps)) / len(prompt)


LENGTHS = {"decode": "context", "prompt": "prompt_tokens"}  # of a row of each subject
HEAD = ["bits", "llama.cpp's type", "activations", "gearbx-mlx, tokens/s", "llama.cpp, tokens/s", "ratio", "spread"]


def table_of(subject: str, rows: Rows) -> str:
    """Return the rows of a subject: decode or prompt."""
    length = LENGTHS[subject]
    cells = [
        [
            *(row[length], row["bits"], row["llama_cpp_type"], row["activations"]),
            *(speed(row["tokens_per_second"]), speed(row["llama_cpp_tokens_per_second"])),
            *(f"{row['ratio']:.2f}", "-".join(f"{number:.2f}" for number in row["spread"])),
            f"{row['read_bandwidth_gigabytes_per_second']:.1f}",
        ]
        for row in rows
    ]
    return table([length.removeprefix("prompt_"), *HEAD, "read, GB/s"], cells)


def versions() -> dict[str, str]:
    """Raises GearbxError where a package is missing."""
    try:
        import llama_cpp
    except ImportError as error:
        raise GearbxError(f"{error.name} is not installed: pip install llama-cpp-python") from error
    return {"llama_cpp_python": llama_cpp.__version__}


Subject = Literal["decode", "prompt"]
Activations = Literal["float", "int16", "int8"]


@study("docs/performance.md", minutes=60)
def compare_llama_cpp(
    subjects: list[Subject] = ["decode", "prompt"],  # noqa: B006 - nothing changes it
    shape: str = "1024x24",
    contexts: list[int] = [1, 1000, 4000],  # noqa: B006
    prompts: list[int] = [16, 128, 512, 4000],  # noqa: B006
    tokens: int = 16,
    activations: list[Activations] = ["int16", "int8"],  # noqa: B006
    trials: int = 5,
) -> Found:
    """Compare gears with llama.cpp (pip install llama-cpp-python), alternating within one run.

    decode: tokens of a random Llama after contexts of several lengths. prompt: prompts of several lengths for the same
    Llama, up to the first token of the answer.

    The model is written as GGUF files in f16, q8_0 and q4_0 in a temporary directory, with the rows of queries and keys
    in the order that llama.cpp rotates. Both sides have the same number of threads (GEARBX_THREADS, or one per core).
    llama.cpp keeps keys and values in 16 bits, this package in 32. Do not run other programs meanwhile: llama.cpp's
    threads wait for each other without sleeping.

    Args:
        shape: WIDTHxLAYERS.
        prompts: Lengths of the prompts.
        tokens: Tokens decoded in a trial.
        activations: Activation quantization of this package's gears, alternating.
    """
    installed = versions()
    size = parse_shape(shape)
    given = {"trials": (trials, 1), "tokens": (tokens, 1), "contexts": (min(contexts), 0), "prompts": (min(prompts), 1)}
    for name, (value, least) in given.items():
        if value < least:
            raise GearbxError(f"--{name} {value}: is too few; give {least} or more")
    threads, found = native_kernels().threads(), {}
    room = max(*contexts, *prompts) + tokens + len(FIRST_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        models = RandomModels(size, activations, room, trials, Path(folder), threads)
        if "decode" in subjects:
            found["decode"] = decode_rows(models, contexts, tokens)
        if "prompt" in subjects:
            found["prompt"] = prompt_rows(models, prompts)
    tables = {f"llama_cpp_{subject}": table_of(subject, found[subject]) for subject in found}
    return Found(tables, found | {"threads": threads} | installed)


# A real model from the same file

CONTEXT = 2048
server: Any = None  # of llama.cpp, in a child
Write = Callable[[list[int], int], tuple[str, float]]
"""A text after the tokens of a prompt, and the milliseconds of a token."""


def rewritten(file: Path, out: Path, type: Literal["F16", "Q8_0"]) -> Path:
    """Return the same model in float16 or Q8_0, and all else as it was."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        kinds = field.types
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{type}"])
    kind = gguf.GGMLQuantizationType[type]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    write_out(writer)
    return out


Drafts = Path | Literal["lookup"] | None
"""A draft model, or what the text itself proposes."""


def in_llama_cpp(file: Path, drafts: Drafts = None) -> Write:
    """Writes greedily with llama.cpp, in a process of its own.

    Where threads of several models share a process, libgomp lets them sleep at every barrier.

    Raises:
        GearbxError: llama.cpp is not installed.
    """
    child = llama_cpp_in_child(file, drafts)
    return lambda prompt, tokens: child.submit(answered, prompt, tokens).result()


def llama_cpp_in_child(file: Path, drafts: Drafts = None) -> ProcessPoolExecutor:
    """Raises GearbxError where llama.cpp is not installed."""
    if find_spec("xllamacpp") is None:
        raise GearbxError("llama.cpp is not installed: pip install xllamacpp")
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=begin, initargs=(file, drafts))


def begin(file: Path, drafts: Drafts) -> None:
    """Load the model, in the child."""
    import xllamacpp

    global server
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity, params.warmup = CONTEXT, 1, -1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    kinds = xllamacpp.common_speculative_type
    if drafts == "lookup":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    elif drafts is not None:
        params.speculative.draft.mparams.path = str(drafts)
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(params)


def read_there(text: str) -> dict[str, Any]:
    """Return the tokens of a text in llama.cpp, and the likeliest tokens after it with their log-probabilities."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        tokens = json.load(answer)["tokens"]
    asked = {"prompt": tokens, "max_tokens": GREEDY_TOKENS, "temperature": 0, "logprobs": BEST, "cache_prompt": False}
    choice = server.handle_completions(asked)["choices"][0]
    best = choice["logprobs"]["content"][0]["top_logprobs"]
    return {
        "text": text,
        "tokens": tokens,
        "best": {each["id"]: round(each["logprob"], 4) for each in best},
        "greedy": [each["id"] for each in choice["logprobs"]["content"]],
    }


def answered(prompt: list[int], tokens: int) -> tuple[str, float]:
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "cache_prompt": False}
    answer = server.handle_completions(asked)
    times = answer["timings"]
    return answer["choices"][0]["text"], times["predicted_ms"] / times["predicted_n"]


def here(writer: Writer, way: Callable[[list[int], int], tuple[list[int], float]]) -> Write:
    def write(prompt: list[int], tokens: int) -> tuple[str, float]:
        written, seconds = way(prompt, tokens)
        ends = writer.tokenizer.eos_token_ids
        return writer.tokenizer.decode([token for token in written if token not in ends]), 1000 * seconds

    return write


@study("docs/performance.md", minutes=10)
def same_file(
    prompts: list[Path] = [HELD_OUT, ASSISTANT],  # noqa: B006 - nothing changes it
    num_prompts: list[int] = [4, 8],  # noqa: B006
    model: str = smollm2.SMOLLM2,
    max_tokens: int = 100,
    pairs: int = 3,
) -> Found:
    """Compare the time per token of a real model in llama.cpp and here, from the same file, alternating.

    SmolLM2's file is Q4_1, others are Q4_K_M. Both sides also unpack it to 16 bits, and use 4 bits as the draft.
    Prefill is not counted. With GEARBX_CPU=avx2, the kernels here use only AVX2, as llama.cpp's do.

    Args:
        prompts: Files with one prompt per line, or JSON Lines as in GSM8K.
        model: A model fetched by real-models, or smollm2.
        num_prompts: Number of prompts of each file.
        pairs: Trials of a prompt.
    """
    file, packed = gguf_of(model), f"llama.cpp, {'Q4_1' if model == smollm2.SMOLLM2 else 'Q4_K_M'}"
    plain = Writer(model, "4,16", "planes", Lossless())
    drafted = Writer(model, "4,16", "planes", Lossless(), calibrated=True)
    sixteen = read_config(find(model))["torch_dtype"]
    with tempfile.TemporaryDirectory() as directory:
        whole = rewritten(file, Path(directory) / "f16.gguf", "F16")
        eight = rewritten(file, Path(directory) / "q8_0.gguf", "Q8_0")
        ways = {
            "llama.cpp, float16": in_llama_cpp(whole),
            "llama.cpp, Q8_0": in_llama_cpp(eight),
            packed: in_llama_cpp(file),
            "llama.cpp, float16, lookup": in_llama_cpp(whole, "lookup"),
            f"llama.cpp, float16, drafts by {packed.rpartition(' ')[2]}": in_llama_cpp(whole, file),
            f"here, {sixteen}": here(plain, plain.alone),
            f"here, {sixteen}, lossless": here(plain, plain.lossless),
            f"here, {sixteen}, lossless, calibrated": here(drafted, drafted.lossless),
        }
        asked = first_prompts(plain.tokenizer, prompts, num_prompts)
        found = written_in_turn(ways, asked, max_tokens, pairs)
    first = next(iter(ways))
    times = {name: [spent for texts in trials for _, spent in texts] for name, trials in found.items()}
    rows = [
        [
            name,
            spread(times[name]),
            spread(ratios(times[first], times[name])),
            f"{sum(theirs[0][0] == ours[0][0] for theirs, ours in zip(found[first], trials))} of {len(asked)}",
        ]
        for name, trials in found.items()
    ]
    title = f"{named(model)}, {len(asked)} prompts, {max_tokens} tokens"
    head = [title, "ms/token: median (range)", "speedup", "identical outputs"]
    return Found({by_kernels("same_file"): table_here(head, rows)}, found)


@study(writes="tests/data/llama_cpp_MODEL.json", minutes=2)
def llama_cpp_reference(model: str = smollm2.SMOLLM2, others: int = 44) -> None:
    """Record llama.cpp's tokens, log-probabilities and greedy outputs for a GGUF file, for a test.

    Args:
        model: A model fetched by real-models, or smollm2.
        others: Number of ordinary prompts besides the unusual ones.
    """
    texts = [*ODD_TEXTS, *[*read_prompts(HELD_OUT)[:20], *read_prompts(ASSISTANT)][-others:]]
    child = llama_cpp_in_child(gguf_of(model))
    read = [child.submit(read_there, text).result() for text in track(texts, "texts")]
    file = ROOT / "tests" / "data" / f"llama_cpp_{named(model)}.json"
    write_text(file, json.dumps(read, ensure_ascii=False, indent=0) + "\n")
