"""A pass over several tokens, and the KV cache as it was after any of them.

mlx-lm gets the logits of one token after the other, and at each of them its cache has to be as if there had been no
further tokens. It may stop there, save the cache, or go on with another token.

- A cache that only appends is shown shorter than it is.
- A sliding window loses its last entries. The pass has kept all that the first of its tokens still sees.
- A recurrent layer has the state after the last token alone. The state after an earlier one is computed from the state
  before the pass and the outputs of the linear layers: this reads no weights of theirs. It is computed when somebody
  asks for it. Most often nobody does, since the next token was accepted too.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from .caches import parts
from .layer_outputs import LayerOutputs
from .sink_masks import sinks_seen
from .snapshots import APPENDING, PartState, Snapshot
from .unsettled import is_unsettled, settle_later, settled

CUT = (*APPENDING, ChunkedKVCache, RotatingKVCache)  # a pass over several tokens leaves all entries in them


class Rows:
    """One pass over K tokens. Afterwards the cache is as after the first of them.

    Args:
        run: computes logits from (tokens, cache) in the gear of the pass.
        model: that it runs.
        tokens: (1, K).
        cache: of the model.

    `logits` (1, K, V) are of all tokens.
    """

    def __init__(self, run: Callable[[mx.array, Any], mx.array], model: nn.Module, tokens: mx.array, cache: Any):
        self._run, self._tokens = run, tokens
        self.count = tokens.shape[1]
        self._before = Snapshot(cache)
        has_states = any(part.kind not in CUT for part in self._before.parts)
        self._outputs = LayerOutputs(model, self.count) if has_states and self.count > 1 else None
        try:
            with sinks_seen(cache), nullcontext() if self._outputs is None else self._outputs.recorded():
                self.logits = run(tokens, cache)
        except BaseException:
            self._before.restore()
            raise
        self._after = [PartState.of(part.part) for part in self._before.parts]
        if self._outputs is None:
            del self._before  # else old windows stay in memory
        self.show(1)

    def show(self, rows: int) -> None:
        """Put the cache as it was after the first `rows` tokens, 1 to K."""
        self.rows = rows
        for after in self._after:
            self._show(after, self.count - rows)
        self._shown = [attributes(after.part) for after in self._after]

    def _show(self, after: PartState, dropped: int) -> None:
        if dropped and after.kind not in CUT:
            settle_later(after.part, after.kind, self._settle)
            return
        settled(after.part, after.kind)
        after.restore()
        if dropped and after.kind is RotatingKVCache:
            cut(after.part, dropped)
        elif dropped:
            after.part.trim(dropped)

    def untouched(self) -> bool:
        """Whether the cache is as it was shown, so that the next row may be shown too."""
        return all(same(attributes(after.part), shown) for after, shown in zip(self._after, self._shown))

    def _settle(self) -> None:
        """Compute the states after the rows that are shown."""
        assert self._outputs is not None
        cache = self._before.second()
        with self._outputs.recalled():
            self._run(self._tokens[:, : self.rows], cache)
        for after, part in zip(self._after, parts(cache)):
            if after.kind not in CUT:
                settled(after.part, after.kind)
                vars(after.part).update(vars(part))


def cut(part: RotatingKVCache, entries: int) -> None:
    """Drop the last entries of a sliding window after a pass over several tokens, which leaves it in order."""
    part.keys, part.values = part.keys[..., :-entries, :], part.values[..., :-entries, :]
    part.offset -= entries
    part._idx = part.keys.shape[2]


def attributes(part: Any) -> list[Any]:
    """What changes if anybody writes into the cache of a layer, or uses one that is to be settled."""
    if is_unsettled(part):
        return [is_unsettled]
    return [leaf for _, leaf in tree_flatten(vars(part))]


def same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        a is b or not (isinstance(a, mx.array) or isinstance(b, mx.array) or a != b) for a, b in zip(now, before)
    )
