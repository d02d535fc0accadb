"""Attention and rotary positions for `benchmark metal`: what checks them, and what is timed beside MLX's own."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..formats.kv_cache import Nested, pack
from ..kernels.metal_attention import TILE, attention, nested_attention, rope_launch
from .measuring import METAL, MLX
from .metal_products import (
    DTYPES,
    TOLERANCE,
    Arrays,
    Check,
    Timing,
    copies,
    difference,
    path_over,
    time_paths,
    type_name,
)

WIDTHS = (64, 128)  # of the heads that are checked
KEYS = (37, 300)  # that are checked: less than a block, and several blocks
OFFSET, BASE = 1000, 10000.0
HEADS, KEY_HEADS, WIDTH = 32, 8, 128  # that are timed: those of a Llama of 8 billion weights
CONTEXTS = (1024, 8192)

NESTED = "attention over planes"
GEARS, PLANES, GROUP = (4, 8), (4, 4), 32  # of keys and values in planes


@dataclass(frozen=True)
class Operation:
    """An operation that is timed.

    arrays: makes those that a launch reads once, as keys and values, or none. ours, mlx: queries, or what is turned,
    (1, HEADS, tokens, WIDTH), and arrays to the result.
    """

    name: str
    size: str
    arrays: Callable[[mx.Dtype], Arrays]
    ours: Callable[[mx.array, Arrays], mx.array]
    mlx: Callable[[mx.array, Arrays], mx.array]


def all_operations() -> list[Operation]:
    """What is timed: attention over each of CONTEXTS, and rotary positions."""
    frequencies = frequencies_of(WIDTH)
    turned = Operation(
        "rope",
        f"{HEADS} x {WIDTH}",
        lambda dtype: [],
        lambda x, a: rope_launch(x, frequencies, OFFSET, False, 1.0).run(),
        lambda x, a: mx.fast.rope(x, WIDTH, traditional=False, base=BASE, scale=1.0, offset=OFFSET),
    )
    return [*map(attention_over, CONTEXTS), *itertools.starmap(nested_over, itertools.product(CONTEXTS, GEARS)), turned]


def attention_over(keys: int) -> Operation:
    """Causal attention over this many keys."""

    def arrays(dtype: mx.Dtype) -> Arrays:
        return [mx.random.normal((1, KEY_HEADS, keys, WIDTH)).astype(dtype) for _ in range(2)]

    def ours(queries: mx.array, a: Arrays) -> mx.array:
        return attention(queries, a[0], a[1], WIDTH**-0.5, "causal")

    def mlx(queries: mx.array, a: Arrays) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, a[0], a[1], scale=WIDTH**-0.5, mask="causal")

    return Operation("attention", f"{keys} keys", arrays, ours, mlx)


def nested_over(keys: int, bits: int) -> Operation:
    """Causal attention over this many keys in nested planes, beside MLX's over keys that are unpacked first."""

    def arrays(dtype: mx.Dtype) -> Arrays:
        return [array for _ in range(2) for array in planes_of(random_entries(KEY_HEADS, keys, WIDTH, dtype), bits)]

    def cached(a: Arrays) -> Nested:
        half = len(a) // 2
        nothing = mx.zeros((1, KEY_HEADS, 1, WIDTH), a[-1].dtype)
        return Nested((nothing, nothing), (a[:half], a[half:]), keys)

    def ours(queries: mx.array, a: Arrays) -> mx.array:
        return attended(queries, cached(a))

    def mlx(queries: mx.array, a: Arrays) -> mx.array:
        k, v = cached(a).unpacked()
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=WIDTH**-0.5, mask="causal")

    return Operation(NESTED, f"{keys} keys of {bits} bits", arrays, ours, mlx)


def random_entries(heads: int, keys: int, width: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((1, heads, keys, width)).astype(dtype)


def planes_of(entries: mx.array, bits: int) -> Arrays:
    """The planes that the gear with `bits` reads of entries (1, heads, keys, width), scales and offsets."""
    planes, scales, offsets = pack(entries, PLANES, GROUP)
    return [*planes[: bits // PLANES[0]], scales, offsets]


def attended(queries: mx.array, nested: Nested) -> mx.array:
    """Causal attention over keys and values in planes, by our kernel."""
    scale = queries.shape[3] ** -0.5
    return nested_attention(queries, nested, scale, "causal")


def frequencies_of(dims: int) -> mx.array:
    """Radians from position to position, (dims / 2,) float32."""
    return mx.power(BASE, mx.arange(0, dims, 2, dtype=mx.float32) / -dims)


def operation_checks(vectors: Sequence[int]) -> dict[str, Iterator[Check]]:
    """The checks of each operation, for these numbers of tokens."""
    return {"attention": attention_checks(vectors), NESTED: nested_checks(vectors), "rope": rope_checks(vectors)}


def attention_checks(vectors: Sequence[int]) -> Iterator[Check]:
    """Four heads that share two of keys and values: each type, width, number of keys and of queries, and mask."""
    for dtype, width, keys, count in itertools.product(DTYPES, WIDTHS, KEYS, vectors):
        queries, cached_keys, values = (
            mx.random.normal((1, heads, length, width)).astype(dtype)
            for heads, length in ((4, count), (2, keys), (2, keys))
        )
        sees = mx.random.uniform(shape=(count, keys)) < 0.7
        sees = sees | (mx.arange(keys) == 0)  # a query that sees nothing has no softmax
        text = f"{keys} keys, heads of {width}, {count} queries, {type_name(dtype)}"
        for name, mask in {"causal": "causal", "all seen": None, "masked": sees}.items():
            yield Check(
                f"{text}, {name}", TOLERANCE[dtype], partial(attention_error, queries, cached_keys, values, mask)
            )
        if count > 1:
            yield Check(f"{text}, the last alone", 0.0, partial(attention_company_error, queries, cached_keys, values))


def attention_error(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> float:
    """How far attention is from its definition in float32, on the CPU."""
    length, width, key_count = queries.shape[2], queries.shape[3], keys.shape[2]
    with mx.stream(mx.cpu):
        q, k, v = (array.astype(mx.float32) for array in (queries, keys, values))
        k, v = (mx.repeat(array, queries.shape[1] // keys.shape[1], axis=1) for array in (k, v))
        scores = width**-0.5 * q @ k.swapaxes(-1, -2)
        if isinstance(mask, str):
            mask = mx.arange(key_count) <= mx.arange(key_count - length, key_count)[:, None]
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        expected = mx.softmax(scores, axis=-1) @ v
    return difference(attention(queries, keys, values, width**-0.5, mask), expected)


def nested_checks(vectors: Sequence[int]) -> Iterator[Check]:
    """Four heads that share two of keys and values in planes: each type, width, gear and number of queries."""
    for dtype, width, keys, bits, count in itertools.product(DTYPES, WIDTHS, KEYS, GEARS, vectors):
        queries = random_entries(4, count, width, dtype)
        k, v = (random_entries(2, keys, width, dtype) for _ in range(2))
        packed = keys // TILE * TILE  # of further positions entries are read
        text = f"{keys} keys of {bits} bits, heads of {width}, {count} queries, {type_name(dtype)}"
        nested = Nested((k, v), (planes_of(k, bits), planes_of(v, bits)), packed)
        yield Check(text, TOLERANCE[dtype], partial(nested_error, queries, nested))


def nested_error(queries: mx.array, nested: Nested) -> float:
    """How far causal attention over planes is from attention over what they stand for, by our own kernel."""
    with mx.stream(mx.cpu):
        keys, values = nested.unpacked()
    scale = queries.shape[3] ** -0.5
    return difference(attended(queries, nested), attention(queries, keys, values, scale, "causal"))


def attention_company_error(queries: mx.array, keys: mx.array, values: mx.array) -> float:
    """How far the last query's result alone is from the same among others."""
    among = attention(queries, keys, values, 1.0, "causal")[:, :, -1:]
    return difference(among, attention(queries[:, :, -1:], keys, values, 1.0, "causal"))


def rope_checks(vectors: Sequence[int]) -> Iterator[Check]:
    """Four heads, all or half of their values turned: each type, order of pairs and number of tokens."""
    for dtype, traditional, dims, count in itertools.product(DTYPES, (False, True), WIDTHS, vectors):
        x = mx.random.normal((1, 4, count, max(WIDTHS))).astype(dtype)
        text = f"{dims} of {max(WIDTHS)} values, {count} tokens, {type_name(dtype)}"
        text += ", neighbours" if traditional else ", halves"
        yield Check(text, TOLERANCE[dtype], partial(rope_error, x, dims, traditional))


def rope_error(x: mx.array, dims: int, traditional: bool) -> float:
    """How far rotary positions are from their definition in float32, on the CPU."""
    frequencies = frequencies_of(dims)
    with mx.stream(mx.cpu):
        angles = mx.arange(OFFSET, OFFSET + x.shape[2], dtype=mx.float32)[:, None] * frequencies
        cosine, sine = mx.cos(angles), mx.sin(angles)
        turned = x[..., :dims].astype(mx.float32)
        axis = -1 if traditional else -2
        pairs = turned.reshape(*turned.shape[:-1], *((dims // 2, 2) if traditional else (2, dims // 2)))
        a, b = (mx.take(pairs, place, axis=axis) for place in (0, 1))
        both = mx.stack([a * cosine - b * sine, a * sine + b * cosine], axis=axis).reshape(turned.shape)
        expected = mx.concatenate([both, x[..., dims:].astype(mx.float32)], axis=-1)
    return difference(rope_launch(x, frequencies, OFFSET, traditional, 1.0).run(), expected)


def time_operation(operation: Operation, timing: Timing) -> Iterator[dict[str, Any]]:
    """Rows of ours and MLX's, for each number of tokens."""
    dtype = timing.dtype
    made = copies(operation.arrays(dtype), timing.buffer.nbytes)
    for count in timing.vectors:
        x = mx.random.normal((1, HEADS, count, WIDTH)).astype(dtype)
        paths = {MLX: path_over(made, partial(operation.mlx, x)), METAL: path_over(made, partial(operation.ours, x))}
        what = {"what": operation.name, "bits": str(8 * dtype.size), "size": operation.size, "vectors": count}
        yield from time_paths(what, paths, timing)
