"""Predicted speedups on a Mac, from published measurements and estimates, each with its source.

A round with drafts of n tokens takes n D + V + H of the time of a plain token, and generates 1 + a + ... + a^n tokens.
D is the time of a drafted token, V that of a verification, H that of the host in a round, a the acceptance rate.
"""

from collections.abc import Sequence

from pages import table

from .studies import Found, study

QWEN3_4B = {16: 52.5, 8: 86.9, 6: 104.7, 4: 134.5}  # tokens/s on an M4 Max: BENCHMARKS.md of mlx-lm
HOST = 0.45 / 29  # ms in which the device is idle in a round, of a token of Llama 3.2 3B on an M4 Pro: simulated
AGREEMENT = (0.76, 0.80, 0.88)  # of 4 bits with 16: SmolLM2 135M measured; larger models estimated
LENGTHS = (1, 2, 3, 4)
MEASURED = 1.99  # 2 to 16 rows over one, bfloat16, on an M3 Ultra before `gemv_wide`: mlx 4265
FASTER = 1.7  # by `gemv_wide`, 2 and 4 rows of a large matrix on an M3 Ultra: mlx 3888
BOUND = 1.05  # rows over one row where the weights are read once and nothing else counts: estimated
# On a base M1, whose memory is slow beside its cores: one needs 8.5 GB/s, and MLX's GEMM reached 4.8 to 7.3. Estimated.
COMPUTED = (1.1, 1.6)
FAMILIES = {
    "M1, M2": (COMPUTED, "estimate: a GEMM of 16 rows is limited by computing, not by memory"),
    "M1 and M2 Max, Ultra": (
        (MEASURED, MEASURED),
        "no `gemv_wide` in MLX; measured on an M3 Ultra without it ([mlx 4265])",
    ),
    "M3, M4": ((BOUND, MEASURED / FASTER), "`gemv_wide` reads the weights once for five rows ([mlx 3888])"),
    "M5": ((BOUND, MEASURED / FASTER), "`gemv_wide` too; assumed equal to M3 and M4"),
}


@study("docs/mac.md", minutes=0.1)
def mac_predicted() -> Found:
    """Predict speedups of mode lossless and of single gears on M1 to M5, without a measurement."""
    shares = [f"speedup at acceptance rate {share:.2f}" for share in AGREEMENT]
    head = ["chip", "verification and host time, in plain tokens", *shares, "reason"]
    rows = [
        [chips, span([cost + HOST for cost in costs]), *(cell(costs, share) for share in AGREEMENT), why]
        for chips, (costs, why) in FAMILIES.items()
    ]
    gears = [[f"{bits}-bit", f"{QWEN3_4B[bits] / QWEN3_4B[16]:.2f}"] for bits in (8, 6, 4)]
    return Found(
        {
            "mac_predicted": table(head, rows),
            "mac_gears": table(["gear", "speedup over bfloat16"], gears),
        },
        {
            chips: {share: [best(cost, share) for cost in costs] for share in AGREEMENT}
            for chips, (costs, _) in FAMILIES.items()
        },
    )


def cell(costs: Sequence[float], share: float) -> str:
    """Return the best speedups, with the draft lengths in parentheses, and whether drafting is slower."""
    speedups, lengths = zip(*(best(cost, share) for cost in costs))
    text = f"{span(speedups)} ({' to '.join(map(str, sorted({*lengths})))})"
    return text if min(speedups) > 1 else f"{text}, slower"


def span(values: Sequence[float]) -> str:
    """Return the minimum and the maximum; one number if they are equal."""
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in sorted(values)))


def best(rows_cost: float, share: float) -> tuple[float, int]:
    """Return the largest speedup of drafts of a fixed length over plain decoding, and their length."""
    return max((speedup(rows_cost, share, length), length) for length in LENGTHS)


def speedup(rows_cost: float, share: float, length: int) -> float:
    """Return the speedup of rounds with drafts of this length over plain decoding."""
    tokens = sum(share**place for place in range(length + 1))
    return tokens / (length * QWEN3_4B[16] / QWEN3_4B[4] + rows_cost + HOST)
