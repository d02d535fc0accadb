"""The tables of a run: its summary, and what each layer of the model runs on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..telemetry.colors import gear_color
from .sizes import human_bytes

if TYPE_CHECKING:
    from ..gears.description import LayerPath
    from ..gears.ladder import Ladder


def summary_table(summary: dict[str, Any]) -> Table:
    """The table under a generated text, from the object that `--summary` writes."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    watching = summary["mode"] == "telemetry-only"
    for name, value in (
        ("model", Text(f"{summary['model']}  ({summary['mode']})")),
        ("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s"),
        ("prompt", f"{summary['prompt_tokens']} tokens, {summary['prompt_tokens_per_second']:.1f} tokens/s"),
        ("gears it would use" if watching else "gears", gear_shares(summary)),
        shifts_row(summary, watching),
        *mode_rows(summary),
        ("mean entropy", f"{summary['mean_entropy_bits']:.2f} bits"),
        *weight_rows(summary, watching),
        ("memory", memory_line(summary, watching)),
        *layer_rows(summary),
        *dtype_rows(summary),
    ):
        table.add_row(name, value)
    return table


def gear_shares(summary: dict[str, Any]) -> Text:
    """The share of tokens in each gear, in its colour."""
    shares, ladder, tokens = Text(), summary["ladder"], summary["tokens"]
    for i, gear in enumerate(ladder):
        count = summary["gear_tokens"][gear["name"]]
        share = count / tokens if tokens else 0.0
        shares.append(f"{gear['name']} ({gear['bits']}) {share:.0%}   ", style=gear_color(i, len(ladder)))
    return shares


def shifts_row(summary: dict[str, Any], watching: bool) -> tuple[str, str]:
    if watching:
        return "would shift", f"{summary['shifts']} times"
    return "shifts", f"{summary['shifts']}, {1000 * summary['shift_seconds']:.1f} ms in all"


def mode_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of a controller and of the modes that compute a token more than once."""
    rows = []
    if "controller" in summary:
        rows.append(("controller", controller_line(summary["controller"])))
    if "drafted" in summary:
        ties = summary["near_ties"]
        counts = f"{summary['drafted']}, {summary['accepted']} accepted ({summary['acceptance_rate']:.0%})"
        verified = f"{summary['verifications']} verifications" + (f", {ties} near-ties" if ties else "")
        rows.append(("drafted", f"{counts}, {verified}"))
    if "recomputed" in summary:
        rows.append(("recomputed", f"{summary['recomputed']} tokens, in a higher gear"))
    return rows


def controller_line(summary: dict[str, Any]) -> str:
    """What a controller aimed at, and what it did for it."""
    target = summary["target_tps"]
    aim = "the machine's state" if target is None else f"target {target:g} tokens/s"
    changes, bits = summary["cap_changes"], summary["capped_bits_per_weight"]
    moved = f"caps moved {changes} times, the top gear now {bits:.2f} bits per weight"
    machine = "".join(f"; {name} {value}" for name, value in summary["machine"].items())
    return f"{aim}; {moved}{machine}" + ("; out of reach" if summary["out_of_reach"] else "")


def weight_rows(summary: dict[str, Any], watching: bool) -> list[tuple[str, str]]:
    bits, layers = summary["effective_bits_per_weight"], "linear" if watching else "managed"
    read, top = summary["weight_bytes_per_token"], summary["weight_bytes_per_token_top"]
    against = "" if watching or not read else f", the top gear {human_bytes(top)} ({top / read:.2f} times as much)"
    return [
        ("effective bits", f"{bits:.2f} per weight of the {layers} layers"),
        ("weights read", f"{human_bytes(read)} per token{against}"),
    ]


def memory_line(summary: dict[str, Any], watching: bool) -> str:
    peak = f"peak {human_bytes(summary['peak_memory_bytes'])}"
    gears = ", ".join(f"{name} {human_bytes(count)}" for name, count in summary["active_memory_bytes"].items())
    return peak if watching else f"{peak}; after shifting to {gears}"


def layer_rows(summary: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """How many layers change gear, and why the others do not."""
    counts = f"{summary['managed_layers']} change gear, {summary['unmanaged_layers']} do not"
    reasons = summary["unmanaged_reasons"].items()
    return [("layers", counts), *(("", Text(f"{count}: {reason}")) for reason, count in reasons)]


def dtype_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    computed, stored = summary["compute_dtype"], summary["storage_dtype"]
    if computed == stored:
        return []
    why = "which is fast here; the values are kept" if computed == "float32" else "as asked for: values are rounded"
    return [("computed in", f"{computed} ({stored} checkpoint), {why}")]


def layers_table(ladder: "Ladder", layers: "Sequence[LayerPath]") -> Table:
    """What every layer runs on and why; a line stands for the layers of all blocks that are alike."""
    from ..gears.description import grouped  # imports mlx, which --help does not wait for

    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, gear in enumerate(ladder):
        table.add_column(gear.name, justify="right", style=gear_color(i, len(ladder)))
    table.add_column("layers", no_wrap=True)
    table.add_column()
    table.add_column("kernels")
    table.add_column("why", overflow="fold")
    for path, layer, count in grouped(layers):
        why = layer.why if layer.fixed is None else f"{layer.why}; changes no gear: {layer.fixed}"
        row = path, f"x {count}" if count > 1 else "", layer.kernels, why
        table.add_row(*map(str, layer.bits), *map(Text, row))
    return table
