"""The modes route (GEARBX 10.3), static and telemetry-only, around mlx-lm's stream_generate.

The gear engaged at the start of a pass computes the token. In mode route, entropies of past tokens choose the gear of
later ones. mlx-lm runs one token ahead: when token t is yielded, the pass of t + 1 is queued, so a shift first affects
t + 2. Mode static stays in one gear, with the kernels and types of the other modes: its output in the top gear equals
mode lossless's. Mode telemetry-only changes no layer, and names the gear that mode route would use.

Automatic thresholds are found once per gearbox, at first use (GEARBX 4.2, the MLX backend): the top gear continues
three short prompts. If fewer than five of its tokens have entropy above 0, the entropies of the prompt are used.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from ..compat.loops import streaming_with
from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear, Ladder
from ..ranks.agreement import agreement_of
from ..routing.calibration import MIN_SAMPLES, median_thresholds, percentile_thresholds
from ..routing.gates import AUTO, Gate, Monitor, OneGear, ThresholdGate, first_gear
from ..telemetry.summary import Tally
from .batches import SequenceState, SharedMode
from .caches import gears_of
from .generation import Telemetry
from .governor import Governor
from .mode import encoded, gear_of_prompt, of_model, thresholds_for, vocabulary_of
from .modes import RouteSettings, StaticSettings
from .response import GearResponse, Step, single_pass
from .sampling import blame_of, entropy_bits, reader_of, take_kv_reads


@dataclass(frozen=True)
class InEngagedGear(SharedMode):
    """Base class of modes that compute each token in the engaged gear. A subclass chooses the gears (`sequence`)."""

    def stream(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompt: Any,
        *,
        gearbox: Any,
        controller: Governor | None,
        **kwargs: Any,
    ) -> Iterator[GearResponse]:
        """Generate with mlx-lm's stream_generate, and shift between its tokens."""
        text, reader, agreement = self.sequence(gearbox, tokenizer, prompt), reader_of(gearbox), agreement_of(model)
        gearbox.shift(text.first)  # so that it is made now rather than during generation
        gearbox.shift(text.prompt_gear)
        kv_gears, sampled = gears_of(kwargs.get("prompt_cache")), deque[tuple[mx.array, Step]]()
        sampler, callback = kwargs.get("sampler") or greedy_sampler, kwargs.get("prompt_progress_callback")
        if kv_gears is not None:
            kv_gears.begin_prompt()

        def progress(read: int, tokens: int) -> None:
            if read == tokens - 1:
                gearbox.shift(text.first)
            if callback is not None:
                callback(read, tokens)

        def sample(logprobs: mx.array) -> mx.array:
            # Queued with the token. Computed from the response, the entropy would wait for the pass that mlx-lm has
            # queued after this one (GEARBX 3.6).
            token, entropy = agreement.arrays(sampler(logprobs), reader.entropy(logprobs))
            mx.async_eval(entropy)
            sampled.append((entropy, single_pass(gearbox, gearbox.gear, **take_kv_reads(kv_gears))))
            return token

        kwargs |= {"sampler": sample, "prompt_progress_callback": progress}
        responses = streaming_with(reader.logsumexp)(model, tokenizer, prompt, **kwargs)
        telemetry = Telemetry(text.monitor, blame_of(gearbox), controller)
        return self.shifting(gearbox, text, telemetry, responses, sampled)

    def shifting(
        self,
        gearbox: Gearbox | Observer,
        text: SequenceState,
        telemetry: Telemetry,
        responses: Iterator[GenerationResponse],
        sampled: deque[tuple[mx.array, Step]],
    ) -> Iterator[GearResponse]:
        """Yield mlx-lm's responses with telemetry, and shift after each as the gate chooses.

        Args:
            sampled: entropy in bits and step of the tokens that mlx-lm has not yielded yet.
        """
        with telemetry.governing():
            gearbox.shift(text.prompt_gear)
            telemetry.resume()
            for response in responses:
                entropy, step = sampled.popleft()
                shown, reading = telemetry.response(vars(response), step, float(entropy))
                gear = gearbox.ladder[text.gate.update(reading)]
                gearbox.shift(gear)
                gearbox.prepare(gearbox.ladder[text.gate.peek(reading.forecast)])
                yield shown
                gearbox.shift(gear)  # since other sequences may have shifted
                telemetry.resume()


@dataclass(frozen=True)
class Route(RouteSettings, InEngagedGear):
    """Mode route: shifts by the rolling entropy.

    Args:
        gate: replaces thresholds, hysteresis and duration; None: a ThresholdGate.
        others: of `RouteSettings`.
    """

    name: ClassVar[str] = "route"

    gate: Gate | None = None

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> SequenceState:
        gate = self.resolved(gearbox, tokenizer, prompt).gate_for(gearbox)
        monitor = Monitor(vocabulary_of(gearbox), self.window)
        first = self.first_gear(gearbox, tokenizer, prompt)
        return SequenceState(gate, monitor, first, gear_of_prompt(gearbox, self.prompt_gear, first))

    def resolved(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> "Route":
        if self.gate is not None or self.thresholds is None:
            return self
        if self.thresholds == AUTO:
            return replace(self, thresholds=auto_thresholds(gearbox, tokenizer, prompt).thresholds)
        return replace(self, thresholds=thresholds_for(self.thresholds, gearbox))

    def for_prompt(self, typed: str, ladder: Ladder) -> "Route":
        if self.initial_gear != AUTO:
            return self
        return replace(self, initial_gear=ladder[first_gear(typed, len(ladder))].name)

    def gate_for(self, gearbox: Gearbox | Observer) -> Gate:
        """Return the given gate, or a gate from thresholds. Raises GearbxError if they do not fit the ladder."""
        if self.gate is not None:
            return deepcopy(self.gate)  # sequences of one mode may take turns
        return ThresholdGate(thresholds_for(self.thresholds, gearbox), self.hysteresis, self.min_gear_duration)

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        """Return the gears as Mode does, for a mode with a named initial gear."""
        return gear_of_prompt(gearbox, self.prompt_gear, self.first_gear(gearbox)), None

    def first_gear(self, gearbox: Gearbox | Observer, tokenizer: Any = None, prompt: Any = "") -> Gear:
        """Return the initial gear. Raises GearbxError if it is not in the ladder."""
        ladder = gearbox.ladder
        if self.initial_gear == AUTO:
            if not isinstance(prompt, str):  # without special tokens, whose brackets would count as mathematics
                tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
                prompt = tokenizer.decode(tokens, skip_special_tokens=True)
            return ladder[first_gear(prompt, len(ladder))]
        return ladder.find(self.initial_gear)


@dataclass(frozen=True)
class Static(StaticSettings, InEngagedGear):
    """Mode static: one gear. Args: of `StaticSettings`."""

    name: ClassVar[str] = "static"
    no_caps_reason: ClassVar[str] = "stays in one gear"

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> SequenceState:
        reads, gear = self.gears_of_text(gearbox)
        return SequenceState(OneGear(gear.index), Monitor(vocabulary_of(gearbox), self.window), gear, reads)

    def gears_of_text(self, gearbox: Gearbox | Observer) -> tuple[Gear, Gear]:
        gear = self.gear_of(gearbox)
        return gear_of_prompt(gearbox, self.prompt_gear, gear), gear

    def gear_of(self, gearbox: Gearbox | Observer) -> Gear:
        """Return the named gear or the top one. Raises GearbxError if it is not in the ladder."""
        return gearbox.ladder.top if self.gear is None else gearbox.ladder.find(self.gear)


@dataclass(frozen=True)
class TelemetryOnly(Route):
    """Mode route without shifts: no layer changes, and the tokens are mlx-lm's (GEARBX 12.2)."""

    name: ClassVar[str] = "telemetry-only"
    no_caps_reason: ClassVar[str] = "changes no gear that could be capped"

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Observer:
        """Return the given observer, or a new one. Raises GearbxError for a gearbox that shifts."""
        if isinstance(gearbox, Gearbox):
            raise GearbxError("mode 'telemetry-only': shifts no gears, got a Gearbox; pass an Observer, or omit it")
        observer = gearbox or Observer(model)
        of_model(observer, model)
        return observer

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {"passes": {}}  # no gear ran


SHORT_PROMPTS = (
    "Once upon a time there was a king who had three sons.",
    "Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have?",
    "Explain why the sum of two odd numbers is always even.",
)
CONTINUED = 16  # tokens generated after each of them
MAX_READ = 1024  # tokens of a prompt; more do not improve the thresholds
LOGITS = 1 << 24  # logits per pass: 64 MiB in float32


@dataclass(frozen=True)
class AutoThresholds:
    """thresholds: bits, ascending. tokens: number of tokens that gave them. source: of these tokens, in words."""

    thresholds: tuple[float, ...]
    tokens: int
    source: str

    def about(self) -> str:
        shown = ", ".join(f"{threshold:.3f}" for threshold in self.thresholds)
        return f"thresholds {shown} bits, found on {self.source} ({self.tokens} tokens)"


_found: WeakKeyDictionary[Any, AutoThresholds] = WeakKeyDictionary()


def auto_thresholds(gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any = None) -> AutoThresholds:
    """Return the thresholds of a gearbox, found at first use and constant afterwards (GEARBX 18.2).

    Args:
        prompt: text or tokens, used if three short prompts yield fewer than five tokens with entropy above 0.

    Raises:
        GearbxError: the prompt too has fewer than five such tokens.
    """
    if gearbox in _found:
        return _found[gearbox]
    model, gears, size, before = gearbox.model, len(gearbox.ladder), vocabulary_of(gearbox), gearbox.gear
    tokens = [] if prompt is None else encoded(tokenizer, prompt)[:MAX_READ]
    gearbox.shift(gearbox.ladder.top)
    try:
        entropies = [entropy for text in SHORT_PROMPTS for entropy in continued_entropies(model, tokenizer, text)]
        if sum(entropy > 0 for entropy in entropies) >= MIN_SAMPLES:
            thresholds, source = median_thresholds(entropies, gears), "three short prompts"
        else:
            entropies, source = list(prompt_entropies(model, tokens, size)), "the prompt"
            thresholds = percentile_thresholds(entropies, gears, size)
        # Rank 0 decides, since machines of different kinds round differently.
        (shared,) = agreement_of(model).arrays(mx.array(thresholds, mx.float32))
    finally:
        gearbox.shift(before)
    _found[gearbox] = AutoThresholds(tuple(map(float, np.array(shared))), len(entropies), source)
    return _found[gearbox]


def prompt_entropies(model: nn.Module, tokens: list[int], vocabulary: int) -> Iterator[float]:
    """Yield the entropy in bits at every position of a prompt, read in parts with small logits."""
    size, cache = max(LOGITS // vocabulary, 1), make_prompt_cache(model)
    for start in range(0, len(tokens), size):
        logits = model(mx.array(tokens[start : start + size])[None], cache=cache)
        yield from map(float, np.array(entropy_bits(logits)[0]))


def continued_entropies(model: nn.Module, tokenizer: Any, text: str) -> Iterator[float]:
    """Yield the entropy in bits of the tokens that a model generates greedily after a prompt."""
    prompt: Any = text
    if getattr(tokenizer, "chat_template", None):
        with suppress(Exception):  # of a template's own code, which the user may have excluded
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, CONTINUED):
        yield float(np.array(entropy_bits(response.logprobs)))
