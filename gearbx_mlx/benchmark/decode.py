"""The benchmark `decode`: speed of every gear of a model or a random Llama, with native and with MLX's kernels."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..cli.build import decided
from ..cli.decide import JustGears
from ..cli.flags import LayoutSettings, ModelSettings, output_path
from ..cli.terminal import progress_bar
from ..errors import GearbxError
from ..files.writing import write_text
from ..gears.cost import break_even_tokens
from ..gears.gearbox import Gearbox, predicted_speedup
from ..gears.ladder import Gear, Ladder
from ..kernels.dispatch import on_cpu
from ..loading import load
from ..telemetry.summary import as_json
from . import HEAD_WIDTH, DecodeBenchmark, ModelBenchmark
from .measuring import (
    GIBIBYTE,
    GIGABYTE,
    INT8,
    INT16,
    MLX_PATH,
    BandwidthMeter,
    Rows,
    check_room,
    machine_name,
    paths_here,
    print_table,
    spread_of,
    timed,
)

BANDWIDTH = "read_bandwidth_gigabytes_per_second"
FIRST_TOKENS = [1, 2, 3]
DECODED_TOKENS = 32000
DECODE_COLUMNS = (
    *("gear", "bits", "path", "tokens_per_second", "ratio", "spread", "weight_bytes_per_token"),
    *("speedup", "predicted_speedup", "roofline_share", "break_even_tokens"),
)


def run(settings: DecodeBenchmark) -> int:
    """Print the rows as a table, and write them to a file, if any."""
    out = None if settings.json is None else output_path(settings.json)
    machine = machine_name()
    rows = [row | {"machine": machine} for row in benchmark_decode(settings)]
    print_table(rows, DECODE_COLUMNS)
    bandwidth, source, threads = (rows[0][name] for name in (BANDWIDTH, "read_by", "threads"))
    read_by = f"{threads} threads" if threads else f"MLX's sum on the {source.removeprefix('mlx ').upper()}"
    print(f"read bandwidth {bandwidth:.1f} GB/s, {read_by}, {machine}")
    if out is not None:
        write_text(out, as_json({"rows": rows}))
    return 0


@dataclass
class GearCase:
    """A gear on a path, with measurements: seconds per token, seconds of a shift into it, peak memory in bytes."""

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


def benchmark_decode(settings: DecodeBenchmark) -> Rows:
    """Return a row for each gear on each path; all alternate within a trial.

    Raises:
        GearbxError: a model that cannot be loaded, or does not fit into memory.
    """
    check_gears(settings, len(paths_here()), settings.context)
    read_bandwidth, cases = BandwidthMeter(), list[GearCase]()
    for path, kernels, activations in paths_here():  # each path has its own model
        gearbox = Gearbox(model_of(settings), settings.gears, kernels=kernels, activations=activations)
        # With bfloat16 weights both paths round activations to that type.
        gears = [gear for gear in gearbox.ladder if path != INT8 or not gear.dense]
        cases += [GearCase(path, gear, gearbox) for gear in gears]
    bandwidth = statistics.median(time_cases(cases, settings, read_bandwidth))
    shared = {
        "context": settings.context,
        BANDWIDTH: bandwidth,
        "trials": settings.trials,
    } | read_bandwidth.row
    return [case_row(case, cases, gearbox.ladder.top, bandwidth) | shared for case in cases]


def time_cases(cases: Sequence[GearCase], settings: DecodeBenchmark, read_bandwidth: BandwidthMeter) -> list[float]:
    """Run the trials of all cases. Return the read bandwidths measured between them, in GB/s."""
    bandwidths = []
    for trial in trials(settings.trials):
        for case in cases:
            bandwidths.append(read_bandwidth())
            shift = case.gearbox.shift(case.gear)
            mx.reset_peak_memory()
            tokens = 2 if case.path == MLX_PATH and on_cpu() else settings.tokens  # MLX's own kernels are slow on a CPU
            spent = decode_seconds(case.gearbox.model, tokens, settings.context)
            case.peak_memory = mx.get_peak_memory()
            if trial:
                case.seconds.append(spent)
                case.shifts.append(shift)
    return bandwidths


def trials(count: int) -> Iterator[int]:
    """Yield 0 to count with a progress bar. Trial 0 is the warm-up."""
    with progress_bar() as progress:
        yield from progress.track(range(count + 1), description="trials")


def case_row(case: GearCase, cases: Sequence[GearCase], top: Gear, bandwidth: float) -> dict[str, Any]:
    """Return the row of a case, without the fields that all rows share.

    Ratios are to the top gear with MLX's kernels, speedups to the top gear of a path with the same rounding.
    bandwidth: in GB/s.
    """
    tops = {other.path: other.seconds_per_token for other in cases if other.gear == top}
    base, seconds = tops[MLX_PATH], case.seconds_per_token
    in_top = tops[INT16 if case.path == INT8 else case.path]
    read = case.gearbox.weight_bytes_per_token(case.gear)
    return {
        "gear": case.gear.name,
        "bits": case.gear.bits,
        "path": case.path,
        "tokens_per_second": 1 / seconds,
        "ratio": base / seconds,
        "spread": spread_of([base / each for each in case.seconds]),
        "weight_bytes_per_token": read,
        "speedup": in_top / seconds,
        "predicted_speedup": predicted_speedup(case.gearbox, case.gear),
        "shift_seconds": case.shift_seconds,
        "roofline_share": read / (bandwidth * GIGABYTE) / seconds,
        "break_even_tokens": break_even_tokens(case.shift_seconds, in_top, seconds),
        "peak_memory_bytes": case.peak_memory,
    }


def check_gears(settings: ModelBenchmark, copies: int = 1, context: int = 0) -> None:
    """Validate the gears, and that copies of the random Llama and a KV cache fit into memory."""
    ladder = decided(JustGears(ModelSettings(settings.model), LayoutSettings(gears=settings.gears))).ladder
    if settings.model is None:
        what = "--shape {}x{}".format(*settings.shape) + (f" --context {context}" if context else "")
        check_room(llama_bytes(settings.shape, ladder, copies, context), what)


def model_of(settings: ModelBenchmark) -> nn.Module:
    """Return the model of --model, or a random Llama."""
    return random_llama(settings.shape) if settings.model is None else load(settings.model)[0]


def llama_bytes(shape: tuple[int, int], ladder: Ladder, copies: int, context: int) -> float:
    """Return the minimum bytes of copies of the random Llama, with one KV cache of `context` tokens.

    Weights have half precision, with the largest gear's beside them; keys and values are float32.
    """
    width, layers = shape
    weights = layers * (3 + 3 * 11 / 4) * width**2 + 2 * DECODED_TOKENS * width
    cached = 2 * mx.float32.size * context * layers * key_heads(width) * HEAD_WIDTH
    return copies * weights * (2 + max(ladder.quantized_bits, default=0) / 8) + cached + GIBIBYTE


def key_heads(width: int) -> int:
    """Return the number of KV heads of the random Llama: half as many as query heads."""
    return width // (2 * HEAD_WIDTH)


def random_llama(shape: tuple[int, int]) -> nn.Module:
    """Return a Llama in bfloat16: an MLP 2.75 times as wide, heads of 64, half as many KV heads."""
    width, layers = shape
    sizes = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // HEAD_WIDTH,
        "num_key_value_heads": key_heads(width),
        "rms_norm_eps": 1e-5,
        "vocab_size": DECODED_TOKENS,
        "tie_word_embeddings": False,
    }
    return random_model(sizes)


def random_model(sizes: Mapping[str, Any]) -> nn.Module:
    """Return a model of mlx-lm's class `sizes["model_type"]`, with the same random weights every time, in bfloat16."""
    module = import_module(f"mlx_lm.models.{sizes['model_type']}")
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(dict(sizes)))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def decode_seconds(model: nn.Module, tokens: int, context: int = 0) -> float:
    """Return seconds per token of mlx-lm's greedy decoding, after the first token.

    Args:
        context: additional tokens before the prompt, with random keys and values.

    Raises:
        GearbxError: a context that the model's cache does not accept, or that does not fit into memory.
    """
    cache = make_prompt_cache(model)
    if context:
        fill_cache(model, cache, context)
    steps = generate_step(mx.array(FIRST_TOKENS), model, max_tokens=tokens + 1, prompt_cache=cache)
    next(steps)
    return timed(lambda: [token for token, _ in steps]) / tokens


def fill_cache(model: nn.Module, cache: Sequence[Any], context: int) -> None:
    """Fill a KV cache with random keys and values of `context` tokens."""
    model(mx.array([FIRST_TOKENS]), cache=cache)  # gives keys and values their shapes
    needed = 0
    for layer in cache:
        if not isinstance(layer, KVCache):
            raise GearbxError(f"--context: needs a plain KVCache, got {type(layer).__name__}; omit it")
        needed += sum(array.nbytes // array.shape[2] for array in (layer.keys, layer.values)) * context
    check_room(needed, f"--context {context}")
    for layer in cache:
        shapes = ((*array.shape[:2], context, array.shape[3]) for array in (layer.keys, layer.values))
        layer.update_and_fetch(*(mx.random.normal(shape, layer.keys.dtype, key=mx.random.key(0)) for shape in shapes))
    mx.eval([layer.state for layer in cache])
