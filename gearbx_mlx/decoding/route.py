"""mlx-lm's stream_generate, wrapped: the modes route (GEARBX 10.3), static and telemetry-only.

Each token is computed in the gear that is engaged when its pass begins. In mode route, the entropies of past tokens
choose the gear of coming ones. mlx-lm runs one token ahead: when token t is handed out, the pass that computes t + 1
is queued. A shift made then first acts on t + 2. Mode static stays in one gear, with the kernels and the type of all
other modes: the top gear's text is that of mode lossless. Mode telemetry-only replaces and shifts nothing, and
names the gear that mode route would use.

Thresholds may be found by the model itself, at first use, once for a gearbox, as GEARBX 4.2 does on MLX: the top gear
continues three short prompts. A model that is sure of all its tokens there says too little: then the entropies of the
prompt count.
"""

from collections import deque
from collections.abc import Iterator
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
from ..routing.calibration import FEWEST_SAMPLES, median_thresholds, percentile_thresholds
from ..routing.gates import AUTO, Gate, Monitor, OneGear, ThresholdGate, first_gear
from ..telemetry.summary import Tally
from .batches import BatchText, SharedMode
from .caches import gears_of
from .generation import Telemetry
from .governor import Governor
from .mode import encoded, gear_of_prompt, of_model, thresholds_for, vocabulary_of
from .modes import RouteSettings, StaticSettings
from .response import GearResponse, GeneratedToken, Step, single_pass
from .sampling import blame_of, entropy_bits, kv_read, reader_of


@dataclass(frozen=True)
class InEngagedGear(SharedMode):
    """Each token in the gear that is engaged when its pass begins. A subclass chooses the gears."""

    def text(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> BatchText:
        """Return the gate and the monitor of a text, and the gear that it begins in."""
        raise NotImplementedError

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
        """mlx-lm's stream_generate: entropy from its log-probabilities, `model.update_modules` between its tokens."""
        text, reader, agreement = self.text(gearbox, tokenizer, prompt), reader_of(gearbox), agreement_of(model)
        gearbox.shift(text.first)  # so that it is made, and not in the middle of the text
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
            # Queued here, the entropy is ready with the token. Taken from the response, it would wait for the pass that
            # mlx-lm has queued behind it: a whole token (GEARBX 3.6).
            token, entropy = agreement.arrays(sampler(logprobs), reader.entropy(logprobs))
            mx.async_eval(entropy)
            sampled.append((entropy, replace(single_pass(gearbox, gearbox.gear), **kv_read(kv_gears))))
            return token

        kwargs |= {"sampler": sample, "prompt_progress_callback": progress}
        responses = streaming_with(reader.logsumexp)(model, tokenizer, prompt, **kwargs)
        telemetry = Telemetry(text.monitor, blame_of(gearbox), controller)
        return self.shifting(gearbox, text, telemetry, responses, sampled)

    def shifting(
        self,
        gearbox: Gearbox | Observer,
        text: BatchText,
        telemetry: Telemetry,
        responses: Iterator[GenerationResponse],
        sampled: deque[tuple[mx.array, Step]],
    ) -> Iterator[GearResponse]:
        """Pass mlx-lm's responses on, and shift after each as the gate chooses.

        Args:
            sampled: entropy in bits and step of the tokens that are still to be handed out.
        """
        with telemetry.governing():
            gearbox.shift(text.prompt_gear)
            telemetry.resume()
            for response in responses:
                entropy, step = sampled.popleft()
                token = GeneratedToken(response.token, response.logprobs, float(entropy), step)
                shown, reading = telemetry.response(response, token)
                gear = gearbox.ladder[text.gate.update(reading)]
                gearbox.shift(gear)
                gearbox.prepare(gearbox.ladder[text.gate.peek(reading.forecast)])
                yield shown
                gearbox.shift(gear)  # another text may have shifted meanwhile
                telemetry.resume()

    def sequence(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: list[int]) -> BatchText:
        """Return what one text of a batch has of its own; of a gate that was given, a copy."""
        text = self.text(gearbox, tokenizer, prompt)
        return replace(text, gate=deepcopy(text.gate))


@dataclass(frozen=True)
class Route(RouteSettings, InEngagedGear):
    """Shift by the rolling entropy.

    Args:
        gate: a Gate of your own, in place of thresholds, hysteresis and duration.
        others: of `RouteSettings`.
    """

    name: ClassVar[str] = "route"

    gate: Gate | None = None

    def text(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> BatchText:
        gate = self.settled(gearbox, tokenizer, prompt).gate_for(gearbox)
        monitor = Monitor(vocabulary_of(gearbox), self.window)
        first = self.first_gear(gearbox, tokenizer, prompt)
        return BatchText(gate, monitor, first, gear_of_prompt(gearbox, self.prompt_gear, first))

    def settled(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> "Route":
        if self.gate is not None or self.thresholds is None:
            return self
        if self.thresholds == AUTO:
            return replace(self, thresholds=auto_thresholds(gearbox, tokenizer, prompt).thresholds)
        return replace(self, thresholds=self.bits(gearbox))

    def begun(self, typed: str, ladder: Ladder) -> "Route":
        if self.initial_gear != AUTO:
            return self
        return replace(self, initial_gear=ladder[first_gear(typed, len(ladder))].name)

    def gate_for(self, gearbox: Gearbox | Observer) -> Gate:
        """Return the gate for a gearbox. Raises GearbxError for thresholds that do not fit its ladder."""
        if self.gate is not None:
            return self.gate
        return ThresholdGate(self.bits(gearbox), self.hysteresis, self.min_gear_duration)

    def bits(self, gearbox: Gearbox | Observer) -> tuple[float, ...]:
        """Return the thresholds of a settled mode. Raises GearbxError for those that do not fit the ladder or the
        model."""
        return thresholds_for(self.thresholds, gearbox)

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        """Like Mode's, of a mode whose initial gear is named."""
        return gear_of_prompt(gearbox, self.prompt_gear, self.first_gear(gearbox)), None

    def first_gear(self, gearbox: Gearbox | Observer, tokenizer: Any = None, prompt: Any = "") -> Gear:
        """Raises GearbxError for a gear that the ladder does not have."""
        ladder = gearbox.ladder
        if self.initial_gear == AUTO:
            if not isinstance(prompt, str):  # special tokens have brackets that are not mathematics
                tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
                prompt = tokenizer.decode(tokens, skip_special_tokens=True)
            return ladder[first_gear(prompt, len(ladder))]
        return ladder.find(self.initial_gear)


@dataclass(frozen=True)
class Static(StaticSettings, InEngagedGear):
    """Stay in one gear. Args: of `StaticSettings`."""

    name: ClassVar[str] = "static"
    uncapped: ClassVar[str] = "stays in the gear that it is given"

    def text(self, gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any) -> BatchText:
        gear = self.gear_of(gearbox)
        reads = gear_of_prompt(gearbox, self.prompt_gear, gear)
        return BatchText(OneGear(gear.index), Monitor(vocabulary_of(gearbox), self.window), gear, reads)

    def gears_of_text(self, gearbox: Gearbox) -> tuple[Gear, Gear | None]:
        gear = self.gear_of(gearbox)
        return gear_of_prompt(gearbox, self.prompt_gear, gear), gear

    def gear_of(self, gearbox: Gearbox | Observer) -> Gear:
        """Raises GearbxError for a gear that the ladder does not have."""
        return gearbox.ladder.top if self.gear is None else gearbox.ladder.find(self.gear)


@dataclass(frozen=True)
class TelemetryOnly(Route):
    """Like Route, for a model whose layers stay as they are and whose tokens are mlx-lm's (GEARBX 12.2)."""

    name: ClassVar[str] = "telemetry-only"
    uncapped: ClassVar[str] = "changes no gear, so there is nothing to cap"

    def gearbox_for(self, model: nn.Module, gearbox: Gearbox | Observer | None) -> Observer:
        """Return the observer that is given, or a new one. Raises GearbxError for a gearbox that shifts."""
        if isinstance(gearbox, Gearbox):
            raise GearbxError("mode 'telemetry-only' shifts no gears: give an Observer, or no gearbox")
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
CONTINUED = 16  # tokens after each of them
MAX_READ = 1024  # tokens of a prompt: more say no more about the kind of text
LOGITS = 1 << 24  # numbers at once: 64 MiB in float32


@dataclass(frozen=True)
class AutoThresholds:
    """thresholds: bits, ascending. tokens: whose entropies they come from. source: what these tokens were."""

    thresholds: tuple[float, ...]
    tokens: int
    source: str

    def about(self) -> str:
        shown = ", ".join(f"{threshold:.3f}" for threshold in self.thresholds)
        return f"thresholds {shown} bits, found on {self.source} ({self.tokens} tokens)"


_found: WeakKeyDictionary[Any, AutoThresholds] = WeakKeyDictionary()


def auto_thresholds(gearbox: Gearbox | Observer, tokenizer: Any, prompt: Any = None) -> AutoThresholds:
    """Return the thresholds of a gearbox, found when it is first asked; they do not change afterwards (GEARBX 18.2).

    Args:
        prompt: text or tokens to find them on, where three short prompts have fewer than five tokens with an entropy.

    Raises:
        GearbxError: neither these nor the prompt have five such tokens.
    """
    if gearbox in _found:
        return _found[gearbox]
    model, gears, size, before = gearbox.model, len(gearbox.ladder), vocabulary_of(gearbox), gearbox.gear
    tokens = [] if prompt is None else [int(token) for token in np.array(encoded(tokenizer, prompt))[:MAX_READ]]
    gearbox.shift(gearbox.ladder.top)
    try:
        entropies = [entropy for text in SHORT_PROMPTS for entropy in continued_entropies(model, tokenizer, text)]
        if sum(entropy > 0 for entropy in entropies) >= FEWEST_SAMPLES:
            thresholds, source = median_thresholds(entropies, gears), "three short prompts"
        else:
            entropies, source = list(prompt_entropies(model, tokens, size)), "the prompt"
            thresholds = percentile_thresholds(entropies, gears, size)
        # Those of rank 0: machines of different kinds round differently.
        (shared,) = agreement_of(model).arrays(mx.array(thresholds, mx.float32))
    finally:
        gearbox.shift(before)
    _found[gearbox] = AutoThresholds(tuple(map(float, np.array(shared))), len(entropies), source)
    return _found[gearbox]


def prompt_entropies(model: nn.Module, tokens: list[int], vocabulary: int) -> Iterator[float]:
    """Bits at every position of a prompt, read in parts whose logits take little memory."""
    size, cache = max(LOGITS // vocabulary, 1), make_prompt_cache(model)
    for start in range(0, len(tokens), size):
        logits = model(mx.array(tokens[start : start + size])[None], cache=cache)
        yield from map(float, np.array(entropy_bits(logits)[0]))


def continued_entropies(model: nn.Module, tokenizer: Any, text: str) -> Iterator[float]:
    """Bits of the tokens that a model writes after a prompt, greedily."""
    prompt: Any = text
    if getattr(tokenizer, "chat_template", None):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, CONTINUED):
        yield float(np.array(entropy_bits(response.logprobs)))
