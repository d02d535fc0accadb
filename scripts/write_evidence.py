"""Write the tables of docs/evidence.md and docs/pair.md, from the reports of the commands on these pages.

    python scripts/write_evidence.py RESULTS docs/evidence.md docs/pair.md

RESULTS is the directory in which the commands ran. A table stands between <!-- NAME ... --> and <!-- end -->; NAME is
one of the functions in TABLES, and the words after it are the function's arguments. A table without a report stays as
it is. The script copies the pictures to images/ beside the first page.
"""

import argparse
import functools
import json
import shutil
from pathlib import Path

from evidence_verdicts import MODELS, advice, reports
from measure_exact import lossless_table
from pages import fill, table

AIMS = {0.25: "-12 %", 0.5: "-35 %"}  # share of tokens to the change of mean KL that kickdown should reach


def percent(part, digits=0):
    return f"{100 * part:.{digits}f} %"


def change(control):
    if not control:
        return ""
    return f"{100 * control['kl_mean_change']:+.0f} ± {100 * control['kl_mean_change_error']:.0f} %"


def megabytes(count):
    return f"{count / 1e6:.2f}"


def policies(results, model):
    report = json.loads((results / MODELS[model] / "evaluation.json").read_text())
    rows = [
        [
            row["name"],
            percent(row["share_top"], 1),
            megabytes(row["weight_bytes_per_token"]),
            f"{row['kl_mean']:.2g}" if row["kl_mean"] > 1e-9 else 0,
            percent(row["top1_agreement"], 1),
            change(row["against_random_same_share"]),
            row["better_static"] or "",
        ]
        for row in report["policies"]
    ]
    floor = report["noise_floor"]
    rows.append(["bfloat16 noise", "", "", f"{floor['kl_mean']:.2g}", percent(floor["top1_agreement"], 1), "", ""])
    return table(["policy", "share", "MB/token", "mean KL", "agreement", "vs chance", "better static"], rows)


def buckets(results, model, *names):
    """Mean KL by the reference's top probability."""
    report = json.loads((results / MODELS[model] / "evaluation.json").read_text())
    by_name = {row["name"]: row["buckets"] for row in report["policies"]}
    first = by_name[names[0]]
    rows = [
        [part["top_probability"], part["tokens"], *(f"{by_name[name][i]['kl_mean']:.2g}" for name in names)]
        for i, part in enumerate(first)
    ]
    return table(["top probability", "tokens", *names], rows)


def kickdown(results):
    rows = []
    for model, folder in MODELS.items():
        report = json.loads((results / folder / "evaluation.json").read_text())
        for row in report["policies"]:
            if row["policy"] == "kickdown":
                route = next(r for r in report["policies"] if r["name"] == row["name"].replace("kickdown", "route"))
                rows.append(
                    [
                        model,
                        percent(row["share_top"]),
                        change(row["against_random_same_share"]),
                        AIMS[row["share_wanted"]],
                        change(route["against_random_same_share"]),
                        change(row["against_random_same_bytes"]),
                    ]
                )
    head = ["model", "share", "kickdown vs chance", "aim", "route vs chance", "kickdown at its bytes"]
    return table(head, rows)


def lossless(results):
    rows = []
    for found in reports(results, "lossless_*.json"):
        curve, compared = found["curve"], found["compared"]
        fixed, speculative = found["fixed"], found.get("mlx_lm_speculative", {})
        length = str(found["best_fixed"])
        best = max(speculative, key=lambda n: speculative[n]["times_fewer_bytes"], default=None)
        rows.append(
            [
                Path(found["model"]).name,
                found["gears"][-1],
                found["draft_bits"],
                f"{curve['identical']} of {curve['texts']}",
                f"{curve['tokens_per_verification']:.1f}",
                f"**{curve['times_fewer_bytes']:.2f}**",
                f"{compared['times_fewer_bytes']:.2f} ({compared['texts']})",
                f"{fixed[length]['times_fewer_bytes']:.2f} ({length})",
                f"{speculative[best]['times_fewer_bytes']:.2f} ({best})" if best else "",
            ]
        )
    head = ["model", "top", "draft", "identical", "tokens per verification", "times fewer bytes"]
    return table([*head, "compared", "best fixed length", "mlx-lm speculative"], rows)


def chi_square(results):
    found = [test for test in json.loads((results / "chi.json").read_text())["chi_square"] if test]
    rows = [
        [number, f"{test['statistic']:.1f}", test["freedom"], f"{test['p']:.3f}"]
        for number, test in enumerate(found, 1)
    ]
    return table(["prompt", "chi-square", "degrees of freedom", "p"], rows)


def wall_clock(results):
    rows = []
    for found in reports(results, "time_*.json"):
        for bound, run in found["bounds"].items():
            rows.append(
                [
                    found["activations"],
                    bound,
                    f"{found['tokens_per_second_top']:.1f}",
                    f"{run['tokens_per_second']:.1f}",
                    f"{run['ratio']:.2f} ({run['spread'][0]:.2f}-{run['spread'][1]:.2f})",
                    f"{run['identical']} of {found['prompts']}",
                ]
            )
    return table(["activations", "bound", "top gear, tokens/s", "lossless, tokens/s", "ratio", "identical"], rows)


def passes(results):
    rows = []
    for found in reports(results, "time_*.json"):
        rows.append([found["activations"], *(f"{value:.0f}" for value in found["milliseconds"].values())])
    return table(["activations", *(f"{name}, ms".replace("1 rows", "1 row") for name in found["milliseconds"])], rows)


def pair(results, *thresholds):
    report = json.loads((results / "pair" / "evaluation.json").read_text())
    rows = [
        [
            str(row["threshold"]).removesuffix(".0"),
            percent(row["share_top"], 1),
            percent(row["parameter_ratio"], 1),
            f"{row['perplexity']:.3f}",
            f"{row['against_random_same_share']['perplexity']:.3f}",
            percent(row["top1_agreement"], 1),
            percent(row["against_random_same_share"]["top1_agreement"], 1),
            change(row["against_random_same_share"]) if 0 < row["share_top"] < 1 else "",
        ]
        for row in report["policies"]
        if str(row["threshold"]).removesuffix(".0") in thresholds
    ]
    head = ["threshold", "large", "parameters", "perplexity", "by chance", "agreement", "by chance", "KL vs chance"]
    return table(head, rows)


def pair_writing(results, folder):
    report = json.loads((results / folder / "evaluation.json").read_text())
    rows = [
        [
            row["name"],
            percent(row["accuracy"]),
            percent(row["same_answer_as_reference"]),
            percent(row["share_top"], 1),
            percent(row["parameter_ratio"], 1),
            f"{row['caught_up_per_token']:.2f}",
        ]
        for row in report["policies"]
    ]
    return table(["policy", "right", "same answer as the large", "large", "parameters", "caught up"], rows)


def exact(results):
    return lossless_table(results)


def measured(results):
    """When, where and how long all of it was measured."""
    made = json.loads((results / "made.json").read_text()).values()
    days = sorted({each["day"] for each in made})
    machines = sorted({each["machine"] for each in made})
    hours = sum(each["minutes"] for each in made) / 60
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured {when} on {' and '.join(machines)}: {len(made)} commands, {hours:.1f} hours.\n"


TABLES = {
    function.__name__: function
    for function in (
        *(advice, measured, policies, buckets, kickdown, lossless, exact, chi_square, wall_clock, passes, pair),
        pair_writing,
    )
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("pages", type=Path, nargs="+")
    args = parser.parse_args()

    tables = {name: functools.partial(function, args.results) for name, function in TABLES.items()}
    for page in args.pages:
        fill(page, tables)
    for folder, name in {**{folder: f"kl_{model}" for model, folder in MODELS.items()}, "pair": "pair"}.items():
        picture = args.results / folder / "evaluation.png"
        if picture.exists():
            shutil.copy(picture, args.pages[0].parent / "images" / f"{name}.png")


if __name__ == "__main__":
    main()
