"""The rev counter: the entropy of every token, and how it was computed, read where mlx-lm samples."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.sample_utils import make_sampler

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.observer import Observer
from ..kernels.dispatch import native_entropy
from ..routing.entropy import entropy_bits
from ..routing.monitor import Monitor
from .response import GearResponse
from .wrapper import ModelWrapper, Step

if TYPE_CHECKING:
    from ..machine.controller import Decision
    from .governor import Governor

Sampler = Callable[[mx.array], mx.array]
Entropy = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class SampledToken:
    """Of one token: entropy in bits, how its logits came about, whether rounding might have decided it."""

    entropy: mx.array
    step: Step
    near_tie: mx.array | None = None


class EntropySampler:
    """A sampler that also reads the rev counter: it notes entropy and step of each pass, then samples as told.

    The entropy is put on the stream here, before the next pass is. Computed from the response, it would stand behind
    that pass, and reading it would wait for a whole token (GEARBX 3.6).

    Args:
        sampler: of mlx-lm.
        step: tells how the latest logits came about.
        entropy: in bits, of log-probabilities.
    """

    def __init__(self, sampler: Sampler, step: Callable[[], Step], entropy: Entropy = entropy_bits):
        self.sampler = sampler
        self.step = step
        self.entropy = entropy
        self.readings: deque[SampledToken] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        entropy, step, near_tie = self.entropy(logprobs), self.step(), None
        if step.noise is not None:
            best = mx.topk(logprobs, 2, axis=-1)
            near_tie = mx.abs(best[..., 0] - best[..., 1]) <= step.noise
            mx.async_eval(near_tie)
        mx.async_eval(entropy)
        self.readings.append(SampledToken(entropy, step, near_tie))
        return self.sampler(logprobs)


def entropy_function(gearbox: Gearbox | Observer) -> Entropy:
    """entropy_bits, by a native kernel where the gearbox uses those: over a vocabulary MLX's takes 1 ms on x86."""
    native = native_entropy() if isinstance(gearbox, Gearbox) and gearbox.kernels.native else None
    return native or entropy_bits


def measured(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    step: Callable[[], Step],
    entropy: Entropy = entropy_bits,
    **kwargs: Any,
) -> Iterator[tuple[GenerationResponse, SampledToken]]:
    """mlx-lm's responses, each with its reading."""
    entropy_sampler = EntropySampler(kwargs.pop("sampler", None) or make_sampler(), step, entropy)
    for response in mlx_stream_generate(model, tokenizer, prompt, sampler=entropy_sampler, **kwargs):
        yield response, entropy_sampler.readings.popleft()


def governed(
    responses: Iterator[tuple[GenerationResponse, SampledToken]], governor: "Governor | None"
) -> "Iterator[tuple[GenerationResponse, SampledToken, Decision | None]]":
    """What is generated, with what a governor decided after each token."""
    if governor is not None:
        return governor.govern(responses)
    return ((response, reading, None) for response, reading in responses)


def single_pass(gearbox: Gearbox | Observer, gear: Gear) -> Step:
    """A token that took one pass in one gear."""
    passes = tuple(int(gear == other) for other in gearbox.ladder)
    return Step(gear, (), passes, gearbox.weight_bytes_per_token(gear))


def told(
    response: GenerationResponse, step: Step, entropy: float, mean: float, before: Gear | None, **further: Any
) -> GearResponse:
    """mlx-lm's response with what the gearbox saw; `before` is the gear of the token before, if there was one."""
    seen = {
        "entropy": entropy,
        "mean_entropy": mean,
        "gear": step.gear.name,
        "shifted": before is not None and step.gear != before,
        "passes": step.passes,
        "weight_bytes": step.weight_bytes,
        "drafted": step.drafted,
    }
    return GearResponse(**{**vars(response), **seen, **further})


def drive(
    model: ModelWrapper,
    tokenizer: Any,
    prompt: Any,
    *,
    monitor: Monitor,
    controller: "Governor | None" = None,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate with a model that changes gear by itself.

    Args:
        controller: caps its gears.
        kwargs: of mlx-lm's stream_generate.
    """
    before: Gear | None = None
    responses = measured(model, tokenizer, prompt, lambda: model.step, entropy_function(model.gearbox), **kwargs)
    for response, reading, decision in governed(responses, controller):
        entropy, step = float(reading.entropy), reading.step.given(response.token)
        near_tie = reading.near_tie is not None and bool(reading.near_tie)
        mean = monitor.update(entropy).mean
        further = {"from_draft": step.accepted, "near_tie": near_tie, "decision": decision}
        yield told(response, step, entropy, mean, before, **further)
        before = step.gear
