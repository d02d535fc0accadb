"""The fewest bits of a layer, by the rules of the manifest document ("Architecture" and "Calibration")."""

from collections.abc import Mapping

ACCURACY_THRESHOLD = 0.5  # percent of perplexity that a layer at its fewest bits may add
SAFE, CAREFUL = 0.02, 0.05  # nats: by the KL at 4 bits, 4, 6 or 8 are wanted


def least_bits(
    kl: Mapping[int, float], perplexity_change: Mapping[int, float], threshold: float = ACCURACY_THRESHOLD
) -> int:
    """min_bits of a layer.

    The lowest width whose perplexity rises by less than the threshold, but not below what the KL at 4 bits (or the
    first measured width above) says: under 0.02 nats 4 are safe, up to 0.05 it wants 6, above that it stays at 8. Below
    4 bits the KL has to be under 0.02 as well. Where no width is good enough, the highest that was measured.

    Args:
        kl: bits to nats.
        perplexity_change: bits to percent.
        threshold: percent.
    """
    widths = sorted(kl)
    at_four = kl[next((bits for bits in widths if bits >= 4), widths[-1])]
    floor = 0 if at_four < SAFE else 6 if at_four <= CAREFUL else 8
    good = (
        bits
        for bits in widths
        if bits >= floor and (bits >= 4 or kl[bits] < SAFE) and perplexity_change.get(bits, 0.0) < threshold
    )
    return next(good, widths[-1])
