"""The tables of a run: its summary, and what each layer of the model runs on."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..routing.pair import NAMES
from ..telemetry.summary import kv_rows
from ..telemetry.trace import gear_color
from .sizes import human_bytes

if TYPE_CHECKING:
    from ..gears.cost import LayerPath
    from ..gears.ladder import Ladder

Row = tuple[str, str | Text]


def summary_table(summary: dict[str, Any], mode_rows: Sequence[Row] = ()) -> Table:
    """The table under a text that one model wrote.

    Args:
        summary: the object that `--summary` writes.
        mode_rows: what the mode adds.
    """
    watching = summary["mode"] == "telemetry-only"
    controller = summary.get("controller")
    return two_columns(
        [
            ("model", Text(f"{summary['model']}  ({summary['mode']})")),
            *speed_rows(summary),
            ("gears it would use" if watching else "gears", gear_shares(summary)),
            shifts_row(summary, watching),
            *([("controller", controller_line(controller))] if controller else []),
            *mode_rows,
            *draft_model_rows(summary),
            ("mean entropy", f"{summary['mean_entropy_bits']:.2f} bits"),
            bits_row(summary, watching),
            ("weights read", weights_line(summary, "" if watching else "top gear")),
            *kv_rows(summary),
            *disk_rows(summary),
            *energy_rows(summary),
            ("memory", memory_line(summary, watching)),
            *layer_rows(summary),
            *dtype_rows(summary),
        ]
    )


def draft_model_rows(summary: dict[str, Any]) -> list[Row]:
    """A line for mlx-lm's draft model, if there is one."""
    draft = summary.get("draft_model")
    if draft is None:
        return []
    figures = f"{draft['name']}, {draft['passes']} passes, {human_bytes(draft['weight_bytes'])} of weights read"
    return [("draft model", Text(figures))]  # no markup: the name is anybody's


def pair_table(summary: dict[str, Any], mode_rows: Sequence[Row]) -> Table:
    """The table under a text that two models wrote in turns; arguments as for `summary_table`."""
    shares = Text()
    for i, name in enumerate(NAMES):
        parameters = summary["parameters"][name] / 1e6
        shares.append(f"{name} ({parameters:.3g} M) {summary['shares'][name]:.0%}   ", style=gear_color(i, len(NAMES)))
    entropy, threshold = summary["mean_entropy_bits"], summary["threshold_bits"]
    return two_columns(
        [
            ("models", Text(f"{summary['small_model']}, {summary['model']}  (pair)")),
            *speed_rows(summary),
            ("turns", shares),
            *mode_rows,
            ("mean entropy", f"{entropy:.2f} bits; the threshold is {threshold:.3g}"),
            ("parameters", f"{summary['parameter_ratio']:.0%} of the large model's per token"),
            ("weights read", weights_line(summary, "large model")),
            *energy_rows(summary),
            ("memory", f"peak {human_bytes(summary['peak_memory_bytes'])}"),
        ]
    )


def two_columns(rows: Iterable[Row]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)  # a string would be read as rich's markup
    return table


def speed_rows(summary: dict[str, Any]) -> list[Row]:
    return [
        ("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s"),
        ("prompt", f"{summary['prompt_tokens']} tokens, {summary['prompt_tokens_per_second']:.1f} tokens/s"),
    ]


def energy_rows(summary: dict[str, Any]) -> list[Row]:
    """What the machine used, where it says so: other programs on it are in it."""
    if "energy_joules_per_token" not in summary:
        return []
    return [("energy", f"{summary['energy_joules_per_token']:.3g} J per token ({summary['energy_of']})")]


def gear_shares(summary: dict[str, Any]) -> Text:
    """The share of tokens in each gear, in its colour."""
    shares, ladder, tokens = Text(), summary["ladder"], summary["tokens"]
    for i, gear in enumerate(ladder):
        count = summary["gear_tokens"][gear["name"]]
        share = count / tokens if tokens else 0.0
        shares.append(f"{gear['name']} ({gear['bits']}) {share:.0%}   ", style=gear_color(i, len(ladder)))
    return shares


def shifts_row(summary: dict[str, Any], watching: bool) -> Row:
    if watching:
        return "would shift", f"{summary['shifts']} times"
    return "shifts", f"{summary['shifts']}, {1000 * summary['shift_seconds']:.1f} ms in all"


def controller_line(summary: dict[str, Any]) -> str:
    """What a controller aimed at, and what it did for it."""
    target = summary["target_tps"]
    aim = "the machine's state" if target is None else f"target {target:g} tokens/s"
    changes, bits = summary["cap_changes"], summary["capped_bits_per_weight"]
    moved = f"caps moved {changes} times, the top gear now {bits:.2f} bits per weight"
    machine = "".join(f"; {name} {value}" for name, value in summary["machine"].items())
    return f"{aim}; {moved}{machine}" + ("; out of reach" if summary["out_of_reach"] else "")


def bits_row(summary: dict[str, Any], watching: bool) -> Row:
    layers = "linear" if watching else "managed"
    return "effective bits", f"{summary['effective_bits_per_weight']:.2f} per weight of the {layers} layers"


def weights_line(summary: dict[str, Any], reference: str) -> str:
    """Bytes of weights that a token reads, compared with what it reads in `reference` (unless that is empty), and with
    the original weights, where `reference` stores them in another way.
    """
    read = summary["weight_bytes_per_token"]
    compared = {reference: summary["weight_bytes_per_token_top"]} if reference else {}
    if reference and "weight_bytes_per_token_original" in summary:
        compared[f"original in {summary['storage_dtype']}"] = summary["weight_bytes_per_token_original"]
    others = [f", the {name} {human_bytes(most)} ({most / read:.2f} times as much)" for name, most in compared.items()]
    return f"{human_bytes(read)} per token" + "".join(others if read else [])


def disk_rows(summary: dict[str, Any]) -> list[Row]:
    """What was read from the disk, where the top gear is streamed."""
    if "streaming" not in summary:
        return []
    read, speed = (human_bytes(summary["streaming"][f"disk_bytes_per_{unit}"]) for unit in ("token", "second"))
    return [("from the disk", f"{read} per token, at {speed} per second")]


def memory_line(summary: dict[str, Any], watching: bool) -> str:
    peak = f"peak {human_bytes(summary['peak_memory_bytes'])}"
    gears = ", ".join(f"{name} {human_bytes(count)}" for name, count in summary["active_memory_bytes"].items())
    return peak if watching else f"{peak}; after shifting to {gears}"


def layer_rows(summary: dict[str, Any]) -> list[Row]:
    """How many layers change gear, and why the others do not."""
    counts = f"{summary['managed_layers']} change gear, {summary['unmanaged_layers']} do not"
    reasons = summary["unmanaged_reasons"].items()
    return [("layers", counts), *(("", Text(f"{count}: {reason}")) for reason, count in reasons)]


def dtype_rows(summary: dict[str, Any]) -> list[Row]:
    computed, stored = summary["compute_dtype"], summary["storage_dtype"]
    if computed == stored:
        return []
    why = "which is fast here; the values are kept" if computed == "float32" else "as asked for: values are rounded"
    return [("computed in", f"{computed} ({stored} checkpoint), {why}")]


def layers_table(ladder: "Ladder", layers: "Sequence[LayerPath]") -> Group:
    """A table for each kind of kernels and the reason for them; one row for the layers of all blocks that are alike."""
    from ..gears.cost import grouped  # imports mlx, which --help does not wait for

    tables: dict[str, Table] = {}
    for path, layer, count in grouped(layers):
        why = layer.why if layer.fixed is None else f"{layer.why}; changes no gear: {layer.fixed}"
        table = tables.setdefault(f"{layer.kernels} kernels: {why}", bits_table(ladder))
        table.add_row(*map(str, layer.bits), Text(path), f"x {count}" if count > 1 else "")
    return Group(*(part for heading, table in tables.items() for part in (Text(heading), table)))


def bits_table(ladder: "Ladder") -> Table:
    """A table without rows: a column with the bits of each gear, the layers and their number."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, gear in enumerate(ladder):
        table.add_column(gear.name, justify="right", style=gear_color(i, len(ladder)))
    table.add_column("layers", no_wrap=True)
    table.add_column()
    return table
