"""Mode pair: two models of one tokenizer take turns (EAD 3): rolling entropy chooses the one for the next token.

Unlike a shift in mode `route`, a switch acts on the very next token, as in EAD's Algorithm 1. So the entropy is waited
for before the next pass is dispatched: mlx-lm does not run ahead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.sample_utils import make_sampler

from ..errors import GearbxError
from ..gears.activations import model_dtype
from ..gears.discovery import vocabulary
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
from ..telemetry.summary import Tally
from .entropy import fast_entropy
from .finite import has_nan, not_finite
from .governor import Governor
from .mode import AUTO, Mode
from .paired_model import PREFILL_STEP_SIZE, Call, PairedModel, check_cache
from .response import GearResponse

REFUSED = ("draft_model", "input_embeddings")


@dataclass(frozen=True)
class Pair(Mode):
    """Let a small model write what it is sure of, and the model that is given to stream_generate the rest.

    Keywords of stream_generate: `prompt_cache` is one of a PairedModel (`make_cache`), as an earlier call left it;
    the others are mlx-lm's.

    Args:
        small_model: of the model's tokenizer; geared or quantized models run as they are.
        threshold: bits; 0 is the large model alone, infinity the small one. EAD's 0.25, scaled to the vocabulary, if
            not given.
        window: tokens in the rolling mean.
        min_gear_duration: tokens for which a model stays engaged at least.
        gate: a Gate of your own in place of these three, 0 for the small model and 1 for the large one.
        initial_gear: "small" or "large": the model that reads the prompt and begins; "auto": the small one, unless the
            threshold is 0. The other one reads the prompt when its turn comes.
    """

    name: ClassVar[str] = "pair"
    trace_fields: ClassVar[tuple[str, ...]] = ("passes", "weight_bytes", "caught_up")
    uncapped: ClassVar[str] = "changes no gear, so there is nothing to cap"

    small_model: nn.Module | None = None
    threshold: float | None = None
    window: int = DEFAULT_WINDOW
    min_gear_duration: int = DEFAULT_MIN_DURATION
    gate: Gate | None = None
    initial_gear: str = AUTO

    def gearbox_for(self, model: nn.Module, gearbox: Any) -> None:
        """None: both models run as they are. Raises GearbxError for a gearbox, or without a small model."""
        if self.small_model is None:
            raise GearbxError("mode 'pair' needs a small model; give Pair(small_model)")
        if gearbox is not None:
            raise GearbxError("mode 'pair' runs both models as they are; leave the gearbox out")

    def stream(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompt: Any,
        *,
        gearbox: Any = None,
        controller: Governor | None,
        max_kv_size: int | None = None,
        prompt_cache: Any = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        **kwargs: Any,
    ) -> Iterator[GearResponse]:
        assert self.small_model is not None
        for name in REFUSED:
            if kwargs.pop(name, None) is not None:
                raise GearbxError(f"mode 'pair' has no {name}; leave it out")
        check_vocabularies(tokenizer, self.small_model, model)
        pair = PairedModel(self.small_model, model, prefill_step_size)
        gate = self.gate_for(pair)
        prompt_cache = pair.make_cache(max_kv_size) if prompt_cache is None else prompt_cache
        check_cache(prompt_cache)
        monitor = pair_monitor(pair.vocab_size, self.window)
        sampler = PairSampler(kwargs.pop("sampler", None) or make_sampler(), pair, gate, monitor)
        keywords = {"prompt_cache": prompt_cache, "prefill_step_size": prefill_step_size}
        return sampled_by(sampler, tokenizer, prompt, **keywords, **kwargs)

    def gate_for(self, pair: PairedModel) -> Gate:
        """The gate, after it has engaged the first model. Raises GearbxError for settings that cannot be."""
        threshold = scaled(BITS, pair.vocab_size) if self.threshold is None else self.threshold
        gate = pair_gate(threshold, self.min_gear_duration) if self.gate is None else self.gate
        if self.initial_gear not in (AUTO, *NAMES):
            raise GearbxError(f"no model '{self.initial_gear}' in a pair; choose from {AUTO}, {', '.join(NAMES)}")
        pair.engaged = first_model(threshold) if self.initial_gear == AUTO else NAMES.index(self.initial_gear)
        gate.reset(pair.engaged)
        return gate

    def summary(self, tally: Tally) -> dict[str, Any]:
        return {
            "shares": {name: tally.mean(count) for name, count in tally.gear_tokens.items()},
            "caught_up_tokens": tally.caught_up,
        }

    def rows(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("switches", f"{summary['shifts']}; {summary['caught_up_tokens']} tokens read to catch up")]


class PairSampler:
    """A sampler that chooses the model: it reads the entropy, engages the model for the next token, then samples.

    The entropy is that before temperature (EAD 3.1), after logits processors if there are any.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array], pair: PairedModel, gate: Gate, monitor: Monitor):
        self.sampler, self.pair, self.gate, self.monitor = sampler, pair, gate, monitor
        self.entropy = fast_entropy()
        self.readings: deque[tuple[Reading, Call]] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        reading = self.monitor.update(float(self.entropy(logprobs).squeeze()))
        self.readings.append((reading, self.pair.last))
        self.pair.engaged = self.gate.update(reading)
        return self.sampler(logprobs)


def sampled_by(sampler: PairSampler, tokenizer: Any, prompt: Any, **kwargs: Any) -> Iterator[GearResponse]:
    """mlx-lm's responses, each with what the sampler read; `kwargs` are of mlx-lm's stream_generate."""
    before: int | None = None
    for response in mlx_stream_generate(sampler.pair, tokenizer, prompt, sampler=sampler, **kwargs):
        reading, call = sampler.readings.popleft()
        if has_nan(response.logprobs, reading.value):
            model = (sampler.pair.small, sampler.pair.large)[call.engaged]
            raise not_finite(model, f"the {NAMES[call.engaged]} model", model_dtype(model))
        yield GearResponse(
            **vars(response),
            entropy=reading.value,
            mean_entropy=reading.mean,
            gear=NAMES[call.engaged],
            shifted=before is not None and call.engaged != before,
            passes=call.passes,
            weight_bytes=sum(n * read for n, read in zip(call.passes, sampler.pair.weight_bytes)),
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
