"""Tables of a run: the summary, and bits and kernels of each layer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..decoding.modes import LOSSLESS, TELEMETRY_ONLY
from ..kernels.dispatch import STOCK
from ..kernels.tuner import FAILED, Times
from ..routing.pair import NAMES
from ..settings import human_bytes
from ..telemetry.summary import Tally, kv_rows
from ..telemetry.trace import LOOKUP_COLOR, UNDECIDED, gear_color

BETWEEN = " · "
ENTROPY_DECIDES = ("route", "kickdown", "pair", TELEMETRY_ONLY)


def table_with_head(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of rows under a head: names in the first column, numbers in the others."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def summary_line(tally: Tally, last: Any, mode: str, ending: str = "") -> Text:
    """Return tokens, tokens/s, shares of gears, entropy (if it sets the gear) and bytes per token, in one line.

    ending: why the answer was cut; "" for a complete one.
    """
    parts = [
        Text(f"{last.prompt_tokens} prefilled, {tally.tokens} generated{f' ({ending})' if ending else ''}"),
        Text(f"{speed(last.generation_tps)} tokens/s"),
        shares_of_gears(tally, mode),
        *([Text(f"entropy {tally.mean(tally.entropy_sum):.2f} bits")] if mode in ENTROPY_DECIDES else []),
        Text(f"{human_bytes(tally.mean(tally.weight_bytes))}/token"),
    ]
    return Text(BETWEEN, style="dim").join(parts)


def speed(tokens_per_second: float) -> str:
    """Return tokens/s with three digits, or without decimals from 100 on."""
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def shares_of_gears(tally: Tally, mode: str) -> Text:
    """Return the shares of tokens by gear and of prompt lookup, in colors."""
    shares = by_origin({name: tally.mean(count) for name, count in tally.gear_tokens.items()}, mode)
    prefix = Text("would use " if mode == TELEMETRY_ONLY else "")
    return prefix + in_colors(shares, tally.mean(tally.from_lookup), " ")


def by_origin(shares: Mapping[str, float], mode: str) -> dict[str, float]:
    """Return the shares by gear, lowest first. In mode lossless all gears except the top one only draft."""
    top = list(shares)[-1]
    return {f"drafts of {name}" if mode == LOSSLESS and name != top else name: part for name, part in shares.items()}


def colors_line(ladder: Sequence[Mapping[str, Any]], has_draft_model: bool) -> Text:
    """Return the legend of token colors in mode lossless. ladder: as in a summary."""
    low, top = bits_shown(ladder[0]), bits_shown(ladder[-1])
    drafted = (f"drafted in {low} bits, accepted", gear_color(0, len(ladder)))
    own = (f"generated in {top} bits", gear_color(len(ladder) - 1, len(ladder)))
    if has_draft_model:  # a draft model has no color
        own = (f"{own[0]}, or drafted by the draft model", own[1])
    labels = [*([] if has_draft_model else [drafted]), ("prompt lookup, accepted", LOOKUP_COLOR), own]
    return Text("tokens: ") + Text(BETWEEN).join(Text(label, style=color) for label, color in labels)


def in_colors(gears: Mapping[str, float], looked_up: float, between: str) -> Text:
    """Return gears, lowest first, and prompt lookup with their nonzero shares, in colors."""
    named = [(name, share, gear_color(place, len(gears))) for place, (name, share) in enumerate(gears.items())]
    named.append(("prompt lookup", looked_up, LOOKUP_COLOR))
    return Text(between).join(Text(f"{name} {share:.0%}", style=color) for name, share, color in named if share)


ROUNDING_NOTE = "MLX's kernels (mlx, reconstruct) round differently from native kernels, which are bit-identical."


def kernels_table(used: Mapping[str, tuple[str, Times]]) -> Table:
    """Return a table of the matmuls in `Tuner.used`: chosen kernel, microseconds, and relative times of others."""
    last_bits_differ = any({name in STOCK for name in times} == {True, False} for _, times in used.values())
    caption = ROUNDING_NOTE if last_bits_differ else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("matmul", "kernel", "us", "others"):
        table.add_column(name, justify="right" if name == "us" else "left")
    for product, (chosen, times) in used.items():
        others = ", ".join(f"{name} {ratio(times, name, chosen)}" for name in times if name != chosen)
        table.add_row(product, chosen, f"{times[chosen] * 1e6:.1f}", others)
    return table


def ratio(times: Times, name: str, chosen: str) -> str:
    return "fails" if times[name] == FAILED else f"{times[name] / times[chosen]:.2f}×"


if TYPE_CHECKING:
    from ..gears.cost import LayerPath
    from ..gears.ladder import Ladder

Row = tuple[str, str | Text]


def summary_table(summary: dict[str, Any], mode_rows: Sequence[Row] = (), full: bool = False) -> Table:
    """Return the summary table of one model: at most twelve rows, and then `further_rows`.

    Args:
        summary: the object that `--summary` writes.
        mode_rows: additional rows of the mode.
        full: show every figure.
    """
    watching = summary["mode"] == TELEMETRY_ONLY
    controller, by = summary.get("controller"), summary.get("mode_chosen_by")
    return two_columns(
        [
            ("time", time_line(summary)),
            ("model", f"{summary['model']}, mode {summary['mode']}{f' (by {by})' if by else ''}"),
            *speed_rows(summary),
            ("tokens would be from" if watching else "tokens from", token_shares(summary)),
            *([("shifts", shifts_line(summary))] if summary["mode"] in ("route", TELEMETRY_ONLY) else []),
            *mode_rows,
            ("controller", controller_line(controller) if controller else ""),
            ("weights read", weights_line(summary, "" if watching else "top gear")),
            *kv_rows(summary),
            ("from the disk", disk_line(summary.get("streaming"))),
            ("memory", f"peak {human_bytes(summary['peak_memory_bytes'])}"),
            ("layers", layers_line(summary) if full or (summary["unmanaged_layers"] and not watching) else ""),
            *(further_rows(summary) if full else []),
        ]
    )


def further_rows(summary: dict[str, Any]) -> list[Row]:
    """Return the additional rows of `--verbose all`."""
    draft, watching = summary.get("draft_model"), summary["mode"] == TELEMETRY_ONLY
    making, shifting = (f"{1000 * summary[name]:.1f} ms" for name in ("making_seconds", "shift_seconds"))
    read = f"{draft['passes']} forward passes, {human_bytes(draft['weight_bytes'])} of weights read" if draft else ""
    gears = ", ".join(f"{name} {human_bytes(count)}" for name, count in summary["active_memory_bytes"].items())
    which = "linear" if watching else "managed"
    return [
        ("verifications", str(summary.get("verifications", ""))),
        ("draft model", read),
        *([] if summary["mode"] in ("route", TELEMETRY_ONLY) else [("shifts", shifts_line(summary))]),
        ("effective bits", f"{summary['effective_bits_per_weight']:.2f} per weight of the {which} layers"),
        ("gears", "" if watching else f"made in {making}; shifts took {shifting} in all"),
        ("memory of gears", gears),
        ("computed in", dtype_line(summary["compute_dtype"], summary["storage_dtype"])),
    ]


def pair_table(summary: dict[str, Any], mode_rows: Sequence[Row]) -> Table:
    """Return the summary table of mode pair; arguments as for `summary_table`."""
    shares = Text()
    for i, name in enumerate(NAMES):
        parameters = summary["parameters"][name] / 1e6
        shares.append(f"{name} ({parameters:.3g} M) {summary['shares'][name]:.0%}   ", style=gear_color(i, len(NAMES)))
    entropy, threshold = summary["mean_entropy_bits"], summary["threshold_bits"]
    return two_columns(
        [
            ("time", time_line(summary)),
            ("models", f"{summary['small_model']} and {summary['model']}, mode pair"),
            *speed_rows(summary),
            ("turns", shares),
            *mode_rows,
            ("mean entropy", f"{entropy:.2f} bits, threshold {threshold:.3g}"),
            ("parameters", f"{summary['parameter_ratio']:.0%} of the large model's per token"),
            ("weights read", weights_line(summary, "large model")),
            ("memory", f"peak {human_bytes(summary['peak_memory_bytes'])}"),
        ]
    )


def two_columns(rows: Iterable[Row]) -> Table:
    """Return a table of names and values, without rows that have no value."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")  # a long path is shown whole
    for name, value in rows:
        if value:  # a string would be read as rich's markup
            table.add_row(name, Text(value) if isinstance(value, str) else value)
    return table


def time_line(summary: dict[str, Any]) -> str:
    """Return the times of a run; for a command from its start, with loading and making gears."""
    if not summary["tokens"]:
        return ""
    if "command_seconds_to_ready" not in summary:
        return f"{summary['seconds_to_first_token']:.2f} s to the first token, {summary['seconds']:.2f} s in all"
    ready, first, last = (summary[f"command_seconds_to_{name}"] for name in ("ready", "first_token", "last_token"))
    making = summary.get("making_seconds", 0.0)
    made = f" (gears made in {making:.2f} s)" if making >= 0.05 else ""
    return f"ready {ready:.2f} s{made}, first token {first:.2f} s, {summary['tokens']} tokens in {last:.2f} s"


def speed_rows(summary: dict[str, Any]) -> list[Row]:
    """Return the rows of tokens and tokens/s, generated and in the prompt."""
    return [
        ("output", f"{summary['tokens']} tokens, {speed(summary['tokens_per_second'])} tokens/s"),
        ("prompt", f"{summary['prompt_tokens']} tokens, {speed(summary['prompt_tokens_per_second'])} tokens/s"),
    ]


def token_shares(summary: dict[str, Any]) -> Text:
    """Return the shares of tokens by gear, of a draft model and of prompt lookup, in colors."""
    tokens, top = max(1, summary["tokens"]), summary["ladder"][-1]["name"]
    counts, draft = dict(summary["gear_tokens"]), summary.get("draft_model")
    drafted = summary["accepted"] if draft else 0
    counts[top] -= drafted
    gears = {f"{gear['name']} ({bits_shown(gear)} bits)": counts[gear["name"]] / tokens for gear in summary["ladder"]}
    shares = in_colors(by_origin(gears, summary["mode"]), summary.get("lookup_accepted", 0) / tokens, "   ")
    return Text(f"drafts of {draft['name']} {drafted / tokens:.0%}   ") + shares if draft and drafted else shares


def bits_shown(gear: Mapping[str, Any]) -> str:
    """Return the bits of a gear's layers; a table may set bits that differ from the gear's name."""
    fewest, most = gear.get("layer_bits", (gear["bits"], gear["bits"]))
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"


def shifts_line(summary: dict[str, Any]) -> str:
    """Return the number of shifts and the mean entropy."""
    return f"{summary['shifts']}, mean entropy {summary['mean_entropy_bits']:.2f} bits"


def controller_line(summary: dict[str, Any]) -> str:
    """Return the target of a controller, and its changes."""
    target = summary["target_tps"]
    aim = "the machine's state" if target is None else f"target {target:g} tokens/s"
    changes, bits = summary["cap_changes"], summary["capped_bits_per_weight"]
    moved = f"cap changes: {changes}, top gear at {bits:.2f} bits per weight"
    machine = "".join(f"; {name} {value}" for name, value in summary["machine"].items())
    return f"{aim}; {moved}{machine}" + ("; out of reach" if summary["out_of_reach"] else "")


def weights_line(summary: dict[str, Any], reference: str) -> str:
    """Return the bytes of weights per token, relative to `reference` (if any), and to original weights if stored
    differently there."""
    read = summary["weight_bytes_per_token"]
    if not read:  # prefill was interrupted
        return ""
    compared = {reference: summary["weight_bytes_per_token_top"]} if reference else {}
    if reference and "weight_bytes_per_token_original" in summary:
        compared[f"original in {summary['storage_dtype']}"] = summary["weight_bytes_per_token_original"]
    others = [f", {name} {human_bytes(most)} ({most / read:.2f}×)" for name, most in compared.items()]
    return f"{human_bytes(read)} per token" + "".join(others)


def disk_line(read: dict[str, Any] | None) -> str:
    """Return the bytes read from disk if the top gear is streamed."""
    if read is None:
        return ""
    token, second = (human_bytes(read[f"disk_bytes_per_{unit}"]) for unit in ("token", "second"))
    return f"{token} per token, {second}/s"


def layers_line(summary: dict[str, Any]) -> str:
    """Return the numbers of managed and other layers, with reasons."""
    if len(summary["ladder"]) > 1:
        counts = f"{summary['managed_layers']} change gear, {summary['unmanaged_layers']} do not"
    else:
        counts = f"{summary['managed_layers']} have the bits of the gear, {summary['unmanaged_layers']} are unchanged"
    reasons = "; ".join(f"{count}: {reason}" for reason, count in summary["unmanaged_reasons"].items())
    return counts + (f" ({reasons})" if reasons else "")


def dtype_line(computed: str, stored: str) -> str:
    """Return the compute type, if it differs from the checkpoint's."""
    why = "faster here, same values" if computed == "float32" else "by --dtype, values are rounded"
    return "" if computed == stored else f"{computed} ({stored} checkpoint), {why}"


def layers_table(ladder: "Ladder", layers: "Sequence[LayerPath]") -> Group:
    """Return a table for each kind of kernels with the reason, and one row for equal layers of all blocks."""
    from ..gears.cost import alike_paths  # slow: imports mlx

    tables: dict[str, Table] = {}
    for path, layer, count in alike_paths(layers):
        why = layer.why if layer.fixed is None else f"{layer.why}; changes no gear: {layer.fixed}"
        table = tables.setdefault(f"{layer.kernels} kernels: {why}", bits_table(ladder))
        table.add_row(*map(str, layer.bits), Text(path), f"x {count}" if count > 1 else "")
    return Group(*(part for heading, table in tables.items() for part in (Text(heading), table)))


def bits_table(ladder: "Ladder") -> Table:
    """Return an empty table with columns for the bits of each gear, the layers and their number."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, gear in enumerate(ladder):
        table.add_column(gear.name, justify="right", style=gear_color(i, len(ladder)))
    table.add_column("layers", no_wrap=True)
    table.add_column()
    return table


def server_table(summary: dict[str, Any]) -> Table:
    """Return the summary table of an analysis of a server."""
    shares = token_shares(summary) + Text(f"   {UNDECIDED} {summary['undecided_share']:.0%}")
    listed, size, source = (summary[name] for name in ("top_logprobs", "vocab_size", "vocab_size_source"))
    low, high = summary["mean_entropy_low_bits"], summary["mean_entropy_high_bits"]
    return two_columns(
        [
            ("model", f"{summary['model']}, mode {summary['mode']}"),
            ("server", summary["server"]),
            ("output", f"{summary['tokens']} tokens, {speed(summary['tokens_per_second'])} tokens/s"),
            ("tokens would be from", shares),
            (
                "would shift",
                f"{summary['shifts_low']} times by lower bounds, {summary['shifts_high']} by upper bounds",
            ),
            ("mean entropy", f"{low:.2f} to {high:.2f} bits"),
            ("known", f"{listed} log-probabilities of {size} ({source})"),
        ]
    )
