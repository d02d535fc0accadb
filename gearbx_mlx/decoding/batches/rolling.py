"""Take entries back from the KV cache of a batch, from each sequence as many as it has too many.

mlx-lm's batches are padded on the left, so that all sequences end at the same entry. What a sequence loses at its end
has to go to its front: its entries move to the right.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..caches import Cache, parts


def other_than_rows(cache: Cache) -> str:
    """The class of a cache whose sequences cannot lose entries each on its own; "" if they all can."""
    return next((type(part).__name__ for part in parts(cache) if type(part) not in (KVCache, BatchKVCache)), "")


def is_alone(cache: Cache) -> bool:
    """Whether a cache is of one sequence, and has no room for others."""
    return any(type(part) is KVCache for part in parts(cache))


def drop(cache: Cache, dropped: Sequence[int]) -> None:
    """Drop the last entries of every sequence.

    Args:
        cache: of KVCache (one sequence) or BatchKVCache.
        dropped: how many, for each sequence.
    """
    for part in parts(cache):
        if type(part) is KVCache:
            part.trim(dropped[0])
        elif any(dropped):
            drop_rows(part, dropped)


def drop_rows(part: BatchKVCache, dropped: Sequence[int]) -> None:
    """As mlx-lm's `trim`, `prepare` and `finalize` one after the other, and without the padding that all have then."""
    _, _, offset, padding, end = part.state
    starts = padding.tolist()
    new_end = max(end - start - count for start, count in zip(starts, dropped))
    moves = [new_end - end + count for count in dropped]
    if any(moves):
        part.keys, part.values = (rolled(entries, moves) for entries in (part.keys, part.values))
    part._idx = new_end
    part.offset = offset - mx.array([*dropped])
    part.left_padding = padding + mx.array(moves)


def rolled(entries: mx.array, moves: Sequence[int]) -> mx.array:
    """(B, H, N, D) with every row moved to the right by its own number of entries. What leaves at one end enters at the
    other: it is padding."""
    rows = [entries[i : i + 1] for i in range(len(moves))]
    return mx.concatenate([mx.roll(row, move, 2) if move else row for row, move in zip(rows, moves)])
