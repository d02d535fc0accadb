"""The ladder of a KV cache in gears, and what goes with it. Light: flags are checked before a model is loaded."""

from collections.abc import Sequence

from ..errors import GearbxError

KV_BITS = (4, 8, 16)  # 16: keys and values as they are


def kv_ladder(bits: str | Sequence[int]) -> tuple[int, ...]:
    """A ladder of the KV cache, ascending bits, from text such as "4,16" or from numbers.

    Raises:
        GearbxError: other bits than 4, 8 and 16, or not ascending.
    """
    try:
        ladder = tuple(int(each) for each in (bits.split(",") if isinstance(bits, str) else bits))
    except (TypeError, ValueError):
        ladder = ()
    if not ladder or any(each not in KV_BITS for each in ladder) or list(ladder) != sorted(set(ladder)):
        raise GearbxError(f"--kv-gears is {shown(bits)}; give ascending bits of 4, 8 and 16, such as 4,16")
    return ladder


def shown(bits: str | Sequence[int]) -> str:
    """The ladder as its flag has it."""
    return bits if isinstance(bits, str) else ",".join(map(str, bits))


def check_kv_gears(
    bits: str | Sequence[int] | None, fixed: int | None, kv_bits: object = None, draft_model: object = None
) -> None:
    """Raises GearbxError for gears of the KV cache that do not go together, or with other ways to treat the cache.

    Args:
        bits: of the ladder. fixed: the gear that all passes read, if one is asked for.
        kv_bits, draft_model: mlx-lm's; None without.
    """
    if bits is None and fixed is not None:
        raise GearbxError(f"--kv-gear is {fixed}, and there are no --kv-gears; give these too")
    if bits is None:
        return
    ladder = kv_ladder(bits)
    if fixed is not None and fixed not in ladder:
        raise GearbxError(f"--kv-gear is {fixed}, and --kv-gears {shown(ladder)}; choose one of them")
    for flag, given in (("--kv-bits", kv_bits), ("--draft-model", draft_model)):
        if given is not None:
            raise GearbxError(f"--kv-gears and {flag} are two ways to treat one KV cache; leave one of them out")
