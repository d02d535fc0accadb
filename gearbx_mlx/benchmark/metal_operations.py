"""Attention and rotary positions: what `benchmark metal` checks of them."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx

from ..formats.kv_cache import Nested, pack
from ..kernels.metal_attention import TILE, attention, nested_attention, rope_launch
from .metal_products import (
    DTYPES,
    TOLERANCE,
    Arrays,
    Check,
    difference,
    type_name,
)

WIDTHS = (64, 128)  # of the heads that are checked
KEYS = (37, 300)  # that are checked: less than a block, and several blocks
OFFSET, BASE = 1000, 10000.0

NESTED = "attention over planes"
GEARS, PLANES, GROUP = (4, 8), (4, 4), 32  # of keys and values in planes


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
