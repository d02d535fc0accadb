"""Summary of a run: sums over its tokens, and their fields in the summary object."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .trace import LOOKUP, Token

IMPORTED = time.perf_counter()


@dataclass
class Tally:
    """Sums over the tokens of a run. `gear_tokens` and `passes` have every gear of the ladder, also with 0.

    Accepted tokens of prompt lookup are in `from_lookup`, and in no gear.
    """

    gear_tokens: dict[str, int]
    passes: dict[str, int]
    tokens: int = 0
    shifts: int = 0
    entropy_sum: float = 0.0
    weight_bytes: int = 0
    recomputed: int = 0
    drafted: int = 0
    accepted: int = 0
    lookup_drafted: int = 0
    from_lookup: int = 0
    near_ties: int = 0
    caught_up: int = 0
    kv_bytes: Counter[int] = field(default_factory=Counter)
    kv_caches: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, gears: Sequence[str]) -> "Tally":
        return cls(dict.fromkeys(gears, 0), dict.fromkeys(gears, 0))

    def add(self, response: Token) -> None:
        self.tokens += 1
        if response.source == LOOKUP:
            self.from_lookup += 1
        else:
            self.gear_tokens[response.gear] += 1
        self.shifts += response.shifted
        self.entropy_sum += response.entropy
        for name, passes in zip(self.passes, response.passes):
            self.passes[name] += passes
        self.weight_bytes += response.weight_bytes
        self.recomputed += sum(response.passes) > 1
        self.drafted += response.drafted
        self.accepted += response.from_draft
        self.lookup_drafted += response.lookup_drafted
        self.near_ties += response.near_tie
        self.caught_up += response.caught_up
        if response.kv_bytes:  # updates with nothing would take longer than all other sums
            self.kv_bytes.update(response.kv_bytes)
            self.kv_caches.update(response.kv_caches)

    def mean(self, total: float) -> float:
        """Return a total per token; 0 without tokens."""
        return total / self.tokens if self.tokens else 0.0

    def bits_read(self, per_gear: Mapping[str, float]) -> float:
        """Return the bits per weight that all passes read; per_gear: bits per weight in each gear."""
        return sum(count * per_gear[name] for name, count in self.passes.items())


def draft_summary(tally: Tally, verifications: int) -> dict[str, Any]:
    """Return fields of a summary: tokens drafted, proposed by prompt lookup and accepted, and the passes that verified
    them."""
    return {
        "drafted": tally.drafted,
        "accepted": tally.accepted,
        "acceptance_rate": tally.accepted / tally.drafted if tally.drafted else 0.0,
        "verifications": verifications,
        "lookup_drafted": tally.lookup_drafted,
        "lookup_accepted": tally.from_lookup,
        "near_ties": tally.near_ties,
    }


def kv_summary(tally: Tally, layers: int) -> dict[str, Any]:
    """Return fields of a summary: reads of a KV cache in gears, by bits; {} without gears.

    Args:
        layers: number of layer caches that a pass reads.
    """
    if not tally.kv_bytes:
        return {}
    passes = {bits: count // layers for bits, count in sorted(tally.kv_caches.items())}
    return {
        "kv_bytes": {str(bits): tally.kv_bytes[bits] for bits in passes},
        "kv_passes": {str(bits): count for bits, count in passes.items()},
        "kv_bytes_per_pass": {str(bits): tally.kv_bytes[bits] / max(count, 1) for bits, count in passes.items()},
    }


def kv_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a table's line of these fields: the MB per pass in each gear, and its share of the top gear's."""
    read = summary.get("kv_bytes_per_pass", {})
    top = list(read.values())[-1] if read else 0
    each = (f"{bits} bits: {count / 1e6:.3g} MB a pass ({count / top:.2f})" for bits, count in read.items())
    return [("KV cache read", ", ".join(each))] if top else []


def draft_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a table's line of proposed and accepted tokens, of drafts and of prompt lookup."""
    if "drafted" not in summary or not summary["tokens"]:
        return []
    draft = summary.get("draft_model")
    parts = [
        proposed_line("drafted" + (f" by {draft['name']}" if draft else ""), summary["drafted"], summary["accepted"]),
        proposed_line("by prompt lookup", summary.get("lookup_drafted", 0), summary.get("lookup_accepted", 0)),
        f"{summary['near_ties']} near-ties (decided by rounding)" if summary.get("near_ties") else "",
    ]
    return [("drafts", "; ".join(filter(None, parts)) or "none (plain decoding)")]


def proposed_line(how: str, proposed: int, accepted: int) -> str:
    return f"{proposed} {how}, {accepted} accepted ({accepted / proposed:.0%})" if proposed else ""


def summarize(
    tally: Tally,
    *,
    model: str,
    mode: str,
    ladder: Sequence[Mapping[str, Any]],
    bits_per_weight: Mapping[str, float],
    weight_bytes: Mapping[str, int],
    of_mode: Mapping[str, Any],
    original_bytes: int | None = None,
    **further: Any,
) -> dict[str, Any]:
    """Return the summary object.

    Args:
        ladder: name, bits, bytes_per_weight of each gear.
        bits_per_weight: of the managed layers, by gear, as one pass reads them.
        weight_bytes: that one token reads of the whole model, by gear.
        of_mode: the mode's fields.
        original_bytes: that a token would read of the original weights; None if unknown.
        further: fields of the command: speed, memory, layers.
    """
    top = weight_bytes[ladder[-1]["name"]]
    original = {} if original_bytes in (None, top) else {"weight_bytes_per_token_original": original_bytes}
    return {
        "model": model,
        "mode": mode,
        "ladder": list(ladder),
        "tokens": tally.tokens,
        "gear_tokens": tally.gear_tokens,
        "shifts": tally.shifts,
        "passes": {name: count for name, count in tally.passes.items() if count},
        **of_mode,
        "mean_entropy_bits": tally.mean(tally.entropy_sum),
        "effective_bits_per_weight": tally.mean(tally.bits_read(bits_per_weight)),
        "weight_bytes_per_token": tally.mean(tally.weight_bytes),
        "weight_bytes_per_token_top": top,
        **original,
        **further,
    }


def process_start() -> float:
    """Return when this process started, in seconds of `time.perf_counter`.

    Linux has the time to a hundredth of a second; psutil, if installed, has it on other systems. The fallback is the
    import of this module.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # after a name that may have spaces
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        pass
    try:
        import psutil  # an optional dependency

        return time.perf_counter() - (time.time() - psutil.Process().create_time())
    except ImportError:
        return IMPORTED


def whole_command(entered: float, ready: float, first: float, last: float) -> dict[str, float]:
    """Return fields of a summary: seconds from Enter until the model was ready, the first token, the last token.

    Args:
        entered, ready, first, last: seconds of `time.perf_counter`; first, last: 0 without a token.
    """
    times = {"ready": ready, "first_token": first or ready, "last_token": last or ready}
    return {f"command_seconds_to_{name}": max(0.0, at - entered) for name, at in times.items()}


def as_json(summary: Mapping[str, Any]) -> str:
    return json.dumps(summary, indent=2, ensure_ascii=False) + "\n"


def finite_json(value: Any) -> Any:
    """Return plain values without numbers that JSON lacks: infinity becomes "inf", NaN becomes null."""
    if isinstance(value, dict):
        return {key: finite_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
