"""What a run came to: speed, gears and bytes, gathered for the summary."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..compat.arrays import dtype_name
from ..decoding.governor import Governor
from ..decoding.mode import Mode
from ..decoding.pair import bytes_read
from ..gears.gearbox import Gearbox, Observer
from ..gears.streaming import Stream
from ..telemetry.summary import Tally, kv_summary, summarize


@dataclass
class Speed:
    """mlx-lm's own figures, added up over runs: tokens and seconds of prompts and of generation."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, last: Any) -> None:
        """Take the last response of a run, or None of one that had none."""
        if last is not None:
            self.prompt_tokens += last.prompt_tokens
            self.prompt_seconds += last.prompt_tokens / last.prompt_tps
            self.tokens += last.generation_tokens
            self.seconds += last.generation_tokens / last.generation_tps

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Draft:
    """mlx-lm's draft model, by the name that it was asked for."""

    name: str
    model: nn.Module

    def summary(self, tally: Tally) -> dict[str, Any]:
        """Its name, its passes, one for each token that it drafted, and the bytes of weights that they read."""
        return {"name": self.name, "passes": tally.drafted, "weight_bytes": tally.drafted * bytes_read(self.model)}


def summary_of(
    name: str,
    gearbox: Gearbox | Observer,
    mode: Mode,
    tally: Tally,
    speed: Speed,
    peak_memory: int,
    controller: Governor | None = None,
    draft: Draft | None = None,
) -> dict[str, Any]:
    """The summary of one run; `peak_memory` in bytes. With a controller, gears had fewer bits at times than by name."""
    further: dict[str, Any] = {} if draft is None else {"draft_model": draft.summary(tally)}
    if controller is not None:
        further |= {"effective_bits_per_weight": tally.mean(controller.bits_read), "controller": controller.summary()}
    stream = getattr(gearbox, "residency", None)
    if isinstance(stream, Stream):
        further["streaming"] = stream.summary(tally.tokens)
    further |= kv_summary(tally, len(gearbox.model.layers))
    reasons: dict[str, int] = {}
    for reason in gearbox.unmanaged.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    return summarize(
        tally,
        model=name,
        mode=mode.name,
        of_mode=mode.summary(tally),
        ladder=gearbox.ladder_report(),
        bits_per_weight={gear.name: gearbox.bits_per_weight(gear) for gear in gearbox.ladder},
        weight_bytes={gear.name: gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder},
        original_bytes=gearbox.original_bytes_per_token(),
        tokens_per_second=speed.tokens_per_second,
        prompt_tokens=speed.prompt_tokens,
        prompt_tokens_per_second=speed.prompt_tokens_per_second,
        shift_seconds=gearbox.shift_seconds,
        peak_memory_bytes=peak_memory,
        active_memory_bytes=gearbox.active_memory,
        managed_layers=len(gearbox.layers),
        unmanaged_layers=len(gearbox.unmanaged),
        unmanaged_reasons=reasons,
        compute_dtype=dtype_name(gearbox.compute_dtype),
        storage_dtype=dtype_name(gearbox.storage[""]),
        **further,
    )
