"""Routing (GEARBX 10.3): mlx-lm generates, the entropies of past tokens choose the gear of coming ones.

mlx-lm runs one token ahead: when token t is handed out, the pass that computes t + 1 has been dispatched. A shift made
then first acts on t + 2.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

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
from ..routing.gates import Gate
from ..routing.monitor import Monitor
from .response import GearResponse

Sampler = Callable[[mx.array], mx.array]


class Tachometer:
    """A sampler that also reads the rev counter: it notes entropy and gear of each pass, then samples as told.

    The entropy is put on the stream here, before the next pass is. Computed from the response, it would stand behind
    that pass, and reading it would wait for a whole token (GEARBX 3.6).
    """

    def __init__(self, sampler: Sampler, gearbox: Gearbox | Observer):
        self.sampler = sampler
        self.gearbox = gearbox
        self.entropy = entropy_function(gearbox)
        self.readings: deque[tuple[mx.array, Gear]] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        entropy = self.entropy(logprobs)
        mx.async_eval(entropy)
        self.readings.append((entropy, self.gearbox.gear))
        return self.sampler(logprobs)


def entropy_function(gearbox: Gearbox | Observer) -> Callable[[mx.array], mx.array]:
    """entropy_bits, by a native kernel where the gearbox uses those: over a vocabulary MLX's takes 1 ms on x86."""
    native = native_entropy() if isinstance(gearbox, Gearbox) and gearbox.kernels.native else None
    return native or entropy_bits


def measured(
    model: nn.Module, tokenizer: Any, prompt: Any, gearbox: Gearbox | Observer, **kwargs: Any
) -> Iterator[tuple[GenerationResponse, float, Gear]]:
    """mlx-lm's responses, each with its entropy (bits) and the gear that computed it."""
    if kwargs.get("draft_model") is not None:
        yield from measured_speculative(model, tokenizer, prompt, gearbox, **kwargs)
        return
    tachometer = Tachometer(kwargs.pop("sampler", None) or make_sampler(), gearbox)
    for response in mlx_stream_generate(model, tokenizer, prompt, sampler=tachometer, **kwargs):
        entropy, gear = tachometer.readings.popleft()
        yield response, float(entropy), gear


def measured_speculative(
    model: nn.Module, tokenizer: Any, prompt: Any, gearbox: Gearbox | Observer, **kwargs: Any
) -> Iterator[tuple[GenerationResponse, float, Gear]]:
    """The same with a draft model: one pass checks a whole draft, and its last token is not from the draft."""
    gear = gearbox.gear
    for response in mlx_stream_generate(model, tokenizer, prompt, **kwargs):
        yield response, float(entropy_bits(response.logprobs)), gear
        if not response.from_draft:
            gear = gearbox.gear


def route(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    *,
    gearbox: Gearbox | Observer,
    gate: Gate,
    monitor: Monitor,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate, and shift by the rolling entropy. Begins in the gear that is engaged.

    Args:
        gearbox: an Observer makes this telemetry only.
        kwargs: of mlx-lm's stream_generate.
    """
    ladder = gearbox.ladder
    before: Gear | None = None
    for response, entropy, gear in measured(model, tokenizer, prompt, gearbox, **kwargs):
        reading = monitor.update(entropy)
        gearbox.shift(ladder[gate.update(reading)])
        gearbox.prepare(ladder[gate.peek(reading.forecast)])
        yield GearResponse(
            **vars(response),
            entropy=entropy,
            mean_entropy=reading.mean,
            gear=gear.name,
            shifted=before is not None and gear != before,
        )
        before = gear
