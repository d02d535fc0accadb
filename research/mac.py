"""What to expect on a Mac, which none of us has run: predicted from figures that others measured, each with its source.

A round that drafts n tokens takes n D + V + H of a token of mlx-lm, and writes 1 + a + ... + a^n tokens, where D is a
drafted token, V the verification's products, H what the host does in between, and a how often a draft is accepted.
"""

from collections.abc import Sequence

from pages import table

from .studies import Found, study

QWEN3_4B = {16: 52.5, 8: 86.9, 6: 104.7, 4: 134.5}  # tokens/s on an M4 Max: BENCHMARKS.md of mlx-lm
HOST = 2.4 / 27  # ms of Python in a pass, of a token of Llama 3.2 3B, on an M4 Pro: estimated
AGREEMENT = (0.76, 0.80, 0.88)  # of 4 bits with 16: SmolLM2 135M measured; larger models estimated
LENGTHS = (1, 2, 3, 4)
MEASURED = 1.99  # 2 to 16 rows over one, bfloat16, on an M3 Ultra before `gemv_wide`: mlx 4265
FASTER = 1.7  # by `gemv_wide`, 2 and 4 rows of a large matrix on an M3 Ultra: mlx 3888
BOUND = 1.05  # rows over one row where the weights are read once and nothing else counts: estimated
FAMILIES = {
    "M1, M2": ((MEASURED, MEASURED), "no `gemv_wide`: several rows read the weights about twice ([mlx 4265])"),
    "M3, M4": ((BOUND, MEASURED / FASTER), "`gemv_wide` reads the weights once for five rows ([mlx 3888])"),
    "M5": ((BOUND, MEASURED / FASTER), "assumed to be as on M3 and M4; `gemv_wide` is there too"),
}


@study("docs/mac.md", minutes=0.1)
def mac_predicted() -> Found:
    """What mode lossless and one gear should gain on M1 to M5, by figures of others; nothing is measured."""
    head = ["chip", "verification, tokens", *(f"accepted {share:.2f}" for share in AGREEMENT), "why"]
    rows = [
        [chips, span([cost + HOST for cost in costs]), *(cell(costs, share) for share in AGREEMENT), why]
        for chips, (costs, why) in FAMILIES.items()
    ]
    gears = [[f"{bits} bits", f"{QWEN3_4B[bits] / QWEN3_4B[16]:.2f}"] for bits in (8, 6, 4)]
    return Found(
        {
            "mac_predicted": table(head, rows),
            "mac_gears": table(["one gear of", "times bfloat16's speed"], gears),
        },
        {
            chips: {share: [best(cost, share) for cost in costs] for share in AGREEMENT}
            for chips, (costs, _) in FAMILIES.items()
        },
    )


def cell(costs: Sequence[float], share: float) -> str:
    """Return the gain, and by drafts of how many tokens; where none gains, the top gear writes alone."""
    gains, lengths = zip(*(best(cost, share) for cost in costs))
    said = f"{span(gains)} ({'-'.join(map(str, sorted({*lengths})))})"
    return said if min(gains) > 1 else f"none, {said}"


def span(values: Sequence[float]) -> str:
    """Return the least and the greatest; one number where they are the same."""
    return "-".join(dict.fromkeys(f"{value:.2f}" for value in sorted(values)))


def best(rows_cost: float, share: float) -> tuple[float, int]:
    """Return the most that drafts of a fixed length gain over a token alone, and their length."""
    return max((gain(rows_cost, share, length), length) for length in LENGTHS)


def gain(rows_cost: float, share: float, length: int) -> float:
    """Return how many times as fast as the top gear alone rounds with drafts of this length are."""
    written = sum(share**place for place in range(length + 1))
    return written / (length * QWEN3_4B[16] / QWEN3_4B[4] + rows_cost + HOST)
