"""Verification: one forward pass over several tokens, with a KV cache that can be cut back to any number of them.

Verification accepts the first few proposed tokens. The cache then has to be the same as without the rejected ones.

- A cache that only appends is cut.
- From a sliding window, the entries of rejected tokens are cut. The pass has kept all entries that its first token
  attends to. The mask lets each token attend to the same entries as in a pass of its own: attention sinks
  (`--max-kv-size`), and the latest tokens. mlx-lm's mask for several tokens is replaced where it slides over the
  sinks too, or where a model asks for a window that is wider than its cache.
- A recurrent layer has only the state after the last token. The state after an earlier one is computed again, from the
  state before the pass and the outputs of the linear layers. A linear layer treats tokens independently, so the outputs
  of a pass over K tokens contain those of a pass over the first n. A layer may get the K tokens in one call or in K
  calls; both are recorded. So most linear layers do not read their weights again.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
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
from .hidden import NOTE, Hidden, noting, of_one_sequence, recorded, recording
from .mode import decode_lock
from .response import DRAFT, LOOKUP, MODEL, Step, single_pass

PROPOSED = {DRAFT: "drafted", LOOKUP: "lookup_drafted"}  # source of a proposal to the field of a step that counts it
UNMASKED = {"mlx_lm.models.phi3small"}  # adds its boolean mask to the scores, so tokens attend to later ones
Tokens = Sequence[int] | mx.array
"""K token ids, or an array (K,) that the device may still compute."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow a sequence.

    Attributes:
        tokens: k token ids: a list if they are known, an array (k,) that the device may still compute.
        margins: k differences between a token's logit and the next best one; None if unknown.
        source: DRAFT or LOOKUP; MODEL for no tokens.
        gear: that drafted them; None without a gear.
        weight_bytes: that the drafter reads for each token; 0 for prompt lookup.
    """

    tokens: Sequence[int] | mx.array = ()
    margins: Sequence[float] | mx.array | None = None
    source: str = MODEL
    gear: Gear | None = None
    weight_bytes: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def array(self) -> mx.array:
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array([*self.tokens], mx.uint32)

    @property
    def is_known(self) -> bool:
        """True if the tokens are numbers; False for an array that a device may still compute."""
        return not isinstance(self.tokens, mx.array)


NO_TOKENS = Proposal()


class RunsPasses(Protocol):
    """Passes whose logits choose the tokens of a sequence: `Verifier`, `KickdownVerifier` or `PairVerifier`."""

    def prefill(self, tokens: mx.array, cache: Any, **embedded: mx.array) -> Hidden: ...
    def verify(self, tokens: Any, cache: Any, **embedded: mx.array) -> "Verification": ...
    def exclusive(self) -> AbstractContextManager[None]: ...


class Verifier:
    """Passes in one gear of a gearbox. `verify` computes each of several tokens as in a pass of its own.

    Args:
        gear: of the passes.
        prefill_gear: None: `gear`.
        taps: numbers of blocks after which passes return the hidden states.
    """

    def __init__(self, gearbox: Gearbox, gear: Gear, prefill_gear: Gear | None = None, taps: Sequence[int] = ()):
        self.gearbox, self.gear, self.prefill_gear, self.taps = gearbox, gear, prefill_gear or gear, taps
        self._found: KeptParts | None = None
        self._steps: dict[int, Step] = {}
        self._caps = gearbox.caps  # a controller's maximum bits of layers, when parts and steps were made

    def prefill(self, tokens: mx.array, cache: Cache, **embedded: mx.array) -> Hidden:
        """Prefill a part (n,) of the prompt, and return its hidden states."""
        self.gearbox.shift(self.prefill_gear)
        with recorded(self.gearbox.model, self.taps) as outputs:
            self.gearbox.model(tokens[None], cache=cache, **embedded)
        return of_one_sequence(outputs)

    def verify(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> "Verification":
        """Return the logits after each of the tokens.

        Args:
            embedded: `input_embeddings` (1, K, D) of the tokens; without it the model's own.
        """
        return Verification(self, tokens, cache, **embedded)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the gearbox in the context, and restore its gear afterwards."""
        with decode_lock(self.gearbox):
            engaged = self.gearbox.gear
            try:
                yield
            finally:
                self.gearbox.shift(engaged)

    def step(self, rows: int) -> Step:
        """Return the record of a pass over so many rows, without a draft."""
        if rows not in self._steps:
            self._steps[rows] = single_pass(self.gearbox, self.gear, rows)
        return self._steps[rows]

    def run(self, tokens: Tokens, cache: Cache, **embedded: mx.array) -> tuple[mx.array, Hidden, bool]:
        """Return logits (1, K, V), hidden states, and whether they are queued for a device."""
        native = self._parts

        def begin(parts: PassParts) -> tuple[mx.array, Hidden] | None:
            known: Sequence[int] = np.array(tokens).tolist() if isinstance(tokens, mx.array) else tokens
            return pass_logits(parts, known, cache, self.taps)

        found = None if embedded else native.use(cache, begin)
        if found is not None:
            return *found, False
        self.gearbox.shift(self.gear)
        inputs = (tokens if isinstance(tokens, mx.array) else mx.array([*tokens], mx.uint32))[None]
        with contextlib.ExitStack() as passing:
            outputs = passing.enter_context(recorded(self.gearbox.model, self.taps))
            if inputs.shape[1] > 1:
                passing.enter_context(single_token_masks(cache))
                passing.enter_context(of_classes(self._short_path))
            logits = self.gearbox.model(inputs, cache=cache, **embedded)
        return logits, of_one_sequence(outputs), not native.fits(cache)

    @property
    def _parts(self) -> KeptParts:
        """Native parts of the gear, found again after a controller has changed the maximum bits of layers."""
        if self._found is None or self._caps is not self.gearbox.caps:
            self._found, self._steps, self._caps = KeptParts(self._find), {}, self.gearbox.caps
        return self._found

    def _find(self) -> PassParts | None:
        self.gearbox.shift(self.gear)
        return pass_parts(self.gearbox.model)

    @functools.cached_property
    def linear_layers(self) -> list[nn.Module]:
        """Linear layers of the engaged gear at first use."""
        return linear_layers(self.gearbox.model)

    @functools.cached_property
    def _short_path(self) -> list[tuple[nn.Module, type]]:
        """Modules with latent attention, each with a class that computes several tokens by the code for one token."""
        found = [(module, one_token_class(type(module))) for module in latent_attention(self.gearbox.model)]
        return [(module, kind) for module, kind in found if kind is not None]


class Verification:
    """One pass over K tokens; the KV cache keeps the first few.

    Args:
        verifier: runs the pass, in its gear.
        tokens: input of the pass.
        cache: of the model.
        embedded: as in `Verifier.verify`.

    Attributes:
        gear: of the pass.
        count: K.
        logits: (1, K, V), after each of the tokens.
        hidden: the hidden states (K, D) after each block that the verifier taps, by its number.
        is_queued: True if a device may still compute them; False if they are read at once.
        kept: number of the tokens that the cache holds: all, until `keep` changes it.
    """

    def __init__(self, verifier: Verifier, tokens: Tokens, cache: Cache, **embedded: mx.array):
        self._verifier, self._tokens, self._cache = verifier, tokens, cache
        self.gear = verifier.gear
        self.kept = self.count = len(tokens)
        self._before = Snapshot(cache)
        self._outputs: LayerOutputs | None = None
        if self.count > 1 and not all(map(can_drop_last, self._before.kinds)):
            verifier.gearbox.shift(verifier.gear)
            self._outputs = LayerOutputs(verifier.linear_layers, self.count)
        try:
            with contextlib.nullcontext() if self._outputs is None else self._outputs.recorded():
                self.logits, self.hidden, self.is_queued = verifier.run(tokens, cache, **embedded)
        except BaseException:
            self._before.restore()
            raise

    @property
    def step(self) -> Step:
        """Record of this pass, without a draft."""
        return self._verifier.step(self.count)

    def steps(self, proposal: Proposal, accepted: int, **of_cache: Any) -> list[Step]:
        """Return the steps of the accepted tokens and of the next one. The first has the passes of the round.

        Args:
            of_cache: fields of a step about the KV cache.
        """
        own, proposed = self.step, len(proposal)
        if not proposed:
            return [replace(own, **of_cache) if of_cache else own]
        none, passes = (0,) * len(own.passes), list(own.passes)
        if proposal.gear is not None:
            passes[proposal.gear.index] += proposed
        found = [Step(proposal.gear or own.gear, none, source=proposal.source)] * accepted + [Step(own.gear, none)]
        read = own.weight_bytes + proposed * proposal.weight_bytes
        fields: dict[str, Any] = of_cache | {PROPOSED[proposal.source]: proposed}
        found[0] = replace(found[0], passes=tuple(passes), weight_bytes=read, **fields)
        return found

    def keep(self, rows: int) -> None:
        """Set the cache to its state after the first `rows` tokens; rows: at most `kept`."""
        dropped, self.kept = self.kept - rows, rows
        if not dropped:
            return
        if not rows:
            self._before.restore()
        elif self._outputs is not None:
            self._before.restore()
            try:
                self._again(rows)
            except BaseException:
                self._before.restore()
                self.kept = 0
                raise
        else:
            for part in self._before.parts:
                if type(part) is RotatingKVCache:
                    cut_window(part, dropped)
                else:
                    part.trim(dropped)

    @contextlib.contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Undo the pass after an error in the context: an interrupt, or an error of a sampler or logits processor."""
        try:
            yield
        except BaseException:
            self.keep(0)
            raise

    def _again(self, rows: int) -> None:
        """Compute the states after the first tokens again, from the outputs of the linear layers."""
        assert self._outputs is not None
        verifier = self._verifier
        verifier.gearbox.shift(verifier.gear)  # before `aside`, since a shift installs a gear's compiled functions
        with verifier.gearbox.compiled.aside(), self._outputs.recalled():
            verifier.run(self._tokens[:rows], self._cache)


def latent_attention(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model with latent attention."""
    return [module for module in modules_of(model) if has_latent_attention(module)]


def warn_of_other_paths(gearbox: Gearbox) -> None:
    """Warn if a model computes several tokens differently from one, and this may change the output."""
    kinds: set[Any] = {type(module) for module in latent_attention(gearbox.model)}
    others = {kind.__name__ for kind in kinds if one_token_class(kind) is None}
    if type(gearbox.model).__module__ in UNMASKED:
        others = {type(gearbox.model).__module__}
    elif gearbox.compute_dtype == mx.float32:
        return
    if others:
        message = (
            f"{min(others)} computes several tokens differently from one, so the output of mode 'lossless' in "
            f"{dtype_name(gearbox.compute_dtype)} may differ from the top gear's; use mode 'static' for that"
        )
        warnings.warn(message, GearbxWarning, stacklevel=4)


def can_drop_last(kind: type) -> bool:
    """Return whether a cache keeps all entries in a pass over several tokens, so that the last ones can be dropped."""
    return kind in (*APPENDING, ChunkedKVCache) or (kind is RotatingKVCache and is_tested())


def make_mask(part: RotatingKVCache, count: int, window_size: int | None = None, **kwargs: Any) -> Any:
    """Return the mask (count, keys) of `count` new tokens: the sinks, and the window that ends with each token.

    It is mlx-lm's mask if every token attends there to the same entries as in a pass of its own.
    """
    narrow = window_size is not None and window_size < part.max_size
    usual = part.keep == 0 and window_size in (None, part.max_size)
    if count == 1 or narrow or usual:
        return RotatingKVCache.make_mask(part, count, window_size, **kwargs)
    before = min(part.offset, part.max_size - 1)  # number of entries that mlx-lm keeps before the new ones
    own, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)
    return (keys <= own) & ((keys < part.keep) | (keys > own - (part.max_size - part.keep)))


@contextlib.contextmanager
def single_token_masks(cache: Cache) -> Iterator[None]:
    """Use `make_mask` for the sliding windows of a cache in the context."""
    windows = [part for part in parts(cache) if type(part) is RotatingKVCache]
    for part in windows:
        part.make_mask = partial(make_mask, part)
    try:
        yield
    finally:
        for part in windows:
            del part.make_mask


LINEAR = (nn.Linear, *QUANTIZED)


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of the engaged gear."""
    return [module for module in model.modules() if isinstance(module, LINEAR)]


class LayerOutputs:
    """Outputs of linear layers in one pass over K tokens.

    Args:
        layers: of the gear of the pass.
        count: K, two or more.
    """

    def __init__(self, layers: Sequence[nn.Module], count: int):
        self.count = count
        self._layers = layers
        self._outputs: list[list[mx.array | None]] = [[] for _ in layers]

    def recorded(self) -> AbstractContextManager[None]:
        """Return a context in which the layers record the outputs of a pass."""
        return noting(zip(self._layers, [partial(self._note, outputs) for outputs in self._outputs]), recording)

    def recalled(self) -> AbstractContextManager[None]:
        """Return a context in which the layers return the recorded outputs, for the first n tokens of the pass."""
        return noting(zip(self._layers, map(self._usable, self._outputs)), recalling)

    def _note(self, outputs: list[mx.array | None], y: mx.array, x: mx.array, *others: Any) -> None:
        """Add an output of a layer: None for inputs other than (1, K, I) or (1, I)."""
        by_position = x.shape[:-1] == y.shape[:-1] and x.shape[:-1] in ((1, self.count), (1,))
        outputs.append(y if by_position else None)

    def _usable(self, outputs: list[mx.array | None]) -> Iterator[mx.array | None]:
        """Yield the outputs of a layer, with None where the token of an output is unknown.

        A layer that was called K times with one vector each got the tokens one by one.
        """
        one_by_one = len(outputs) == self.count
        return iter([y if y is not None and (y.ndim == 3 or one_by_one) else None for y in outputs])


@functools.cache
def recalling(kind: Any) -> type[nn.Module]:
    """Return a subclass of a linear layer's class that returns recorded outputs, for the tokens of its input."""

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array | None = next(getattr(self, NOTE), None)
        if y is None or x.ndim != y.ndim:
            return kind.__call__(self, x, *args, **kwargs)
        return y if x.ndim == 2 else y[:, : x.shape[1]]

    return type(kind.__name__, (kind,), {"__call__": call})
