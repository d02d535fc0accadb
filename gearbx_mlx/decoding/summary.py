"""The summary of a run: what adds up over its responses, with what the gearbox and the mode know of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import get_total_parameters

from ..compat.arrays import dtype_name
from ..gears.activations import model_dtype, stored_dtype
from ..gears.gearbox import Gearbox, Observer
from ..gears.streaming import Stream
from ..routing.pair import NAMES, parameter_ratio
from ..telemetry.summary import Tally, kv_summary, summarize
from .draft_plans import seconds_of_ways
from .governor import Governor
from .mode import Mode, turn
from .pair import Pair, bytes_read
from .response import GearResponse


@dataclass
class RunSpeed:
    """mlx-lm's own figures, added up over runs: tokens and seconds of prompts and of generation."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, last: GearResponse | None) -> None:
        """Take the last response of a run, or None of one that had none."""
        if last is not None:
            self.prompt_tokens += last.prompt_tokens
            self.prompt_seconds += last.prompt_tokens / last.prompt_tps
            self.tokens += last.generation_tokens
            self.seconds += last.generation_tokens / last.generation_tps

    def summary(self) -> dict[str, Any]:
        """Its fields of a summary."""
        return {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0,
        }


class Responses(Iterator[GearResponse]):
    """The responses of a text as they come, and the summary of the run so far.

    Each is computed while no other text uses the gearbox. Between two of them it is free.

    Args:
        responses: of `model` in a mode.
        gearbox: None for a pair, whose large model is `model`.
        draft_model: mlx-lm's, if one drafts.
    """

    def __init__(
        self,
        responses: Iterator[GearResponse],
        model: nn.Module,
        mode: Mode,
        gearbox: Gearbox | Observer | None,
        controller: Governor | None = None,
        draft_model: nn.Module | None = None,
    ):
        self._responses, self.last = responses, None  # type: tuple[Iterator[GearResponse], GearResponse | None]
        self._model, self._mode, self._gearbox = model, mode, gearbox
        self._controller, self._draft_model = controller, draft_model
        self._turn = contextlib.nullcontext() if gearbox is None else turn(gearbox)
        self.tally = Tally.of(NAMES if gearbox is None else [gear.name for gear in gearbox.ladder])

    def __next__(self) -> GearResponse:
        with self._turn:
            self.last = next(self._responses)
        self.tally.add(self.last)
        return self.last

    def close(self) -> None:
        """End the text."""
        if hasattr(self._responses, "close"):
            self._responses.close()

    def summary(self, model: str | None = None, beside: str | None = None) -> dict[str, Any]:
        """The run so far: tokens, gears, bytes of weights, drafts, speed, memory; the object of `--summary`.

        Args:
            model: its name; without one, the type of its class in mlx-lm.
            beside: the name of the small model or of mlx-lm's draft model.
        """
        name, speed = model or type_of(self._model), RunSpeed()
        speed.add(self.last)
        if isinstance(self._mode, Pair):
            return summary_of_pair(name, beside, self._model, self._mode, self.tally, speed)
        assert self._gearbox is not None
        result = summary_of(name, self._gearbox, self._mode, self.tally, speed, self._controller)
        if self._draft_model is not None:  # one pass for each token that it drafted
            passes = self.tally.drafted
            read = {"passes": passes, "weight_bytes": passes * bytes_read(self._draft_model)}
            result["draft_model"] = {"name": beside or type_of(self._draft_model), **read}
        return result


def type_of(model: nn.Module) -> str:
    """A model's type, such as "llama"."""
    return str(getattr(model, "model_type", type(model).__name__))


def summary_of(
    name: str,
    gearbox: Gearbox | Observer,
    mode: Mode,
    tally: Tally,
    speed: RunSpeed,
    controller: Governor | None = None,
) -> dict[str, Any]:
    """The summary of one run. With a controller, gears had fewer bits at times than by name."""
    further: dict[str, Any] = {}
    if controller is not None:
        further = {"effective_bits_per_weight": tally.mean(controller.bits_read), "controller": controller.summary()}
    stream = getattr(gearbox, "residency", None)
    if isinstance(stream, Stream):
        further["streaming"] = stream.summary(tally.tokens)
    further |= kv_summary(tally, len(gearbox.model.layers)) | seconds_of_ways(gearbox)
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
        **speed.summary(),
        shift_seconds=gearbox.shift_seconds,
        making_seconds=gearbox.making_seconds,
        peak_memory_bytes=mx.get_peak_memory(),
        active_memory_bytes=gearbox.active_memory,
        managed_layers=len(gearbox.layers),
        unmanaged_layers=len(gearbox.unmanaged),
        unmanaged_reasons=reasons,
        compute_dtype=dtype_name(gearbox.compute_dtype),
        storage_dtype=dtype_name(gearbox.storage[""]),
        **further,
    )


def parameters_of(models: tuple[nn.Module, nn.Module]) -> tuple[int, int]:
    """Numbers of parameters; quantized ones count as the weights that they stand for."""
    small, large = (int(get_total_parameters(model)) for model in models)
    return small, large


def summary_of_pair(
    name: str, small_name: str | None, large: nn.Module, mode: Pair, tally: Tally, speed: RunSpeed
) -> dict[str, Any]:
    """The summary of one run of two models that took turns."""
    models = mode.small_model, large
    counts = parameters_of(models)
    read, parameters = dict(zip(NAMES, map(bytes_read, models))), dict(zip(NAMES, counts))
    bits = {each: 8 * read[each] / parameters[each] for each in NAMES}
    return summarize(
        tally,
        model=name,
        small_model=small_name or type_of(mode.small_model),
        mode=mode.name,
        ladder=[{"name": each, "bits": bits[each], "bytes_per_weight": bits[each] / 8} for each in NAMES],
        bits_per_weight=bits,
        weight_bytes=read,
        of_mode=mode.summary(tally),
        parameters=parameters,
        parameter_ratio=parameter_ratio(tally.mean(tally.gear_tokens["large"]), counts),
        threshold_bits=mode.threshold,
        window=mode.window,
        min_gear_duration=mode.min_gear_duration,
        **speed.summary(),
        peak_memory_bytes=mx.get_peak_memory(),
        compute_dtype=dtype_name(model_dtype(large)),
        storage_dtype=dtype_name(stored_dtype(large)),
    )
