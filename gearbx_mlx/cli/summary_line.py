"""What an answer cost, in one line."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from ..telemetry.summary import Tally
from ..telemetry.trace import gear_color
from .sizes import human_bytes

BETWEEN = " · "


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
