"""Tokens per second of every gear, on native kernels and on MLX's own."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...cli.gearbox import settle_gears
from ...cli.gears import LayoutSettings
from ...cli.parsers.benchmark import HEAD, DecodeBenchmark, parse_shape
from ...cli.terminal import progress_bar
from ...errors import GearbxError
from ...gears.cost import break_even_tokens
from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear, Ladder
from ...kernels.dispatch import on_cpu
from ...loading import load
from .machine import GIBIBYTE, GIGABYTE, INT8, INT16, MLX, NATIVE, Meter, bandwidth_meter, paths_here, timed
from .memory import check_memory

SLOW_TOKENS = 2  # in a trial of MLX's own kernels on a CPU
PROMPT = [1, 2, 3]
VOCABULARY = 32000


@dataclass
class Case:
    """A gear on a path, and what the trials measured: seconds per token, seconds of a shift into it, peak memory."""

    path: str
    gear: Gear
    gearbox: Gearbox
    seconds: list[float] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def seconds_per_token(self) -> float:
        return statistics.median(self.seconds)

    @property
    def shift_seconds(self) -> float:
        return statistics.median(self.shifts)


def benchmark_decode(settings: DecodeBenchmark) -> list[dict[str, Any]]:
    """A row for each gear on each path; trials go through all of them in turn.

    Raises:
        GearbxError: a model that cannot be loaded, or more than memory allows.
    """
    ladder = settle_gears(settings.model, LayoutSettings(gears=settings.gears)).gears
    paths = paths_here()
    if settings.model is None:
        check_llama(settings.shape, ladder, len(paths), settings.context)
    read_bandwidth = bandwidth_meter()
    cases = cases_of(settings.model, settings.shape, ladder)
    bandwidths = time_cases(cases, settings.trials, settings.tokens, settings.context, read_bandwidth)
    bandwidth = statistics.median(bandwidths)
    shared = {
        "context": settings.context,
        "read_bandwidth_gigabytes_per_second": bandwidth,
        "trials": settings.trials,
    } | read_bandwidth.row
    return [row_of(case, cases, ladder.top, bandwidth) | shared for case in cases]


def cases_of(model: str | None, shape: str, ladder: Ladder) -> list[Case]:
    """Every gear on every path; each path has a model of its own."""
    cases = []
    for path, kernels, activations in paths_here():
        gearbox = Gearbox(load_or_make(model, shape), ladder, kernels=kernels, activations=activations)
        # Weights that are not packed meet activations as they are.
        cases += [Case(path, gear, gearbox) for gear in ladder if path not in (INT16, INT8) or not gear.dense]
    return cases


def time_cases(cases: Sequence[Case], trials: int, tokens: int, context: int, read_bandwidth: Meter) -> list[float]:
    """Fill in what the trials measure. Returns the read bandwidths that were measured between them, in GB/s."""
    bandwidths = []
    with progress_bar() as progress:
        for trial in progress.track(range(trials + 1), description="trials"):
            for case in cases:
                bandwidths.append(read_bandwidth())
                shift = case.gearbox.shift(case.gear)
                mx.reset_peak_memory()
                few = SLOW_TOKENS if case.path == MLX and on_cpu() else tokens
                spent = decode_seconds(case.gearbox.model, few, context)
                case.peak_memory = mx.get_peak_memory()
                if trial:  # the first one is a warm-up
                    case.seconds.append(spent)
                    case.shifts.append(shift)
    return bandwidths


def row_of(case: Case, cases: Sequence[Case], top: Gear, bandwidth: float) -> dict[str, Any]:
    """The row of a case, apart from what all rows share.

    Ratios are to MLX's own top gear, speedups to the top gear of the same path. bandwidth: in GB/s.
    """
    tops = {other.path: other.seconds_per_token for other in cases if other.gear == top}
    base, seconds = tops[MLX], case.seconds_per_token
    in_top = tops[case.path if case.path in tops else NATIVE]
    read = case.gearbox.weight_bytes_per_token(case.gear)
    return {
        "gear": case.gear.name,
        "bits": case.gear.bits,
        "path": case.path,
        "tokens_per_second": 1 / seconds,
        "ratio": base / seconds,
        "spread": [base / max(case.seconds), base / min(case.seconds)],
        "weight_bytes_per_token": read,
        "speedup": in_top / seconds,
        "predicted_speedup": case.gearbox.predicted_speedup(case.gear),
        "shift_seconds": case.shift_seconds,
        "roofline_share": read / (bandwidth * GIGABYTE) / seconds,
        "break_even_tokens": break_even_tokens(case.shift_seconds, in_top, seconds),
        "peak_memory_bytes": case.peak_memory,
    }


def load_or_make(model: str | None, shape: str) -> nn.Module:
    """The model that is named, or a random Llama."""
    return random_llama(shape) if model is None else load(model)[0]


def check_llama(shape: str, ladder: Ladder, copies: int, context: int = 0) -> None:
    """Raises GearbxError where copies of the random Llama and one KV cache do not fit into memory."""
    what = f"--shape {shape} --context {context}" if context else f"--shape {shape}"
    check_memory(llama_bytes(shape, ladder, copies, context), what)


def llama_bytes(shape: str, ladder: Ladder, copies: int, context: int) -> float:
    """Bytes that copies of the random Llama take at least, with one KV cache of `context` tokens.

    Weights are of half precision, with those of the largest gear beside them; keys and values are float32.
    """
    width, layers = parse_shape(shape)
    weights = layers * (3 + 3 * 11 / 4) * width**2 + 2 * VOCABULARY * width
    cached = 2 * mx.float32.size * context * layers * key_heads(width) * HEAD
    return copies * weights * (2 + max(ladder.quantized_bits, default=0) / 8) + cached + GIBIBYTE


def key_heads(width: int) -> int:
    """Heads of keys and values of the random Llama: half as many as of queries."""
    return width // (2 * HEAD)


def random_llama(shape: str) -> nn.Module:
    """A Llama of WIDTHxLAYERS in bfloat16: MLP 2.75 times as wide, heads of 64, half as many for keys and values.

    Raises:
        GearbxError: a shape that is not of that form.
    """
    width, layers = parse_shape(shape)
    mx.random.seed(0)
    sizes = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": key_heads(width),
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(sizes))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def decode_seconds(model: nn.Module, tokens: int, context: int = 0) -> float:
    """Seconds per token of mlx-lm's greedy decoding, after the first token.

    Args:
        context: further tokens before the prompt, whose keys and values are random.

    Raises:
        GearbxError: a context that the model's cache does not take, or that does not fit into memory.
    """
    cache = make_prompt_cache(model)
    if context:
        fill_cache(model, cache, context)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=tokens + 1, prompt_cache=cache)
    next(steps)
    return timed(lambda: [token for token, _ in steps]) / tokens


def fill_cache(model: nn.Module, cache: Sequence[Any], context: int) -> None:
    """Put random keys and values of further tokens into a KV cache."""
    model(mx.array([PROMPT]), cache=cache)  # gives keys and values their shapes
    needed = 0
    for layer in cache:
        if not isinstance(layer, KVCache):
            raise GearbxError(f"--context {context}: the model has a {type(layer).__name__}; leave it out")
        needed += sum(array.nbytes // array.shape[2] for array in (layer.keys, layer.values)) * context
    check_memory(needed, f"--context {context}")
    for layer in cache:
        shapes = ((*array.shape[:2], context, array.shape[3]) for array in (layer.keys, layer.values))
        layer.update_and_fetch(*(mx.random.normal(shape, layer.keys.dtype, key=mx.random.key(0)) for shape in shapes))
    mx.eval([layer.state for layer in cache])
