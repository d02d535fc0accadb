"""The command `allocate`: finds bits for every layer of a gear, and stores them in the precision manifest."""

import statistics
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from msgspec import structs

from ..bit_selection.allocation import Allocator, MeasuredTable, gear_table
from ..bit_selection.precision import GearTable, fitted_to, read_precision
from ..bit_selection.sensitivity import calibration_windows, exact_of, single_layer_gearbox
from ..cli.build import load_original
from ..cli.flags import output_path
from ..cli.terminal import note, progress_bar, show_compiling
from ..errors import GearbxError, error_context
from ..files.writing import write_text
from ..gears.gearbox import Gearbox
from ..settings import human_bytes
from . import AllocateSettings, Target

TOKENS = 48  # tokens per timing


def run(settings: AllocateSettings) -> int:
    wanted, text = settings.allocation, settings.text
    file = Path(wanted.manifest)
    try:
        manifest = read_precision(file)
    except GearbxError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise GearbxError(f"{file}: no such manifest; use gearbx_mlx sensitivity to measure one") from error
        raise
    out = output_path(wanted.out or file)
    model, tokenizer, config = load_original(settings.model)
    windows = calibration_windows(model, tokenizer, config, text.data, text.num_samples, text.sequence_length)
    show_compiling()
    with error_context(file):
        manifest, _, missing = fitted_to(manifest, model)
        bits = {*manifest.bits, *wanted.bits}
        layout = manifest.format, manifest.group_size, manifest.manage
        gearbox = single_layer_gearbox(model, bits, *layout, settings.model.dtype, text.kernels)
    for path in missing:
        note(f"{file}: has no {path}, which stays at full precision")
    tables = dict(manifest.gears)
    with progress_bar() as progress:
        exact = exact_of(gearbox, windows, progress)
        task = progress.add_task("tables measured", total=None)
        allocator = Allocator(exact, manifest, wanted.within_ranges, wanted.exchanges, lambda: progress.advance(task))
        for gear, target in zip(wanted.bits, wanted.targets()):
            target = target or Target("bpw", 8 * uniform_bytes(gearbox, gear) / allocator.weights)
            tables[gear] = gear_table(find_table(allocator, target), str(target), allocator.weights)
            report(allocator, gear, tables[gear])
    write_text(out, structs.replace(manifest, gears=dict(sorted(tables.items()))).as_json())
    print(out)
    return 0


def uniform_bytes(gearbox: Gearbox, bits: int) -> int:
    """Return bytes of the managed layers if all of them have these bits."""
    return sum(gearbox.layer_bytes(layer, gearbox.ladder.find(bits)) for layer in gearbox.layers)


def find_table(allocator: Allocator, target: Target) -> MeasuredTable:
    """Return a table that meets a target; if none does, the nearest one, with a note."""
    gearbox, kind, value = allocator.exact.gearbox, target.kind, target.value
    if kind == "kl":
        found = allocator.for_kl(value)
        if found.distance.kl > value:
            note(f"no table has a KL of {target}; the nearest has {found.distance.kl:.2g}")
        return found
    budget = value if kind == "bytes" else bytes_for(gearbox, value) if kind == "tps" else allocator.budget(value)
    found = allocator.for_bytes(budget)
    if found.bytes > budget:
        nearest = f"{8 * found.bytes / allocator.weights:.3f} bits per weight, {human_bytes(found.bytes)}"
        note(f"no table meets {target}; the nearest has {nearest}")
    if kind == "tps":
        gearbox.cap(found.bits)
        note(f"measured: {1 / token_seconds(gearbox):.1f} tokens/s in this table")
        gearbox.cap({})
    return found


def token_seconds(gearbox: Gearbox) -> float:
    """Return the median seconds per token of greedy decoding, after the first token."""

    def once() -> float:
        steps = generate_step(mx.array([1, 2, 3]), gearbox.model, max_tokens=TOKENS + 1)
        next(steps)
        start = time.perf_counter()
        for _ in steps:
            pass
        return (time.perf_counter() - start) / TOKENS

    return statistics.median(once() for _ in range(3))


def bytes_for(gearbox: Gearbox, tokens_per_second: float) -> float:
    """Return the bytes of managed layers at which decoding has this speed.

    A token takes the time of reading its bytes, plus a constant: timings of the lowest and the highest quantized gear
    determine both.

    Raises:
        GearbxError: fewer bytes are not faster on this machine.
    """
    points = []
    for gear in (gearbox.ladder[0], gearbox.ladder[-2]):
        gearbox.cap({layer.path: gear.bits for layer in gearbox.layers})
        points.append((uniform_bytes(gearbox, gear.bits), token_seconds(gearbox)))
    gearbox.cap({})
    (few, fast), (many, slow) = points
    if slow <= fast:
        raise GearbxError(
            f"{gearbox.ladder[0].bits} bits are not faster than {gearbox.ladder[-2].bits} here "
            f"({1 / fast:.1f} and {1 / slow:.1f} tokens/s), and so no table is; use --target-bpw"
        )
    return few + (1 / tokens_per_second - fast) * (many - few) / (slow - fast)


def report(allocator: Allocator, gear: int, table: GearTable) -> None:
    """Print the size and the quality of a table, and of the uniform gear."""
    exact = allocator.exact
    uniform = exact.measure_caps({layer.path: gear for layer in exact.gearbox.layers})
    plain = 8 * uniform_bytes(exact.gearbox, gear) / allocator.weights
    note(
        f"gear {gear}: {table.bits_per_weight:.3f} bits per weight, KL {table.kl:.2g} nats measured "
        f"({table.sum_of_parts:.2g} as a sum), perplexity {table.perplexity_change:+.2f} %; "
        f"uniform {gear} bits: {plain:.3f}, {uniform.kl:.2g}, {uniform.perplexity_change:+.2f} %"
    )
