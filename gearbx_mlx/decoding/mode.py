"""What every mode is: a way from gears to tokens, with its settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer, attached
from ..gears.in_place import without_gears
from ..ranks.agreement import agreement_of
from ..routing.gates import BatchPolicy, highest
from ..telemetry.summary import Tally
from .governor import Governor
from .response import GearResponse

AUTO = "auto"


@dataclass(frozen=True)
class Mode:
    """A way to generate, and its settings. A subclass stands in a file of its own and in `modes.MODES`.

    name: what flags and files call it. trace_fields: fields of GearResponse that it adds to every token's record.
    uncapped: why a controller cannot cap its gears, if it cannot.
    """

    name: ClassVar[str]
    trace_fields: ClassVar[tuple[str, ...]] = ()
    uncapped: ClassVar[str] = ""

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Gearbox | Observer | None:
        """The gearbox to run with: the one that is given, else the one that the model has, else a new one.

        Raises:
            GearbxError: a gearbox that the mode cannot use, or that belongs to another model.
        """
        if gearbox is None:
            gearbox = attached(model)
        if isinstance(gearbox, Observer) or (gearbox is None and without_gears(model)):
            raise GearbxError(
                f"mode '{self.name}' needs a gearbox, and this model has an observer or no gears: use 'telemetry-only'"
            )
        return of_model(gearbox or Gearbox(model), model)

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        """Generate; `kwargs` are of mlx-lm's stream_generate.

        Args:
            gearbox: from `gearbox_for`.
            controller: caps the gears.
        """
        raise NotImplementedError

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> Any:
        """Many texts at once: an object with the methods of mlx-lm's BatchGenerator, whose keywords `kwargs` are.

        Its `next` returns what was read of prompts, and BatchGearResponses: none, one or several of a sequence.

        Args:
            gearbox: from `gearbox_for`.
            policy: the gear of a step, which all sequences share, by their wishes.

        Raises:
            GearbxError: a mode that writes one text at a time.
        """
        raise GearbxError(
            f"mode '{self.name}' writes one text at a time; use 'route', 'static', 'telemetry-only' or 'lossless', "
            "or stream_generate for each text"
        )

    def check_controller(self, controller: Governor, gearbox: Any, has_draft_model: bool) -> None:
        """Raises GearbxError where a controller cannot cap the gears."""
        if self.uncapped:
            raise GearbxError(f"mode '{self.name}' {self.uncapped}; use mode 'route'")
        if agreement_of(controller.gearbox.model).group is not None:
            raise GearbxError("a controller follows one machine's clock, and ranks share this model; leave it out")
        if has_draft_model:
            raise GearbxError(
                "with a draft model tokens come several at a time and cannot be timed; leave one of them out"
            )
        if gearbox is not controller.gearbox:
            raise GearbxError("the controller belongs to another gearbox; make one with Governor(gearbox)")

    def settled(self, gearbox: Any, tokenizer: Any, prompt: Any) -> "Mode":
        """The mode with all settings that it finds by itself on a first prompt (text or tokens)."""
        return self

    def about(self) -> str:
        """What `--describe` says of the settings, in one line; nothing by default."""
        return ""

    def summary(self, tally: Tally) -> dict[str, Any]:
        """What the mode adds to a run's summary."""
        return {}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The same as lines of the table under a text: label and figure."""
        return []


def of_model(gearbox: Gearbox | Observer, model: nn.Module) -> Gearbox | Observer:
    """The gearbox itself. Raises GearbxError if it belongs to another model."""
    if gearbox.model is not model:
        raise GearbxError("the gearbox belongs to another model; make one with Gearbox(model)")
    return gearbox


def refuse_draft_model(mode: str, keywords: Mapping[str, Any]) -> None:
    """Raises GearbxError for a draft model in a mode whose gears are all of one model."""
    if keywords.get("draft_model") is not None:
        raise GearbxError(f"mode '{mode}' takes no draft model: the gears are all of one model; use mode 'route'")
