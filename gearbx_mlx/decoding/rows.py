"""Verification: one forward pass over several tokens, after which the KV cache is as it was after any of them.

The tokens are proposed ones, of which the text keeps the first few. Afterwards the cache has to be as if there had been
no others.

- A cache that only appends is cut.
- A sliding window loses its last entries. The pass has kept all that the first of its tokens still sees. Its mask lets
  each token see what it would see alone: what is in the cache, the first tokens if they stay there (attention sinks,
  `--max-kv-size`), and the latest ones. For several tokens, mlx-lm's mask slides over the sinks too, and a few models
  ask for a window that is wider than their cache.
- A recurrent layer has the state after the last token alone. The state after an earlier one is computed again, from the
  state before the pass and the outputs of the linear layers. A linear layer computes every token alone. So the outputs
  of a pass over K tokens contain those of a pass over the first n of them, whether the layer was given all tokens at
  once or one after the other. This reads no weights of theirs.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from ..compat.arrays import dtype_name
from ..compat.classes import modules_of, of_classes
from ..compat.latent_attention import has_latent_attention, one_token_class
from ..compat.loops import cut_window
from ..compat.versions import is_tested
from ..errors import GearbxWarning
from ..formats.block import KeptParts, PassParts, pass_logits, pass_parts
from ..gears.discovery import QUANTIZED
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from .caches import APPENDING, Cache, Snapshot, parts
from .mode import decode_lock
from .response import DRAFT, LOOKUP, MODEL, Step, single_pass

PROPOSED = {DRAFT: "drafted", LOOKUP: "lookup_drafted"}  # source of a proposal to the field of a step that counts it
UNMASKED = {"mlx_lm.models.phi3small"}  # adds its mask of booleans to the scores, so that tokens see later ones
Tokens = Sequence[int] | mx.array
"""K token ids that are known, or an array (K,) that the device may still compute."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow a text.

    Attributes:
        tokens: k token ids: a list where they are known, an array (k,) that the device may still compute.
        source: DRAFT or LOOKUP; MODEL for no tokens.
        margins: k numbers, by how much each token's logit won; None where that is not known.
        gear: of the ladder, that drafted them, if one did.
        weight_bytes: read by the passes of the drafter, one for each token.
    """

    tokens: Sequence[int] | mx.array = ()
    source: str = MODEL
    margins: Sequence[float] | mx.array | None = None
    gear: Gear | None = None
    weight_bytes: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def array(self) -> mx.array:
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array([*self.tokens], mx.uint32)

    @property
    def is_known(self) -> bool:
        """True if nothing of it is still to be computed."""
        return not isinstance(self.tokens, mx.array)


NO_TOKENS = Proposal()


class VerifiedPass(Protocol):
    """One pass over K tokens, of which the text keeps the first few.

    Attributes:
        logits: (1, K, V), after each of the tokens.
        count: K.
        kept: how many of the tokens the KV cache holds.
    """

    logits: mx.array
    count: int
    kept: int

    def keep(self, rows: int) -> None: ...
    def steps(self, proposal: Proposal, accepted: int, **of_cache: Any) -> Iterator[Step]: ...


class RunsPasses(Protocol):
    """Runs the passes whose logits choose the tokens of a text: `Verifier`, `Climb` (kickdown) or `Turns` (pair)."""

    def prefill(self, tokens: mx.array, cache: Any, **embedded: mx.array) -> None: ...
    def verify(self, tokens: Any, cache: Any, **embedded: mx.array) -> VerifiedPass: ...
    def computes_at_once(self, cache: Any) -> bool: ...
    def aside(self) -> contextlib.AbstractContextManager[None]: ...


class Verifier:
    """Runs passes in one gear of a gearbox.

    It computes several tokens in one pass as it computes one token alone.

    Args:
        prefill_gear: reads the prompt; `gear` if not given.
    """

    def __init__(self, gearbox: Gearbox, gear: Gear, prefill_gear: Gear | None = None):
        self.gearbox, self.gear, self.prefill_gear = gearbox, gear, prefill_gear or gear
        self._found: KeptParts | None = None
        self._caps = gearbox.caps  # that it was found with

    def prefill(self, tokens: mx.array, cache: Cache, **embedded: mx.array) -> None:
        """Read a part (n,) of the prompt into the KV cache."""
        self.gearbox.shift(self.prefill_gear)
        self.gearbox.model(tokens[None], cache=cache, **embedded)

    def verify(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> "Verification":
        """Return the logits after each of the tokens.

        Args:
            embedded: `input_embeddings` (1, K, D) of the tokens, in place of the model's own.
        """
        return Verification(self, tokens, cache, **embedded)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In the block no other text computes with the gearbox; its gear is afterwards as before."""
        with decode_lock(self.gearbox):
            engaged = self.gearbox.gear
            yield
            self.gearbox.shift(engaged)

    def computes_at_once(self, cache: Cache) -> bool:
        """Return whether a pass is computed when it returns, and not by a device that was given it."""
        return self._parts.take(cache)

    def run(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> mx.array:
        """Return logits (1, K, V)."""
        if self._parts.take(cache) and not embedded:
            known: list[int] = np.array(tokens).tolist() if isinstance(tokens, mx.array) else [*tokens]
            logits = self._parts.use(cache, lambda parts: pass_logits(parts, known, cache))
            if logits is not None:
                return logits
        self.gearbox.shift(self.gear)
        inputs = (tokens if isinstance(tokens, mx.array) else mx.array([*tokens], mx.uint32))[None]
        if inputs.shape[1] == 1:
            return self.gearbox.model(inputs, cache=cache, **embedded)
        with windows_of_single_tokens(cache), of_classes(self._short_path):
            return self.gearbox.model(inputs, cache=cache, **embedded)

    @property
    def _parts(self) -> KeptParts:
        """Native parts of the gear, found again when a controller has capped layers."""
        if self._found is None or self._caps is not self.gearbox.caps:
            self._found, self._caps = KeptParts(self._find), self.gearbox.caps
        return self._found

    def _find(self) -> PassParts | None:
        self.gearbox.shift(self.gear)
        return pass_parts(self.gearbox.model)

    @functools.cached_property
    def linear_layers(self) -> list[nn.Module]:
        """The linear layers of the gear that is engaged when they are first asked for."""
        return linear_layers(self.gearbox.model)

    @functools.cached_property
    def _short_path(self) -> list[tuple[nn.Module, type]]:
        """Modules of latent attention, each with a class that computes several tokens as its own does one."""
        found = [(module, one_token_class(type(module))) for module in latent_attention(self.gearbox.model)]
        return [(module, kind) for module, kind in found if kind is not None]


class Verification:
    """One pass over K tokens.

    Args:
        verifier: runs the pass, in its gear.
        tokens: that are read.
        cache: of the model.
        embedded: as of `Verifier.verify`.

    Attributes:
        gear: of the pass.
        logits: (1, K, V), after each of the tokens.
        kept: how many of the tokens the cache holds: all, until `keep` changes it.
    """

    def __init__(self, verifier: Verifier, tokens: Tokens, cache: Cache, **embedded: mx.array):
        self._verifier, self._tokens, self._cache = verifier, tokens, cache
        self.gear = verifier.gear
        self.kept = self.count = len(tokens)
        self._before = Snapshot(cache)
        has_states = any(not loses_entries(kind) for kind in {*map(type, self._before.parts)})
        self._outputs: LayerOutputs | None = None
        if has_states and self.count > 1:
            verifier.gearbox.shift(verifier.gear)
            self._outputs = LayerOutputs(verifier.linear_layers, self.count)
        try:
            with contextlib.nullcontext() if self._outputs is None else self._outputs.noted_by(recording):
                self.logits = verifier.run(tokens, cache, **embedded)
        except BaseException:
            self._before.restore()
            raise

    @property
    def step(self) -> Step:
        """How a token came about that this pass alone computed."""
        return single_pass(self._verifier.gearbox, self.gear, self.count)

    def steps(self, proposal: Proposal, accepted: int, **of_cache: Any) -> Iterator[Step]:
        """Yield how the accepted tokens came about, and the one after them. The first has the passes of the round.

        Args:
            of_cache: fields of a step that tell of the KV cache.
        """
        first = self.step
        none, passes = Step(first.gear, (0,) * len(first.passes)), list(first.passes)
        if proposal.gear is not None:
            passes[proposal.gear.index] += len(proposal)
        counted: dict[str, Any] = {} if proposal.source == MODEL else {PROPOSED[proposal.source]: len(proposal)}
        read = first.weight_bytes + proposal.weight_bytes
        first = replace(first, passes=tuple(passes), weight_bytes=read, **counted, **of_cache)
        for place in range(accepted + 1):
            by = proposal.source if place < accepted else MODEL
            gear = proposal.gear if by == DRAFT and proposal.gear is not None else first.gear
            yield replace(none if place else first, gear=gear, source=by)

    def keep(self, rows: int) -> None:
        """Leave the cache as it is after the first `rows` tokens, at most as many as it holds."""
        dropped, self.kept = self.kept - rows, rows
        if not dropped:
            return
        if not rows:
            self._before.restore()
        elif self._outputs is not None:
            self._before.restore()
            self._again(rows)
        else:
            for part in self._before.parts:
                if type(part) is RotatingKVCache:
                    cut_window(part, dropped)
                else:
                    part.trim(dropped)

    def _again(self, rows: int) -> None:
        """Compute the states after the first tokens, from the outputs of the linear layers."""
        assert self._outputs is not None
        verifier = self._verifier
        with verifier.gearbox.compiled.aside(), self._outputs.noted_by(recalling):
            verifier.run(self._tokens[:rows], self._cache)


def latent_attention(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model with latent attention."""
    return [module for module in modules_of(model) if has_latent_attention(module)]


def warn_of_other_paths(gearbox: Gearbox) -> None:
    """Name what computes several tokens in another way than one, if that may change a text."""
    kinds: set[Any] = {type(module) for module in latent_attention(gearbox.model)}
    others = {kind.__name__ for kind in kinds if one_token_class(kind) is None}
    if type(gearbox.model).__module__ in UNMASKED:
        others = {type(gearbox.model).__module__}
    elif gearbox.compute_dtype == mx.float32:
        return
    if others:
        said = (
            f"{min(others)} computes several tokens in another way than one, so that a text of mode 'lossless' in "
            f"{dtype_name(gearbox.compute_dtype)} may differ from the top gear's; mode 'route' is not concerned"
        )
        warnings.warn(said, GearbxWarning, stacklevel=4)


def loses_entries(kind: type) -> bool:
    """Return whether the last entries can be dropped from a cache after a pass over several tokens: it has them all
    then."""
    return kind in (*APPENDING, ChunkedKVCache) or (kind is RotatingKVCache and is_tested())


def make_mask(part: RotatingKVCache, count: int, window_size: int | None = None, **kwargs: Any) -> Any:
    """Return which keys each of `count` new tokens sees, (count, keys): the sinks, and the window that ends with the
    token.

    It is mlx-lm's mask where that is the one of single tokens.
    """
    narrow = window_size is not None and window_size < part.max_size
    usual = part.keep == 0 and window_size in (None, part.max_size)
    if count == 1 or narrow or usual:
        return RotatingKVCache.make_mask(part, count, window_size, **kwargs)
    before = min(part.offset, part.max_size - 1)  # entries that mlx-lm leaves in front of the new ones
    own, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)
    return (keys <= own) & ((keys < part.keep) | (keys > own - (part.max_size - part.keep)))


@contextlib.contextmanager
def windows_of_single_tokens(cache: Cache) -> Iterator[None]:
    """In the block, the sliding windows of a cache make such masks."""
    windows = [part for part in parts(cache) if type(part) is RotatingKVCache]
    for part in windows:
        part.make_mask = partial(make_mask, part)
    try:
        yield
    finally:
        for part in windows:
            del part.make_mask


LINEAR = (nn.Linear, *QUANTIZED)
NOTES = "outputs_of_a_pass"  # attribute of a layer during a pass


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of the gear that is engaged."""
    return [module for module in model.modules() if isinstance(module, LINEAR)]


class LayerOutputs:
    """The outputs of linear layers in one pass over K tokens.

    Args:
        layers: of the gear of the pass.
        count: K, two or more.
    """

    def __init__(self, layers: Sequence[nn.Module], count: int):
        self.count = count
        self._layers = layers
        self._outputs: list[list[mx.array | None]] = [[] for _ in layers]

    def _usable(self, outputs: list[mx.array | None]) -> Iterator[mx.array | None]:
        """Yield the outputs of a layer, with None where it is not known to which token an output belongs.

        A layer that was given single vectors had the tokens one by one, if it had as many calls as there are tokens.
        """
        alone = len(outputs) == self.count
        return iter([y if y is not None and (y.ndim == 3 or alone) else None for y in outputs])

    @contextlib.contextmanager
    def noted_by(self, kind_of: Callable[[Any, int], type[nn.Module]]) -> Iterator[None]:
        """In the block, layers are `recording`, or `recalling`: these are given the first n tokens of the pass."""
        notes: Iterable[Any] = self._outputs if kind_of is recording else map(self._usable, self._outputs)
        for layer, its_notes in zip(self._layers, notes):
            object.__setattr__(layer, NOTES, its_notes)  # not into the dictionary of parameters
        try:
            with of_classes((layer, kind_of(type(layer), self.count)) for layer in self._layers):
                yield
        finally:
            for layer in self._layers:
                vars(layer).pop(NOTES, None)


@functools.cache
def recording(kind: Any, count: int) -> type[nn.Module]:
    """Return a subclass of a linear layer's class that notes its outputs: None where an input is not (1, K, I) or (1,
    I)."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array = kind.__call__(self, x, *args, **kwargs)
        by_position = x.shape[:-1] == y.shape[:-1] and x.shape[:-1] in ((1, count), (1,))
        getattr(self, NOTES).append(y if by_position else None)
        return y

    return type(kind.__name__, (kind,), {"__call__": call})


@functools.cache
def recalling(kind: Any, count: int) -> type[nn.Module]:
    """Return a subclass of a linear layer's class that returns what it noted, as much of it as there are tokens."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array | None = next(getattr(self, NOTES), None)
        if y is None or x.ndim != y.ndim:
            return kind.__call__(self, x, *args, **kwargs)
        return y if x.ndim == 2 else y[:, : x.shape[1]]

    return type(kind.__name__, (kind,), {"__call__": call})
