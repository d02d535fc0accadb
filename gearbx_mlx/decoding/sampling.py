"""Sampling: from logits to a token, with entropy, near-ties and checks for NaN.

Entropy is the signal that chooses gears (GEARBX 3.1). Near-ties are tokens that rounding may have decided, since a pass
over several positions sums in a different order from a pass over one. A sequence may have its own random numbers,
independent of other sequences.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, greedy_sampler
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from ..compat.arrays import OwnRandomState, dtype_name, next_key, random_state, same_random_numbers
from ..compat.loops import LogSumExp
from ..errors import GearbxError, check_range
from ..formats.base import is_finite
from ..formats.exact import ExactModule
from ..formats.kv_cache import KVGears
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear
from ..kernels.dispatch import choose, cpu_kernels, fused_kernel
from ..ranks.agreement import Agreement

Entropy = Callable[[mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]
"""Function from log-probabilities (B, V) to tokens (B,)."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""mlx-lm's logits processor: function from the tokens so far (n,) and logits (1, V) to logits."""

NOISE = 4  # units in the last place of the largest logit: two logits closer than that are a near-tie


def entropy_bits(logprobs: mx.array) -> mx.array:
    """Return the entropy H = -sum p log2 p over the last axis, in bits.

    Args:
        logprobs: shape (..., V), any floating type. Log-probabilities or logits: they are normalized here, since
            half-precision log-probabilities do not sum to one. NaN counts as 0, +inf as 1e4 and -inf as -1e4, so -inf
            entries contribute 0, and a vector of NaN is the uniform distribution.

    Returns:
        shape (...), float32, from 0 (all mass on one token) to log2 V (uniform); both ends are exact. The array is not
        evaluated: the caller decides when to wait for it (GEARBX 3.6).
    """
    # GEARBX 10.1: half-precision logits may not be finite, and checking that first would cost a synchronization.
    z = mx.nan_to_num(logprobs.astype(mx.float32), nan=0.0, posinf=1e4, neginf=-1e4)
    z = z - z.max(axis=-1, keepdims=True)
    weight = mx.exp(z)
    total = weight.sum(axis=-1)
    # log2 of a sum of V ones is exact where log2 V is; -sum p log2 p is not.
    bits = mx.log2(total) - (weight * z).sum(axis=-1) / (total * mx.log(mx.array(2.0)))
    return mx.clip(bits, 0.0, mx.log2(mx.array(float(z.shape[-1]))))


class LogitsReader:
    """Reader of logits and log-probabilities (..., V), with MLX's operations or ten times faster native kernels.

    Args:
        kernels: native CPU kernels; None: MLX's operations.
    """

    logsumexp: LogSumExp | None = None
    """Native logsumexp; None: MLX's (half a millisecond on a CPU over a vocabulary of 49,152)."""

    def __init__(self, kernels: ModuleType | None = None):
        self.entropy: Entropy = entropy_bits if kernels is None else kernels.entropy_bits
        self._choices = None
        if kernels is not None:
            self.logsumexp = lambda logits: kernels.logsumexp(logits).astype(logits.dtype)
            self._choices = kernels.choices

    def normalized(self, logits: mx.array) -> mx.array:
        """Return log-probabilities of the same shape (..., V)."""
        total = mx.logsumexp(logits, axis=-1, keepdims=True) if self.logsumexp is None else self.logsumexp(logits)
        return logits - total

    def choices(self, logits: mx.array, logprobs: mx.array | None = None) -> mx.array:
        """Return float32 (..., 5) per row of logits (..., V), with the columns of `Choice`. logprobs: if known.

        The token is the most likely one after rounding to log-probabilities, as in mlx-lm.
        """
        if self._choices is not None and logits.dtype == mx.float32:
            return self._choices(logits)
        logprobs = self.normalized(logits) if logprobs is None else logprobs
        largest, bits = mx.abs(logits).max(axis=-1, keepdims=True), self.entropy(logprobs)[..., None]
        token, best, next_best = best_two(logprobs)
        return mx.concatenate([each.astype(mx.float32) for each in (token, bits, best, next_best, largest)], axis=-1)

    def best(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return the position of each row's largest logit (..., V), uint32 (...), and its margin, float32 (...)."""
        if self._choices is not None and logits.dtype == mx.float32:
            found = self._choices(logits)
            return found[..., Choice.TOKEN].astype(mx.uint32), found[..., Choice.BEST] - found[..., Choice.NEXT]
        token, best, next_best = best_two(logits)
        return token[..., 0], (best.astype(mx.float32) - next_best.astype(mx.float32))[..., 0]


def best_two(values: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the position of the largest of each row (..., V), its value, and the next one: each (..., 1).

    On a GPU, two maxima are faster than a sort, which takes a dozen launches.
    """
    place = mx.argmax(values, axis=-1, keepdims=True)
    others = mx.put_along_axis(values, place, mx.array(-mx.inf, values.dtype), axis=-1)
    return place, mx.take_along_axis(values, place, axis=-1), others.max(axis=-1, keepdims=True)


class Choice(enum.IntEnum):
    """Columns of `LogitsReader.choices`: token; entropy in bits; two log-probabilities; largest magnitude."""

    TOKEN, ENTROPY, BEST, NEXT, MAGNITUDE = range(5)


def near_ties(choices: np.ndarray, dtype: mx.Dtype) -> list[bool]:
    """Return whether rounding may have decided the token of each row of a pass.

    Args:
        choices: (K, 5), in the columns of `Choice`.
        dtype: of the logits.
    """
    rounding = NOISE * mx.finfo(dtype).eps * choices[:, Choice.MAGNITUDE].max()
    with np.errstate(invalid="ignore"):  # NaN is reported later, by Telemetry.response
        near: list[bool] = (choices[:, Choice.BEST] - choices[:, Choice.NEXT] <= rounding).tolist()
    return near


readers = functools.cache(LogitsReader)  # one per kernel module: compat/loops.py copies mlx-lm's loops for each
MLX_READER = readers(None)


def reader_of(gearbox: Gearbox | Observer | None = None) -> LogitsReader:
    """Return the gearbox's native or MLX reader; without a gearbox, the reader for `kernels="auto"`."""
    choice = gearbox.kernels if isinstance(gearbox, Gearbox) else choose("auto", "float")
    return readers(cpu_kernels(1) if choice.native else None)


@dataclass(frozen=True)
class GumbelSampler:
    """Sampler of the token with the largest sum of log-probability over temperature and Gumbel noise.

    mlx-lm's sampler with the same arguments has the same distribution, and inverts the cumulative distribution.
    Two similar distributions choose the same token more often with common Gumbel noise, so more drafts are accepted
    (Daliri, Musco, Suresh, 2024, arXiv 2408.07978).

    Raises:
        GearbxError: arguments outside their bounds.
    """

    temp: float
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] | None = None
    native: bool = field(default=True, kw_only=True)
    """Use of native kernels for one token of one sequence; the result differs only by rounding and ties."""

    def __post_init__(self) -> None:
        bounds = {
            "temp": (0, math.inf),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "min_tokens_to_keep": (1, math.inf),
            "top_k": (0, math.inf),
            "xtc_probability": (0, 1),
            "xtc_threshold": (0, 0.5),
        }
        for name, (least, most) in bounds.items():
            check_range(name, getattr(self, name), least, most)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Return tokens (B,) from log-probabilities (B, V)."""
        alone = self.is_native and len(logprobs) == 1 and logprobs.dtype == mx.float32
        kernel = fused_kernel("sampled") if alone else None
        if kernel is not None:
            return kernel(logprobs, next_key(), self.temp, self.top_p, self.min_p, self.top_k)
        return mx.argmax(self.scores(logprobs), axis=-1)

    def scores(self, logprobs: mx.array) -> mx.array:
        """Return log-probabilities (B, V) over temperature, with noise: the largest one is the token."""
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            kept = [*(self.xtc_special_tokens or ())]
            logprobs = apply_xtc(logprobs, self.xtc_probability, self.xtc_threshold, kept)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        noise = mx.random.gumbel(logprobs.shape, key=next_key())
        return logprobs * (1 / self.temp) + noise

    @property
    def is_native(self) -> bool:
        """Support by a native kernel."""
        return self.native and self.xtc_probability == 0 and self.min_tokens_to_keep == 1

    @functools.cached_property
    def by_mlx(self) -> "GumbelSampler":
        """The same sampler with MLX's operations."""
        return replace(self, native=False)

    @functools.cached_property
    def of_mlx_lm(self) -> Sampler:
        """The sampler that mlx-lm makes with these arguments."""
        return mlx_lm_sampler(**{each.name: getattr(self, each.name) for each in fields(self) if each.name != "native"})


def make_sampler(
    temp: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
) -> Sampler:
    """Return a sampler with mlx-lm's arguments and distribution, and more accepted drafts (`GumbelSampler`).

    At temperature 0 it is mlx-lm's greedy one.

    Raises:
        GearbxError: arguments outside their bounds.
    """
    xtc = xtc_probability, xtc_threshold, xtc_special_tokens
    sampler = GumbelSampler(temp, top_p, min_p, min_tokens_to_keep, top_k, *xtc)
    return sampler if temp else greedy_sampler


def sampler_beside(gearbox: Gearbox | Observer, sampler: Sampler | None) -> Sampler:
    """Return the form of a sampler that fits the gearbox's kernels; an Observer needs mlx-lm's. None: greedy."""
    if not isinstance(sampler, GumbelSampler):
        return sampler or greedy_sampler
    if not isinstance(gearbox, Gearbox):
        return sampler.of_mlx_lm
    return sampler if gearbox.kernels.native else sampler.by_mlx


@dataclass
class Chooser:
    """Sampler, logits processors and random numbers of one sequence, independent of other sequences.

    Attributes:
        random: its own numbers; None: MLX's random state.
        error: raised by a processor, whose logits are then NaN; None without.
    """

    sampler: Sampler = greedy_sampler
    processors: Sequence[Processor] = ()
    random: OwnRandomState | None = None
    error: Exception | None = None

    @property
    def greedy(self) -> bool:
        return self.sampler is greedy_sampler

    @property
    def draws(self) -> bool:
        """Possible use of random numbers, by the sampler or by a processor."""
        return not self.greedy or bool(self.processors)

    @property
    def has_margins(self) -> bool:
        """Support of margins of drafted tokens (`drafted`)."""
        return self.greedy or isinstance(self.sampler, GumbelSampler)

    @property
    def has_kernel(self) -> bool:
        """Support of the sampler and the processors by native kernels."""
        is_gumbel = isinstance(self.sampler, GumbelSampler) and self.sampler.is_native
        return not self.processors and (self.greedy or is_gumbel)

    def sample(self, logprobs: mx.array) -> mx.array:
        """Return a token (1,) from log-probabilities (1, V)."""
        with self._numbers():
            return self.sampler(logprobs)

    def drafted(self, logits: mx.array, reader: LogitsReader) -> tuple[mx.array, mx.array | None]:
        """Return a token (1,) from logits (1, V), and its margin (1,): the largest drop of its logit that would not
        change the token; None if unknown."""
        if self.greedy:
            return reader.best(logits)
        logprobs = reader.normalized(logits)
        if not isinstance(self.sampler, GumbelSampler):
            return self.sample(logprobs), None
        with self._numbers():
            token, margin = reader.best(self.sampler.scores(logprobs))
        return token, self.sampler.temp * margin

    def next_key(self) -> np.ndarray:
        """Return the random key (2,) of the next token."""
        with self._numbers():
            return np.array(next_key())

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context whose random numbers are drawn again after it."""
        # Greedy decoding draws none; restoring the random state would only make MLX's graph longer.
        return same_random_numbers() if self.draws else nullcontext()

    def _numbers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.random is None else self.random.drawn()

    def processed(self, context: mx.array | None, logits: mx.array) -> mx.array:
        """Return processed logits (1, V) of the token after a context (n,), used only by processors."""
        for processor in self.processors:
            assert context is not None
            logits = processor(context, logits)
        return logits


GREEDY = Chooser()


@dataclass(frozen=True)
class ChosenRows:
    """Tokens chosen from the logits of a pass, before they are read from the device.

    Attributes:
        logprobs: (K, V), of the sampled distributions.
        choices: float32 (K, 5), in the columns of `Choice`. They include the token of greedy decoding.
        sampled: the tokens (K,), and with processors the largest magnitude of the logits before them (1,). Empty for
            greedy decoding without processors.
        states: MLX's random state after each token.
    """

    logprobs: mx.array
    choices: mx.array
    sampled: tuple[mx.array, ...] = ()
    states: Sequence[mx.array] = ()

    @property
    def tokens(self) -> mx.array:
        """Token ids (K,), which the device may still compute."""
        return self.sampled[0] if self.sampled else self.choices[:, Choice.TOKEN].astype(mx.uint32)

    def read(
        self, agreement: Agreement, *arrays: mx.array, meanwhile: Callable[[], None] | None = None
    ) -> tuple[list[int], np.ndarray, list[list[Any]]]:
        """Wait for the device once; return token ids (K,), `choices`, and the other arrays, of 32-bit numbers.

        Args:
            meanwhile: called once the device computes.
        """
        queued = joined(agreement.arrays(self.choices, *self.sampled, *arrays))
        if meanwhile is not None:
            mx.async_eval(queued)
            meanwhile()
        choices, *others = apart(wait_for(queued), (self.choices, *self.sampled, *arrays))
        if len(self.sampled) > 1:
            choices[:, Choice.MAGNITUDE] = others.pop(1)
        chosen = others.pop(0) if self.sampled else choices[:, Choice.TOKEN].astype(int)
        return chosen.tolist(), choices, [each.tolist() for each in others]


def choose_rows(
    chooser: Chooser,
    reader: LogitsReader,
    agreement: Agreement,
    logits: mx.array,
    context: mx.array | None = None,
    proposed: mx.array | None = None,
) -> ChosenRows:
    """Choose a token from each row of logits (K, V), in order.

    With processors, rows end with the first rejected proposal, since a processor needs the actual sequence.

    Args:
        context: the sequence so far (n,), for processors.
        proposed: (K - 1,), the tokens of all rows but the first, for processors.
    """
    if not chooser.draws:
        found = reader.normalized(logits)
        return ChosenRows(found, reader.choices(logits, found))
    logprobs, tokens, states = list[mx.array](), list[mx.array](), list[mx.array]()
    for row in range(len(logits)):
        logprobs.append(reader.normalized(chooser.processed(context, logits[row : row + 1])))
        token = chooser.sample(logprobs[-1]).reshape(1).astype(mx.uint32)
        tokens += agreement.arrays(token) if chooser.processors else (token,)
        states.append(random_state())
        if context is None or proposed is None or row == len(proposed):
            continue
        following = proposed[row : row + 1]
        if np.array(tokens[-1] != following).item():
            break
        context = mx.concatenate([context, following])
    found, sampled = mx.concatenate(logprobs), mx.concatenate(tokens)
    if not chooser.processors:
        return ChosenRows(found, reader.choices(logits, found), agreement.arrays(sampled), states)
    magnitude = mx.abs(logits).max().reshape(1).astype(mx.float32)  # a processor may set a logit to -inf
    return ChosenRows(found, reader.choices(found, found), (sampled, magnitude), states)


def joined(arrays: Sequence[mx.array]) -> mx.array:
    """Return arrays of 32-bit numbers as one array, for one wait."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate([each.reshape(-1).view(mx.uint32) for each in arrays])


def wait_for(array: mx.array) -> np.ndarray:
    """Wait for the device, and read an array."""
    return np.array(array)


def apart(numbers: np.ndarray, arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Return the numbers of `joined` arrays in the shapes and types of these arrays."""
    found, start = list[np.ndarray](), 0
    for each in arrays:
        part, start = numbers.reshape(-1)[start : start + each.size].reshape(each.shape), start + each.size
        found.append(part.view(np.float32) if each.dtype == mx.float32 else part)
    return found


def sampled_rows(choosers: Sequence[Chooser], logprobs: mx.array) -> mx.array:
    """Return a token of each row (B,), in one call as in mlx-lm if all rows share sampler and random numbers."""
    first = choosers[0].sampler
    if all(chooser.sampler is first and (chooser.greedy or chooser.random is None) for chooser in choosers):
        return first(logprobs)
    return mx.concatenate([each.sample(logprobs[row : row + 1]) for row, each in enumerate(choosers)])


def has_nan(logprobs: mx.array, entropy: float) -> bool:
    """Return whether log-probabilities are NaN.

    A NaN or +inf among the logits leaves only NaN and -inf as log-probabilities. Their entropy is 0 or the maximum, so
    the array is read only for these two. (With MLX's kernels, several +inf have other entropies, and are not found.)
    """
    highest = math.log2(logprobs.shape[-1]) * (1 - 1e-6)
    return not 0.0 < entropy < highest and bool(mx.isnan(logprobs).any())


def not_finite(model: nn.Module, where: str, dtype: mx.Dtype) -> GearbxError:
    """Return the error for logits that are NaN, with the first parameter that is not finite, if any."""
    # Weights of format exact are unpacked first.
    exact = ((f"{path}.weight", m.dense_weight()) for path, m in model.named_modules() if isinstance(m, ExactModule))
    for path, array in itertools.chain(tree_flatten(model.parameters()), exact):
        if not is_finite(array):
            layer, _, name = path.rpartition(".")
            problem = "not finite (NaN or infinity), so logits are NaN; check the checkpoint"
            if array.dtype == mx.float16 and not mx.isnan(array).any().item():
                problem = "infinite in float16, so logits are NaN; use --dtype float32, or check the checkpoint"
            return GearbxError(f"{layer or 'the model'}: {name} is {problem}")
    remedy = "use --dtype float32" if dtype != mx.float32 else "check the checkpoint, or logits processors"
    return GearbxError(f"logits: not finite (NaN) in {where} and {dtype_name(dtype)}, with finite weights; {remedy}")


def blame_of(gearbox: Gearbox | Observer) -> Callable[[Gear], Exception]:
    """Return a function from a gear to the error that names the layer with weights that are not finite."""

    def error(gear: Gear) -> Exception:
        gearbox.shift(gear)
        return not_finite(gearbox.model, f"gear '{gear.name}'", gearbox.compute_dtype)

    return error


def sampler_for(tokenizer: Any, **settings: Any) -> Sampler:
    """Return `make_sampler` for a tokenizer: XTC never drops line ends and end-of-sequence tokens."""
    return make_sampler(**settings, xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids))


def take_kv_reads(gears: KVGears | None) -> dict[str, Any]:
    """End prefill, and return a step's fields of the KV cache reads since the last call; {} without KV gears."""
    if gears is None:
        return {}
    gears.end_prompt()
    read, caches = gears.meter.take()
    return {"kv_bytes": read, "kv_caches": caches}
