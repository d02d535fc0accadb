"""Two models of one tokenizer (EAD 3): rolling entropy says which of them computes the next token.

Unlike a shift in mode `route`, a switch acts on the very next token, as in EAD's Algorithm 1. So the entropy is waited
for before the next pass is dispatched: mlx-lm does not run ahead.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.sample_utils import make_sampler

from ..errors import GearbxError
from ..gears.discovery import vocabulary
from ..routing.entropy import entropy_bits
from ..routing.gates import Gate
from ..routing.monitor import Monitor, Reading
from ..routing.pair import (
    BITS,
    DEFAULT_MIN_DURATION,
    DEFAULT_WINDOW,
    NAMES,
    first_model,
    pair_gate,
    pair_monitor,
    scaled,
)
from .paired_model import PREFILL_STEP_SIZE, Call, PairedModel, TrailingCache, check_cache
from .response import GearResponse

AUTO = "auto"
REFUSED = ("draft_model", "input_embeddings", "hysteresis", "decision", "drafting")


class Driver:
    """A sampler that also drives: it looks at the distribution, engages the model for the next token, then samples.

    The entropy is that before temperature (EAD 3.1), after logits processors if there are any.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array], pair: PairedModel, gate: Gate, monitor: Monitor):
        self.sampler, self.pair, self.gate, self.monitor = sampler, pair, gate, monitor
        self.readings: deque[tuple[Reading, Call]] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        reading = self.monitor.update(float(entropy_bits(logprobs).squeeze()))
        self.readings.append((reading, self.pair.last))
        self.pair.engaged = self.gate.update(reading)
        return self.sampler(logprobs)


def stream_pair(
    small: nn.Module,
    large: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    *,
    threshold: float | None = None,
    window: int = DEFAULT_WINDOW,
    min_duration: int = DEFAULT_MIN_DURATION,
    gate: Gate | None = None,
    initial: str = AUTO,
    max_kv_size: int | None = None,
    prompt_cache: list[TrailingCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate text with two models that take turns.

    Args:
        small, large: mlx-lm models of one tokenizer; geared or quantized ones run as they are.
        tokenizer, prompt, max_tokens: as in `mlx_lm.stream_generate`, as are sampler, logits_processors, KV cache
            quantization and all further keywords.
        threshold: bits; 0 is the large model alone, infinity the small one. EAD's 0.25, scaled to the vocabulary, if
            not given.
        window: tokens in the rolling mean.
        min_duration: tokens that a model is kept for.
        gate: a Gate of your own in place of these three, 0 for the small model and 1 for the large one.
        initial: "small" or "large": the model that reads the prompt and begins; "auto": the small one, unless the
            threshold is 0. The other one reads the prompt when its turn comes.
        prompt_cache: of a PairedModel (`make_cache`), as an earlier call left it.
        prefill_step_size: the most tokens that one pass reads.

    Yields:
        GearResponse for each token.

    Raises:
        GearbxError: arguments that do not fit, models that do not know all the tokenizer's tokens.
    """
    for name in REFUSED:
        if kwargs.pop(name, None) is not None:
            raise GearbxError(f"mode 'pair' has no {name}; leave it out")
    check_vocabularies(tokenizer, small, large)
    pair = PairedModel(small, large, prefill_step_size)
    if threshold is None:
        threshold = scaled(BITS, pair.vocab_size)
    if gate is None:
        gate = pair_gate(threshold, min_duration)
    if initial not in (AUTO, *NAMES):
        raise GearbxError(f"no model '{initial}' in a pair; choose from {AUTO}, {', '.join(NAMES)}")
    pair.engaged = first_model(threshold) if initial == AUTO else NAMES.index(initial)
    gate.reset(pair.engaged)
    if prompt_cache is None:
        prompt_cache = pair.make_cache(max_kv_size)
    check_cache(prompt_cache)
    driver = Driver(kwargs.pop("sampler", None) or make_sampler(), pair, gate, pair_monitor(pair.vocab_size, window))
    return driven(
        driver,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        prompt_cache=prompt_cache,
        prefill_step_size=prefill_step_size,
        **kwargs,
    )


def driven(driver: Driver, tokenizer: Any, prompt: Any, **kwargs: Any) -> Iterator[GearResponse]:
    """mlx-lm's responses, each with what the driver read; `kwargs` are of mlx-lm's stream_generate."""
    before: int | None = None
    for response in mlx_stream_generate(driver.pair, tokenizer, prompt, sampler=driver, **kwargs):
        reading, call = driver.readings.popleft()
        yield GearResponse(
            **vars(response),
            entropy=reading.value,
            mean_entropy=reading.mean,
            gear=NAMES[call.engaged],
            shifted=before is not None and call.engaged != before,
            passes=call.passes,
            weight_bytes=sum(n * read for n, read in zip(call.passes, driver.pair.weight_bytes)),
            caught_up=call.caught_up,
        )
        before = call.engaged


def check_vocabularies(tokenizer: Any, *models: nn.Module) -> None:
    """Raises GearbxError for a model that has fewer tokens than the tokenizer."""
    tokens = len(tokenizer.get_vocab())
    for name, model in zip(NAMES, models):
        if vocabulary(model) < tokens:
            raise GearbxError(
                f"the {name} model has a vocabulary of {vocabulary(model)}, and the tokenizer one of {tokens}; "
                "a pair needs models of one tokenizer"
            )
