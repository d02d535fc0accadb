"""The tables of a run: its summary, and what each layer of the model runs on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..kernels.dispatch import STOCK
from ..kernels.tuner import FAILED, Times
from ..routing.pair import NAMES
from ..settings import human_bytes
from ..telemetry.report import UNDECIDED
from ..telemetry.summary import Tally, kv_rows
from ..telemetry.trace import gear_color

BETWEEN = " · "


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows under a head: the first column has names, and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def summary_line(tally: Tally, last: Any, mode: str, ending: str = "") -> Text:
    """Tokens read and written, tokens/s, gears or drafts, mean entropy, bytes of weights per token.

    Args:
        tally: of the answer.
        last: its last response.
        ending: why it ended, where it did not end by itself.
    """
    drafts = tally.drafted + tally.looked_up
    accepted = tally.accepted + tally.from_lookup
    parts = [
        Text(f"{last.prompt_tokens} read, {tally.tokens} written{f' ({ending})' if ending else ''}"),
        Text(f"{speed(last.generation_tps)}/s"),
        Text(f"{accepted / drafts:.0%} of {drafts} drafts") if drafts else shares(tally, mode),
        Text(f"H {tally.mean(tally.entropy_sum):.2f} bits"),
        Text(f"{human_bytes(tally.mean(tally.weight_bytes))}/token"),
    ]
    return Text(BETWEEN, style="dim").join(parts)


def speed(tokens_per_second: float) -> str:
    """Three digits, or all before the point."""
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def shares(tally: Tally, mode: str) -> Text:
    """The share of tokens in each gear that ran, in its colour."""
    names: Sequence[str] = tuple(tally.gear_tokens)
    ran = [(place, name) for place, name in enumerate(names) if tally.gear_tokens[name]]
    parts = [
        Text(f"{name} {tally.mean(tally.gear_tokens[name]):.0%}", style=gear_color(place, len(names)))
        for place, name in ran
    ]
    return Text("would use " if mode == "telemetry-only" else "") + Text(" ").join(parts)


ROUNDING = "MLX's kernels (mlx, reconstruct) and ours give other last bits; ours among each other give the same."


def kernels_table(used: Mapping[str, tuple[str, Times]]) -> Table:
    """A row for each product: the kernel that was chosen, its microseconds, and how many times as long others take.

    Args:
        used: product to the kernel and the seconds of all candidates (`Tuner.used`).
    """
    caption = ROUNDING if in_both(used) else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("product", "kernel", "us", "others take"):
        table.add_column(name, justify="right" if name == "us" else "left")
    for product, (chosen, times) in used.items():
        others = ", ".join(f"{name} {ratio(times, name, chosen)}" for name in times if name != chosen)
        table.add_row(product, chosen, f"{times[chosen] * 1e6:.1f}", others)
    return table


def ratio(times: Times, name: str, chosen: str) -> str:
    return "does not run" if times[name] == FAILED else f"{times[name] / times[chosen]:.2f} times"


def in_both(used: Mapping[str, tuple[str, Times]]) -> bool:
    """Whether candidates differ in the last bits."""
    return any({name in STOCK for name in times} == {True, False} for _, times in used.values())


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
    controller, by = summary.get("controller"), summary.get("mode_chosen_by")
    alone = len(summary["ladder"]) == 1 and not watching and controller is None  # one gear, which nothing caps
    return two_columns(
        [
            ("model", f"{summary['model']}  ({summary['mode']}{f', as {by} asks' if by else ''})"),
            *speed_rows(summary),
            *([("gear", only_gear(summary))] if alone else gear_rows(summary, watching)),
            ("controller", controller_line(controller) if controller else ""),
            *mode_rows,
            ("draft model", draft_model_line(summary.get("draft_model"))),
            ("mean entropy", f"{summary['mean_entropy_bits']:.2f} bits"),
            (
                "effective bits",
                f"{summary['effective_bits_per_weight']:.2f} per weight of the "
                f"{'linear' if watching else 'managed'} layers",
            ),
            ("weights read", weights_line(summary, "" if watching else "top gear")),
            *kv_rows(summary),
            ("from the disk", disk_line(summary.get("streaming"))),
            ("memory", memory_line(summary, watching or alone)),
            *([] if alone else layer_rows(summary)),
            ("computed in", dtype_line(summary["compute_dtype"], summary["storage_dtype"])),
        ]
    )


def draft_model_line(draft: dict[str, Any] | None) -> str:
    """The draft model, if there is one."""
    if draft is None:
        return ""
    return f"{draft['name']}, {draft['passes']} passes, {human_bytes(draft['weight_bytes'])} of weights read"


def pair_table(summary: dict[str, Any], mode_rows: Sequence[Row]) -> Table:
    """The table under a text that two models wrote in turns; arguments as for `summary_table`."""
    shares = Text()
    for i, name in enumerate(NAMES):
        parameters = summary["parameters"][name] / 1e6
        shares.append(f"{name} ({parameters:.3g} M) {summary['shares'][name]:.0%}   ", style=gear_color(i, len(NAMES)))
    entropy, threshold = summary["mean_entropy_bits"], summary["threshold_bits"]
    return two_columns(
        [
            ("models", f"{summary['small_model']}, {summary['model']}  (pair)"),
            *speed_rows(summary),
            ("turns", shares),
            *mode_rows,
            ("mean entropy", f"{entropy:.2f} bits; the threshold is {threshold:.3g}"),
            ("parameters", f"{summary['parameter_ratio']:.0%} of the large model's per token"),
            ("weights read", weights_line(summary, "large model")),
            ("memory", f"peak {human_bytes(summary['peak_memory_bytes'])}"),
        ]
    )


def two_columns(rows: Iterable[Row]) -> Table:
    """Rows of a name and a value; one without a value is left out."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        if value:  # a string would be read as rich's markup
            table.add_row(name, Text(value) if isinstance(value, str) else value)
    return table


def speed_rows(summary: dict[str, Any]) -> list[Row]:
    return [
        ("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s"),
        ("prompt", f"{summary['prompt_tokens']} tokens, {summary['prompt_tokens_per_second']:.1f} tokens/s"),
    ]


def gear_shares(summary: dict[str, Any]) -> Text:
    """The share of tokens in each gear, in its colour."""
    shares, ladder, tokens = Text(), summary["ladder"], summary["tokens"]
    for i, gear in enumerate(ladder):
        count = summary["gear_tokens"][gear["name"]]
        share = count / tokens if tokens else 0.0
        shares.append(f"{gear['name']} ({gear['bits']}) {share:.0%}   ", style=gear_color(i, len(ladder)))
    return shares


def only_gear(summary: dict[str, Any]) -> str:
    """The bits of the one gear, and how many layers have them; the others stay as they are loaded."""
    (gear,) = summary["ladder"]
    others = f", {summary['unmanaged_layers']} are as loaded" if summary["unmanaged_layers"] else ""
    return f"{gear['bits']} bits, the only one: {summary['managed_layers']} layers have it{others}"


def gear_rows(summary: dict[str, Any], watching: bool) -> list[Row]:
    """The tokens of each gear, and the shifts between them."""
    if watching:
        return [("gears it would use", gear_shares(summary)), ("would shift", f"{summary['shifts']} times")]
    shifting, making = (f"{1000 * summary[name]:.1f} ms" for name in ("shift_seconds", "making_seconds"))
    shifts = f"{summary['shifts']}, {shifting} in all; gears were made in {making}"
    return [("gears", gear_shares(summary)), ("shifts", shifts)]


def controller_line(summary: dict[str, Any]) -> str:
    """What a controller aimed at, and what it did for it."""
    target = summary["target_tps"]
    aim = "the machine's state" if target is None else f"target {target:g} tokens/s"
    changes, bits = summary["cap_changes"], summary["capped_bits_per_weight"]
    moved = f"caps moved {changes} times, the top gear now {bits:.2f} bits per weight"
    machine = "".join(f"; {name} {value}" for name, value in summary["machine"].items())
    return f"{aim}; {moved}{machine}" + ("; out of reach" if summary["out_of_reach"] else "")


def weights_line(summary: dict[str, Any], reference: str) -> str:
    """Bytes of weights that a token reads, compared with what it reads in `reference` (unless that is empty), and with
    the original weights, where `reference` stores them in another way.
    """
    read = summary["weight_bytes_per_token"]
    if not read:  # as where the prompt was interrupted
        return f"{human_bytes(read)} per token"
    compared = {reference: summary["weight_bytes_per_token_top"]} if reference else {}
    if reference and "weight_bytes_per_token_original" in summary:
        compared[f"original in {summary['storage_dtype']}"] = summary["weight_bytes_per_token_original"]
    others = [f", the {name} {human_bytes(most)} ({most / read:.2f} times as much)" for name, most in compared.items()]
    return f"{human_bytes(read)} per token" + "".join(others if read else [])


def disk_line(read: dict[str, Any] | None) -> str:
    """What was read from the disk, where the top gear is streamed."""
    if read is None:
        return ""
    token, second = (human_bytes(read[f"disk_bytes_per_{unit}"]) for unit in ("token", "second"))
    return f"{token} per token, at {second} per second"


def memory_line(summary: dict[str, Any], peak_alone: bool) -> str:
    peak = f"peak {human_bytes(summary['peak_memory_bytes'])}"
    gears = ", ".join(f"{name} {human_bytes(count)}" for name, count in summary["active_memory_bytes"].items())
    return peak if peak_alone else f"{peak}; after shifting to {gears}"


def layer_rows(summary: dict[str, Any]) -> list[Row]:
    """How many layers change gear, and why the others do not."""
    counts = f"{summary['managed_layers']} change gear, {summary['unmanaged_layers']} do not"
    reasons = summary["unmanaged_reasons"].items()
    return [("layers", counts), *(("", f"{count}: {reason}") for reason, count in reasons)]


def dtype_line(computed: str, stored: str) -> str:
    """The type to compute in, where the checkpoint has another one."""
    why = "which is fast here; the values are kept" if computed == "float32" else "as asked for: values are rounded"
    return "" if computed == stored else f"{computed} ({stored} checkpoint), {why}"


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


def server_table(summary: dict[str, Any]) -> Table:
    """The table under an analysis of a server, from the object that is written as its summary."""
    shares = gear_shares(summary)
    shares.append(f"{UNDECIDED} {summary['undecided_share']:.0%}")
    listed, size, source = (summary[name] for name in ("top_logprobs", "vocab_size", "vocab_size_source"))
    low, high = summary["mean_entropy_low_bits"], summary["mean_entropy_high_bits"]
    return two_columns(
        [
            ("model", f"{summary['model']}  ({summary['mode']})"),
            ("server", summary["server"]),
            ("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s"),
            ("gears it would use", shares),
            (
                "would shift",
                f"{summary['shifts_low']} times by the lower bounds, {summary['shifts_high']} by the upper",
            ),
            ("mean entropy", f"{low:.2f} to {high:.2f} bits"),
            ("known", f"{listed} log-probabilities of {size} ({source})"),
        ]
    )
