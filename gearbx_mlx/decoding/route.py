"""Routing (GEARBX 10.3): mlx-lm generates, the entropies of past tokens choose the gear of coming ones.

mlx-lm runs one token ahead: when token t is handed out, the pass that computes t + 1 has been dispatched. A shift made
then first acts on t + 2.
"""

from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..gears.observer import Observer
from ..routing.entropy import entropy_bits
from ..routing.gates import Gate
from ..routing.monitor import Monitor
from .entropy_sampler import SampledToken, entropy_function, governed, measured, single_pass, told
from .governor import Governor
from .response import GearResponse
from .wrapper import Step


def measured_speculative(
    model: nn.Module, tokenizer: Any, prompt: Any, gearbox: Gearbox | Observer, **kwargs: Any
) -> Iterator[tuple[GenerationResponse, SampledToken]]:
    """As `measured`, with a draft model: one pass checks a whole draft, and its last token is not from the draft."""
    gear = gearbox.gear
    for response in mlx_stream_generate(model, tokenizer, prompt, **kwargs):
        yield response, SampledToken(entropy_bits(response.logprobs), single_pass(gearbox, gear))
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
    controller: Governor | None = None,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate, and shift by the rolling entropy. Begins in the gear that is engaged.

    Args:
        gearbox: an Observer makes this telemetry only.
        controller: caps the gears.
        kwargs: of mlx-lm's stream_generate.
    """
    ladder = gearbox.ladder

    def step() -> Step:
        return single_pass(gearbox, gearbox.gear)

    if kwargs.get("draft_model") is not None:
        responses = measured_speculative(model, tokenizer, prompt, gearbox, **kwargs)
    else:
        responses = measured(model, tokenizer, prompt, step, entropy_function(gearbox), **kwargs)
    before: Gear | None = None
    for response, reading, decision in governed(responses, controller):
        entropy = float(reading.entropy)
        seen = monitor.update(entropy)
        gearbox.shift(ladder[gate.update(seen)])
        gearbox.prepare(ladder[gate.peek(seen.forecast)])
        yield told(response, reading.step, entropy, seen.mean, before, decision=decision)
        before = reading.step.gear
