"""Logits processors of one sequence: where one fails, its own sequence ends, and no other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ...errors import GearbxError, one_line
from .sequence import BatchText

Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class GuardedProcessor:
    """A processor that raises nothing: where it would, the logits become NaN, which end a sequence, and `owner` knows
    why."""

    processor: Processor
    owner: BatchText

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            return self.processor(tokens, logits)
        except Exception as error:
            self.owner.error = GearbxError(f"a logits processor failed ({one_line(error)})")
            self.owner.error.__cause__ = error
            return mx.full(logits.shape, mx.nan, logits.dtype)


def guarded(processors: Sequence[Processor] | None, owner: BatchText) -> list[GuardedProcessor]:
    """The processors of a sequence, none of which raises."""
    return [GuardedProcessor(each, owner) for each in processors or ()]
