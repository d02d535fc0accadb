"""What every mode is: a way from gears to tokens, with its settings. And what all texts share.

That is prompts as tokens, the length of the logits, and turns with one gearbox, also from threads.
"""

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import mlx.nn as nn

from ..errors import GearbxError, GearbxWarning, error_context
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox, Observer, attached, model_fingerprint
from ..gears.in_place import own_codes, without_gears
from ..gears.ladder import DENSE, Gear, Ladder
from ..kernels.dispatch import on_cpu
from ..ranks.agreement import agreement_of
from ..routing.gates import BatchPolicy, Thresholds, highest, thresholds_in_bits
from ..telemetry.summary import Tally
from .governor import Governor, MemoryGuard
from .response import GearResponse

SAME = "same"  # as a prompt gear: the one that begins the text

_warned: WeakSet[Gearbox] = WeakSet()
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
making = threading.RLock()  # a model gets one gearbox, however many threads ask for it at once


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
        """Return the gearbox to run with: the one that is given, else the one that the model has, else a new one.

        Raises:
            GearbxError: a gearbox that the mode cannot use, or that belongs to another model.
        """
        if gearbox is None:
            gearbox = attached(model)
        if isinstance(gearbox, Observer) or (gearbox is None and without_gears(model)):
            codes = own_codes(model)
            told = "" if codes is None else f", or a Gearbox ({codes.summary()})"
            raise GearbxError(
                f"mode '{self.name}' needs a gearbox, and this model has an observer or no gears: use 'telemetry-only'"
                f"{told}"
            )
        return of_model(gearbox or Gearbox(model), model)

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        """Generate; `kwargs` are those of mlx-lm's stream_generate.

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

    def check_controller(self, controller: Governor | MemoryGuard, gearbox: Any) -> None:
        """Raises GearbxError where a controller cannot cap the gears."""
        if self.uncapped and controller.caps:
            raise GearbxError(f"mode '{self.name}' {self.uncapped}; use mode 'route'")
        if agreement_of(controller.gearbox.model).group is not None:
            raise GearbxError("a controller follows one machine's clock, and ranks share this model; leave it out")
        if gearbox is not controller.gearbox:
            raise GearbxError("the controller belongs to another gearbox; make one with Governor(gearbox)")

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        """Return the gear that reads a prompt, and the one that writes the text after it; None where several do.

        So it says what a KV cache holds, and which other texts may go on from it.
        """
        return gearbox.ladder.top, gearbox.ladder.top

    def settled(self, gearbox: Any, tokenizer: Any, prompt: Any) -> "Mode":
        """Return the mode with all settings that it finds by itself on a first prompt (text or tokens)."""
        return self

    def begun(self, typed: str, ladder: Ladder) -> "Mode":
        """Return the mode of a text whose prompt was typed so: the words of a chat template are not the user's."""
        return self

    def about(self) -> str:
        """Return what `--verbose all` says of the settings, in one line; nothing by default."""
        return ""

    def summary(self, tally: Tally) -> dict[str, Any]:
        """Return what the mode adds to a run's summary."""
        return {}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the same as lines of the table under a text: label and figure."""
        return []


def of_model(gearbox: Gearbox | Observer, model: nn.Module) -> Gearbox | Observer:
    """Return the gearbox itself. Raises GearbxError if it belongs to another model."""
    if gearbox.model is not model:
        raise GearbxError("the gearbox belongs to another model; make one with Gearbox(model)")
    return gearbox


def gear_of_prompt(gearbox: Gearbox | Observer, wanted: str | int | None, first: Gear) -> Gear:
    """Return the gear that reads a prompt: every later token attends to what it writes into the KV cache (PMPD,
    2410.13461).

    A pass over a prompt reads the weights once for many tokens, so that a precise gear costs little there. The prompt's
    last token has a pass of its own, which makes the first token of the text, in the gear of the text.

    Args:
        wanted: name or bits; "same": the gear that begins the text; None: the best reader that is in memory.
        first: the gear that begins the text.

    Raises:
        GearbxError: a gear that the ladder does not have; an observer, which has none to read in.
    """
    if wanted == SAME or (wanted is None and isinstance(gearbox, Observer)):
        return first
    if isinstance(gearbox, Observer):
        raise GearbxError(f"the prompt gear is {wanted}, and this model has one precision; leave it out")
    if wanted is not None:
        with error_context("prompt gear"):
            return gearbox.ladder.find(wanted)
    best = max(first, best_reader(gearbox), key=lambda gear: gear.index)
    if first == best or gearbox.keeps_all:
        return best
    if gearbox not in _warned:
        _warned.add(gearbox)
        megabytes = gearbox.weight_bytes_per_token(best) / 1e6
        said = (
            f"the prompt is read in gear '{first.name}', since gear '{best.name}' ({megabytes:.0f} MB) is not in "
            f"memory; --prompt-gear {best.name} brings it in for every prompt, and the text comes closer to that gear's"
        )
        warnings.warn(said, GearbxWarning, stacklevel=3)
    return first


def best_reader(gearbox: Gearbox) -> Gear:
    """Return the gear to read prompts in: the top one, or on a CPU 8 bits, where there are some.

    Native kernels multiply a prompt by 8 bits as fast as by 4, and by the original weights more slowly; texts after
    either are as close to the top gear's (`python -m research prompt-gear`).
    """
    quantized = [gear for gear in gearbox.ladder if 8 <= gear.bits < DENSE]
    return quantized[-1] if quantized and gearbox.kernels.native and on_cpu() else gearbox.ladder.top


def is_read_again(mode: Mode, gearbox: Gearbox | Observer | None) -> bool:
    """Return whether a text is read again in a later prompt, as in a chat: it was written in other gears than prompts
    are."""
    if gearbox is None or isinstance(gearbox, Observer):
        return False
    reads, writes = mode.gears_of_text(gearbox)
    return reads != writes


def encoded(tokenizer: Any, prompt: Any) -> Any:
    """Return a prompt as tokens, as mlx-lm's stream_generate makes them of text."""
    if not isinstance(prompt, str):
        return prompt
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=special)


def check_known(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raises GearbxError for a token that a model does not know: MLX would read beyond its table.

    Args:
        name: of the prompt.
        vocabulary: how many tokens there are.
    """
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise GearbxError(f"{name} has token {unknown}, and the model knows 0 to {vocabulary - 1}")


def vocabulary_of(gearbox: Any) -> int:
    """V of the gearbox's (or Observer's) model. Raises GearbxError for a model that turns no token into logits."""
    if gearbox not in _known:
        _known[gearbox] = vocabulary(gearbox.model)
    return _known[gearbox]


def thresholds_for(thresholds: Thresholds, gearbox: Any) -> tuple[float, ...]:
    """Return thresholds in bits for a gearbox or an Observer. Raises GearbxError as `thresholds_in_bits`."""
    bits = [gear.bits for gear in gearbox.ladder]
    return thresholds_in_bits(thresholds, bits, vocabulary_of(gearbox), partial(model_fingerprint, gearbox.model))


def decode_lock(gearbox: Any) -> AbstractContextManager:
    """Return the lock that a text has while it shifts a gearbox and computes a token with it."""
    with making:
        return _locks.setdefault(gearbox, threading.RLock())
