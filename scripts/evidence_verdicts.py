"""What docs/evidence.md advises, in sentences whose figures come from the reports."""

import errno
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

MODELS = {"demo": "demo", "stories260K": "stories260K-report", "babyllama105": "babyllama105-report"}
MIXTURES = ("random", "route", "position", "kickdown")  # those that know no more than a user's model does
SIGNIFICANT = 2  # standard errors


def read(results: Path, name: str) -> dict:
    return json.loads((results / name / "evaluation.json").read_text(encoding="utf-8"))


def reports(results: Path, pattern: str) -> list[dict]:
    """The reports whose file names match the pattern, in alphabetical order. Raises FileNotFoundError for none."""
    files = sorted(results.glob(pattern))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no report", str(results / pattern))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The smallest and the largest value, or the one that there is."""
    ends = sorted(values)
    texts = list(dict.fromkeys(form.format(value) for value in (ends[0], ends[-1])))
    return " to ".join(texts)


def policy_rows(results: Path) -> Iterator[tuple[str, dict, dict[str, dict]]]:
    """Each policy's row with its model and that model's rows by name."""
    for model, folder in MODELS.items():
        rows = read(results, folder)["policies"]
        by_name = {row["name"]: row for row in rows}
        yield from ((model, row, by_name) for row in rows)


def gains(results: Path, policy: str, control: str) -> list[tuple[float, float]]:
    """Of every run of a policy: by how much its mean KL is below chance's, as a share, and the standard error."""
    found = [row[control] for _, row, _ in policy_rows(results) if row["policy"] == policy]
    return [(-each["kl_mean_change"], each["kl_mean_change_error"]) for each in found]


def gain_sentence(results: Path, policy: str, control: str, what: str) -> str:
    found = gains(results, policy, control)
    sure = sum(gain > SIGNIFICANT * error for gain, error in found)
    worse = sum(gain < -SIGNIFICANT * error for gain, error in found)
    gained = f"{what} gained {span((gain for gain, _ in found), '{:+.0%}')} in KL over chance"
    return f"{gained}, surely in {sure} of {len(found)} runs" + (f", and lost in {worse}" if worse else "")


def static_sentence(results: Path) -> str:
    """How many mixtures of gears a static gear beats, and by how much."""
    mixtures = [(row, rows) for _, row, rows in policy_rows(results) if row["policy"] in MIXTURES]
    beaten = [row["kl_mean"] / rows[row["better_static"]]["kl_mean"] for row, rows in mixtures if row["better_static"]]
    return (
        f"For {len(beaten)} of {len(mixtures)} mixtures of gears a static gear reads no more and is better: "
        f"its KL is {span(beaten, '{:.0f}')} times smaller"
    )


def lossless_sentence(results: Path) -> str:
    found = [report["curve"] for report in reports(results, "lossless_*.json")]
    same, texts = (sum(each[name] for each in found) for name in ("identical", "texts"))
    ratios = [run["ratio"] for report in reports(results, "time_*.json") for run in report["bounds"].values()]
    return (
        f"{same} of {texts} texts were the top gear's, token for token, for "
        f"{span(each['times_fewer_bytes'] for each in found)} times fewer bytes of weights. On a model of 292 M "
        f"parameters it was {span(ratios)} times as fast as the top gear ([in time](#in-time))"
    )


def exact_sentence(results: Path) -> str:
    found = [report["curve"] for report in reports(results, "exact_lossless_*.json")]
    fewer = span(each["times_fewer_bytes_than_original"] for each in found)
    return f"{fewer} times fewer bytes than the bfloat16 weights, from one exact copy ([exact](exact.md))"


def pair_sentence(results: Path) -> str:
    found = [row for row in read(results, "pair")["policies"] if 0 < row["share_top"] < 1]
    gained = [-row["against_random_same_share"]["kl_mean_change"] for row in found]
    return f"they gained {span(gained, '{:+.0%}')} in KL over chance, by threshold"


def advice(results: Path) -> str:
    """What a user should do."""
    lines = [
        f"- **You want the model's own text in less time:** `--mode lossless`. {lossless_sentence(results)}.",
        f"- **Memory is short too:** `--mode lossless --format exact`: {exact_sentence(results)}.",
        f"- **A small loss is fine:** one gear of 5, 6 or 8 bits, such as `--gears 6`. {static_sentence(results)}.",
        "- **You want to shift all the same:** `--mode kickdown`, which recomputes doubtful tokens. "
        f"{gain_sentence(results, 'kickdown', 'against_random_same_share', 'At the same share of tokens it')}.",
        "- **Expect little of `--mode route`**, where past tokens choose the gear, as in the paper. "
        f"{gain_sentence(results, 'route', 'against_random_same_share', 'It')}.",
        f"- **Nor much of [two models](#two-models)** that take turns: {pair_sentence(results)}.",
        "- **Your model is another one:** `gearbx_mlx evaluate --data text.txt` makes these comparisons for it.",
    ]
    return "\n".join(lines) + "\n"
