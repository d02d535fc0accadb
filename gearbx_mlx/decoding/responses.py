"""From mlx-lm's responses to those of this package."""

from collections.abc import Iterator
from typing import Any

from mlx_lm.generate import GenerationResponse

from ..gears.ladder import Gear
from ..machine.controller import Decision
from ..routing.monitor import Monitor
from .entropy_sampler import sampled_tokens
from .finite import check_finite
from .governor import Governor
from .response import GearResponse
from .step import DRAFT, SampledToken, Step
from .wrapper import ModelWrapper


def gear_response(
    response: GenerationResponse, step: Step, entropy: float, mean: float, before: Gear | None, **further: Any
) -> GearResponse:
    """mlx-lm's response with what the gearbox saw.

    Args:
        entropy: of this token, bits.
        mean: the rolling mean, bits.
        before: the gear of the token before, if there was one.
        further: fields of GearResponse that only some modes set.
    """
    return GearResponse(**{**vars(response), **seen_of(step, entropy, mean, before), **further})


def seen_of(step: Step, entropy: float, mean: float, before: Gear | None) -> dict[str, Any]:
    """The fields of `Seen` that a step sets, by name; arguments as of `gear_response`."""
    return {
        "entropy": entropy,
        "mean_entropy": mean,
        "gear": step.gear.name,
        "shifted": before is not None and step.gear != before,
        "passes": step.passes,
        "weight_bytes": step.weight_bytes,
        "drafted": step.drafted,
        "discarded": step.discarded,
        "looked_up": step.looked_up,
        "source": step.source,
        "kv_bytes": step.kv_bytes,
        "kv_caches": step.kv_caches,
    }


def governed(
    tokens: Iterator[tuple[GenerationResponse, SampledToken]], governor: Governor | None
) -> Iterator[tuple[GenerationResponse, SampledToken, Decision | None]]:
    """What is generated, with what a governor decided after each token."""
    if governor is not None:
        return governor.govern(tokens)
    return ((response, token, None) for response, token in tokens)


def stream_wrapped(
    model: ModelWrapper,
    tokenizer: Any,
    prompt: Any,
    *,
    monitor: Monitor,
    controller: Governor | None = None,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate with a model that changes gear by itself.

    Args:
        monitor: of the rolling entropy that responses show.
        controller: caps the gears.
        kwargs: of mlx-lm's stream_generate.
    """
    before: Gear | None = None
    tokens = sampled_tokens(model, tokenizer, prompt, lambda: model.step, model.entropy, **kwargs)
    for response, token, decision in governed(tokens, controller):
        entropy, step = float(token.entropy), token.step.with_token(response.token)
        check_finite(response.logprobs, entropy, model.gearbox, token.step.gear)
        mean = monitor.update(entropy).mean
        further = {"from_draft": step.source == DRAFT, "near_tie": bool(token.near_tie), "decision": decision}
        yield gear_response(response, step, entropy, mean, before, **further)
        before = step.gear
