"""mlx-lm's responses, with telemetry, from the loop of the modes lossless, kickdown and pair (`loop.py`)."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..gears.ladder import Gear
from ..gears.mapped import mapped_bytes
from ..kernels.device import wire
from ..routing.gates import Monitor, Reading
from .governor import Governor, MemoryGuard
from .loop import decode
from .plan import DecodePlan, DecodeState
from .response import GearResponse, Step, telemetry_of
from .sampling import has_nan


class Telemetry:
    """Responses of one sequence with telemetry: entropy, gears, passes and bytes; a controller gets the times.

    Args:
        monitor: of the rolling entropy, for responses and for the gate.
        blame: returns the error for logits of a gear that are not finite.
        controller: caps the gears, or watches memory; None without.
    """

    def __init__(
        self,
        monitor: Monitor,
        blame: Callable[[Gear], Exception],
        controller: Governor | MemoryGuard | None = None,
    ):
        self._monitor, self._blame, self._controller = monitor, blame, controller
        self._clock = time.perf_counter if controller is None else controller.clock
        self._before: Gear | None = None  # the previous token's gear
        self._start = self._clock()

    def governing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the controller acts."""
        return contextlib.nullcontext() if self._controller is None else self._controller.governing()

    def resume(self) -> None:
        """Start the clock of a token: time that a caller takes between tokens does not count. The controller acts."""
        if self._controller is not None:
            self._controller.resume()
        self._start = self._clock()

    def response(
        self, fields: dict[str, Any], step: Step, entropy: float, near_tie: bool = False
    ) -> tuple[GearResponse, Reading]:
        """Return the response for a token, and the reading for the gate.

        Args:
            fields: of mlx-lm's response, by name.
            step, entropy, near_tie: as in `GeneratedToken`.

        Raises:
            GearbxError: log-probabilities that are NaN.
        """
        decision = None
        if self._controller is not None:
            seconds = None if self._before is None else self._clock() - self._start
            decision = self._controller.after(step, seconds)
        if has_nan(fields["logprobs"], entropy):
            raise self._blame(step.gear)
        reading = self._monitor.update(entropy)
        shown = fields | telemetry_of(step, reading, self._before)
        self._before = step.gear
        return GearResponse(**shown, near_tie=near_tie, decision=decision), reading


def responses(
    plan: DecodePlan,
    state: DecodeState,
    tokenizer: TokenizerWrapper,
    telemetry: Telemetry,
    on_reading: Callable[[Reading], None] = lambda reading: None,
    finish: Callable[[int], None] = lambda tokens: None,
) -> Iterator[GearResponse]:
    """Yield the tokens of a sequence as mlx-lm's stream_generate does, with telemetry.

    Args:
        on_reading: takes the reading after each token; without drafts before the next one is computed.
        finish: takes the number of generated tokens at the end.
    """
    text, detokenizer = state.text, tokenizer.detokenizer
    with contextlib.ExitStack() as generating:
        generating.callback(lambda: finish(len(text.tokens) - text.prompt))
        wire(mx.get_active_memory())
        generating.enter_context(telemetry.governing())  # ends after `decode`, whose close may run a pass
        tokens = generating.enter_context(contextlib.closing(decode(plan, state)))
        telemetry.resume()
        start, mapped = time.perf_counter(), mapped_bytes()
        for count, token in enumerate(tokens, 1):
            if count == 1:
                prompt_tps = text.prompt / (time.perf_counter() - start)
                start = time.perf_counter()
            stopped, over = token.id in text.ends, not text.goes_on and count == len(text.tokens) - text.prompt
            if not stopped:
                detokenizer.add_token(token.id)
            if over:
                detokenizer.finalize()
                next(tokens, None)  # the loop adds the last token to the cache, as mlx-lm does
            fields = {
                "text": detokenizer.last_segment,
                "token": token.id,
                "logprobs": token.logprobs,
                "prompt_tokens": text.prompt,
                "prompt_tps": prompt_tps,
                "generation_tokens": count,
                "generation_tps": count / (time.perf_counter() - start),
                "peak_memory": (mx.get_peak_memory() + mapped) / 1e9,
                "finish_reason": ("stop" if stopped else "length") if over else None,
            }
            response, reading = telemetry.response(fields, token.step, token.entropy, token.near_tie)
            on_reading(reading)
            yield response
            telemetry.resume()
