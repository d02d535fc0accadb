"""A pass over several tokens, and the KV cache as it was after any of them.

mlx-lm gets the logits of one token after the other, and at each of them its cache has to be as if there had been no
further tokens. It may stop there, save the cache, or go on with another token.

- A cache that only appends is shown shorter than it is.
- A sliding window loses its last entries. The pass has kept all that the first of its tokens still sees.
- A recurrent layer has the state after the last token alone. The state after an earlier one is computed from the state
  before the pass and the outputs of the linear layers: this reads no weights of theirs. It is computed when somebody
  asks for it. Most often nobody does, since the next token was accepted too.
"""

import functools
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from .caches import Cache, parts
from .layer_outputs import LayerOutputs, linear_layers
from .pass_classes import of_classes
from .short_path import on_short_path
from .snapshots import APPENDING, PartState, Snapshot
from .turns import turn
from .unsettled import is_unsettled, settle_later, settled
from .window_masks import windows_of_single_tokens

CUT = (*APPENDING, ChunkedKVCache, RotatingKVCache)  # a pass over several tokens leaves all entries in them


class Verifier:
    """Computes several tokens in one pass as it computes one alone, in a gear of a gearbox."""

    def __init__(self, gearbox: Gearbox, gear: Gear):
        self.gearbox, self.gear = gearbox, gear

    def rows(self, tokens: mx.array, cache: Cache) -> "Rows":
        """The pass over tokens (1, K)."""
        self.gearbox.shift(self.gear)
        return Rows(self, tokens, cache)

    def run(self, tokens: mx.array, cache: Cache) -> mx.array:
        """Logits (1, K, V)."""
        self.gearbox.shift(self.gear)
        with ExitStack() as stack:
            if tokens.shape[1] > 1:
                stack.enter_context(windows_of_single_tokens(cache))
                stack.enter_context(of_classes(self._short_path))
            return self.gearbox.model(tokens, cache=cache)

    @functools.cached_property
    def linear_layers(self) -> list[nn.Module]:
        """Of the gear, which is engaged when they are first asked for."""
        return linear_layers(self.gearbox.model)

    @functools.cached_property
    def _short_path(self) -> list[tuple[nn.Module, type]]:
        return on_short_path(self.gearbox.model)


class Rows:
    """One pass over K tokens. Afterwards the cache is as after the first of them.

    Args:
        verifier: runs the pass; its gear is engaged.
        tokens: (1, K).
        cache: of the model.

    `logits` (1, K, V) are of all tokens; `rows` is how many of them the cache shows.
    """

    def __init__(self, verifier: Verifier, tokens: mx.array, cache: Cache):
        self._verifier, self._tokens = verifier, tokens
        self.count = tokens.shape[1]
        self._before = Snapshot(cache)
        has_states = any(part.kind not in CUT for part in self._before.parts)
        self._outputs = LayerOutputs(verifier.linear_layers, self.count) if has_states and self.count > 1 else None
        try:
            with ExitStack() as stack:
                if self._outputs is not None:
                    stack.enter_context(self._outputs.recorded())
                self.logits = verifier.run(tokens, cache)
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
        gearbox, cache = self._verifier.gearbox, self._before.second()
        with turn(gearbox):
            engaged = gearbox.gear
            gearbox.shift(self._verifier.gear)
            try:
                with gearbox.compiled.aside(), self._outputs.recalled():
                    self._verifier.run(self._tokens[:, : self.rows], cache)
            finally:
                gearbox.shift(engaged)
        for after, part in zip(self._after, parts(cache)):
            if after.kind not in CUT:
                settled(after.part, after.kind)
                vars(after.part).update(vars(part))


def cut(part: RotatingKVCache, entries: int) -> None:
    """Drop the last entries of a sliding window after a pass over several tokens, which leaves it in order."""
    part.keys, part.values = part.keys[..., :-entries, :], part.values[..., :-entries, :]
    part.offset -= entries
    part._idx = part.keys.shape[2]
    mx.async_eval(part.keys, part.values)  # another thread could not: what is still to be computed belongs to this one


def attributes(part: Any) -> list[Any]:
    """What changes if anybody writes into the cache of a layer, or uses one that is to be settled."""
    if is_unsettled(part):
        return [is_unsettled]
    if type(part) in APPENDING:
        return [part.keys, *(arrays[0] for arrays in getattr(part, "planes", ())), part.offset]
    return [leaf for _, leaf in tree_flatten(vars(part))]


def same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        a is b or not (isinstance(a, mx.array) or isinstance(b, mx.array) or a != b) for a, b in zip(now, before)
    )
