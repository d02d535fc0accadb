"""Base class of the decoding modes, and helpers that modes share.

The helpers encode prompts, choose the prefill gear, and lock a gearbox while a sequence computes with it.
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
import numpy as np

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

SAME = "same"  # as a prefill gear: the gear that generates the first token

_warned: WeakSet[Gearbox] = WeakSet()
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
creation_lock = threading.RLock()  # a model gets one gearbox, even if several threads ask for it at once


@dataclass(frozen=True)
class Mode:
    """A decoding mode with its settings. Each one has an entry in `modes.MODES`.

    Attributes:
        name: in flags and files.
        trace_fields: fields of GearResponse that the mode adds to every token's record.
        no_caps_reason: reason why a controller cannot cap the gears; "" if it can.
    """

    name: ClassVar[str]
    trace_fields: ClassVar[tuple[str, ...]] = ()
    no_caps_reason: ClassVar[str] = ""

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Gearbox | Observer | None:
        """Return the gearbox to use: the given one, else the model's, else a new one.

        Raises:
            GearbxError: a gearbox that the mode cannot use, or a different model's gearbox.
        """
        if gearbox is None:
            gearbox = attached(model)
        if isinstance(gearbox, Observer) or (gearbox is None and without_gears(model)):
            codes = own_codes(model)
            alternative = "" if codes is None else f", or pass a Gearbox ({codes.summary()})"
            raise GearbxError(
                f"mode '{self.name}': needs a gearbox, got a model with an observer or without gears; "
                f"use 'telemetry-only'{alternative}"
            )
        return of_model(gearbox or Gearbox(model), model)

    def stream(
        self, model: nn.Module, tokenizer: Any, prompt: Any, *, gearbox: Any, controller: Governor | None, **kwargs: Any
    ) -> Iterator[GearResponse]:
        """Generate a sequence. `kwargs` are the keywords of mlx-lm's stream_generate.

        Args:
            gearbox: from `gearbox_for`.
            controller: caps the gears.
        """
        raise NotImplementedError

    def batch_generator(
        self, model: nn.Module, tokenizer: Any, *, gearbox: Any, policy: BatchPolicy = highest, **kwargs: Any
    ) -> Any:
        """Return a generator of many sequences, with the methods and keywords of mlx-lm's BatchGenerator.

        Its `next` returns the progress of prompts, and BatchGearResponses: none, one or several per sequence.

        Args:
            gearbox: from `gearbox_for`.
            policy: chooses the gear that all sequences share in a step, from their requested gears.

        Raises:
            GearbxError: a mode that generates one sequence at a time.
        """
        raise GearbxError(
            f"mode '{self.name}': generates one sequence at a time; use 'route', 'static', 'telemetry-only' or "
            "'lossless', or call stream_generate for each prompt"
        )

    def check_controller(self, controller: Governor | MemoryGuard, gearbox: Any) -> None:
        """Validate that a controller can cap the gears. Raises GearbxError if it cannot."""
        if self.no_caps_reason and controller.caps:
            raise GearbxError(f"mode '{self.name}': {self.no_caps_reason}; use mode 'route'")
        if agreement_of(controller.gearbox.model).group is not None:
            raise GearbxError("controller: follows the clock of one machine, and ranks share this model; omit it")
        if gearbox is not controller.gearbox:
            raise GearbxError("controller: belongs to a different gearbox; pass Governor(gearbox)")

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        """Return the prefill gear, and the gear of the generated tokens or None if they have several.

        They decide whether a later sequence may continue from the KV cache of an earlier one.
        """
        return gearbox.ladder.top, gearbox.ladder.top

    def resolved(self, gearbox: Any, tokenizer: Any, prompt: Any) -> "Mode":
        """Return the mode with automatic settings resolved, if necessary by a first prompt (text or tokens)."""
        return self

    def for_prompt(self, typed: str, ladder: Ladder) -> "Mode":
        """Return the mode for a prompt as typed by the user, without the words of a chat template."""
        return self

    def about(self) -> str:
        """Return the settings as one line for `--verbose all`; "" by default."""
        return ""

    def summary(self, tally: Tally) -> dict[str, Any]:
        """Return the mode's fields of a run's summary."""
        return {}

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the mode's lines of the table after a run: label and value."""
        return []


def of_model(gearbox: Gearbox | Observer, model: nn.Module) -> Gearbox | Observer:
    """Return the gearbox. Raises GearbxError if it belongs to a different model."""
    if gearbox.model is not model:
        raise GearbxError("gearbox: belongs to a different model; pass Gearbox(model)")
    return gearbox


def gear_of_prompt(gearbox: Gearbox | Observer, wanted: str | int | None, first: Gear) -> Gear:
    """Return the prefill gear. Every later token attends to the KV cache entries that it writes (PMPD, 2410.13461).

    Prefill reads the weights once for many tokens, so a precise gear costs little there. The prompt's last token has
    its own forward pass for the first generated token, in that token's gear.

    Args:
        wanted: name or bits; "same": the initial gear; None: the best prefill gear in memory.
        first: the initial gear.

    Raises:
        GearbxError: a gear that is not in the ladder; any gear for an observer.
    """
    if wanted == SAME or (wanted is None and isinstance(gearbox, Observer)):
        return first
    if isinstance(gearbox, Observer):
        raise GearbxError(f"prompt gear: the model has one precision, got {wanted}; omit it")
    if wanted is not None:
        with error_context("prompt gear"):
            return gearbox.ladder.find(wanted)
    best = max(first, best_prefill_gear(gearbox), key=lambda gear: gear.index)
    if first == best or gearbox.keeps_all:
        return best
    if gearbox not in _warned:
        _warned.add(gearbox)
        megabytes = gearbox.weight_bytes_per_token(best) / 1e6
        message = (
            f"prefill runs in gear '{first.name}', since gear '{best.name}' ({megabytes:.0f} MB) is not in memory; "
            f"use --prompt-gear {best.name} to load it for every prompt, for outputs closer to that gear's"
        )
        warnings.warn(message, GearbxWarning, stacklevel=3)
    return first


def best_prefill_gear(gearbox: Gearbox) -> Gear:
    """Return the best prefill gear: the top gear, or with native CPU kernels an 8-bit gear if the ladder has one.

    Native kernels prefill as fast with 8-bit as with 4-bit weights, and more slowly with original weights. Outputs
    after 8-bit prefill are as close to the top gear's as after top-gear prefill (`python -m research prompt-gear`).
    """
    quantized = [gear for gear in gearbox.ladder if 8 <= gear.bits < DENSE]
    return quantized[-1] if quantized and gearbox.kernels.native and on_cpu() else gearbox.ladder.top


def is_read_again(mode: Mode, gearbox: Gearbox | Observer | None) -> bool:
    """Return whether the next turn of a chat prefills generated tokens again, as their gear is not the prefill gear."""
    if gearbox is None or isinstance(gearbox, Observer):
        return False
    reads, writes = mode.gears_of_text(gearbox)
    return reads != writes


def encoded(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the tokens of a prompt (tokens or text); text is encoded as in mlx-lm's stream_generate."""
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    tokens: list[int] = np.array(prompt, int).reshape(-1).tolist()
    return tokens


def check_known(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Validate that a model has all tokens of a prompt: MLX would read beyond its embedding table.

    Args:
        name: of the prompt, for the GearbxError that a token outside the vocabulary raises.
        vocabulary: number of tokens of the model.
    """
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise GearbxError(f"{name}: tokens must be 0 to {vocabulary - 1}, got {unknown}; use this model's tokenizer")


def vocabulary_of(gearbox: Any) -> int:
    """Return V of the gearbox's (or Observer's) model. Raises GearbxError for a model without logits over tokens."""
    if gearbox not in _known:
        _known[gearbox] = vocabulary(gearbox.model)
    return _known[gearbox]


def thresholds_for(thresholds: Thresholds, gearbox: Any) -> tuple[float, ...]:
    """Return thresholds in bits for a gearbox or an Observer. Raises GearbxError as `thresholds_in_bits`."""
    bits = [gear.bits for gear in gearbox.ladder]
    return thresholds_in_bits(thresholds, bits, vocabulary_of(gearbox), partial(model_fingerprint, gearbox.model))


def decode_lock(gearbox: Any) -> AbstractContextManager:
    """Return the lock that a sequence holds while it shifts a gearbox and computes a token with it."""
    with creation_lock:
        return _locks.setdefault(gearbox, threading.RLock())
