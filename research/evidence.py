"""Measurements for docs/evidence.md and research/evidence.md, their tables, and the advice."""

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from pages import table
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gearbx_mlx import Gearbox, generate, load
from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.files.writing import write_text

from . import ROOT
from .evaluation.report import change_of_kl, percent
from .exact import exact
from .studies import STUDIES, Found, publish, read_report, study

MODELS = {"demo": "demo", "stories260K": "stories260K-report", "babyllama105": "babyllama105-report"}
REPORTS = MODELS | {"smollm2": "smollm2-report"}  # without a part in the advice
MIXTURES = ("random", "route", "kickdown")  # they know no more than a user's model does
SIGNIFICANT = 2  # standard errors


def read(results: Path, name: str) -> dict:
    return read_report(results / name / "evaluation.json")


def reports(results: Path, pattern: str) -> list[dict]:
    """Return the reports with matching file names, in alphabetical order. Raises FileNotFoundError for none."""
    files = sorted(results.glob(pattern))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no report", str(results / pattern))
    return [read_report(file) for file in files]


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Return the smallest and the largest value, or the only one."""
    ends = sorted(values)
    texts = list(dict.fromkeys(form.format(value) for value in (ends[0], ends[-1])))
    return " to ".join(texts)


def policy_rows(results: Path) -> Iterator[tuple[str, dict, dict[str, dict]]]:
    """Yield each policy's row with its model and that model's rows by name."""
    for model, folder in MODELS.items():
        rows = read(results, folder)["policies"]
        by_name = {row["name"]: row for row in rows}
        yield from ((model, row, by_name) for row in rows)


def gain(results: Path, policy: str) -> str:
    """Return the reduction of the mean KL against the random baseline, at the same share of tokens, over all runs."""
    compared = [row["against_random_same_share"] for _, row, _ in policy_rows(results) if row["policy"] == policy]
    found = [(-each["kl_mean_change"], each["kl_mean_change_error"]) for each in compared]
    sure = sum(change > SIGNIFICANT * error for change, error in found)
    worse = sum(change < -SIGNIFICANT * error for change, error in found)
    rose = f" (higher in {worse})" if worse else ""
    return f"{span((change for change, _ in found), '{:.0%}')}, significantly in {sure} of {len(found)} runs{rose}"


def static_sentence(results: Path) -> str:
    """Return a sentence: the number of mixed-gear runs that a static gear beats, and by how much."""
    mixtures = [(row, rows) for _, row, rows in policy_rows(results) if row["policy"] in MIXTURES]
    beaten = [row["kl_mean"] / rows[row["better_static"]]["kl_mean"] for row, rows in mixtures if row["better_static"]]
    helps = "does not help" if len(beaten) == len(mixtures) else "rarely helps"
    return (
        f"Shifting {helps}. In {len(beaten)} of {len(mixtures)} runs with mixed gears, a single gear read no more "
        f"bytes and had {span(beaten, '{:.0f}')} times lower KL."
    )


def lossless_sentence(results: Path) -> str:
    found = [report["fixed"][str(report["best_fixed"])] for report in reports(results, "lossless_*.json")]
    same, texts = (sum(each[name] for each in found) for name in ("identical", "texts"))
    outputs = "All measured outputs" if same == texts else f"{same} of {texts} outputs"
    return (
        f"For the top gear's output in less time, use `--mode lossless`. {outputs} equaled the top gear's, "
        f"with {span(each['times_fewer_bytes'] for each in found)} times fewer bytes of weights per token."
    )


def advice(results: Path) -> str:
    """Return whether a user should shift, a sentence for each line."""
    lines = [
        static_sentence(results),
        lossless_sentence(results),
        "If a small loss is acceptable, use one 5-, 6- or 8-bit gear, such as `--gears 6`.",
        "Entropy does find uncertain tokens. Against the random baseline, "
        f"kickdown reduced KL by {gain(results, 'kickdown')}. Route reduced it by {gain(results, 'route')}.",
    ]
    return "\n".join(lines) + "\n"


AIMS = {0.25: "-12 %", 0.5: "-35 %"}  # share of tokens -> the change of mean KL that kickdown should reach


def megabytes(count):
    return f"{count / 1e6:.2f}"


def policies(results, model):
    report = read(results, REPORTS[model])
    rows = [
        [
            row["name"],
            percent(row["share_top"]),
            megabytes(row["weight_bytes_per_token"]),
            f"{row['kl_mean']:.2g}" if row["kl_mean"] > 1e-9 else 0,
            percent(row["top1_agreement"]),
            change_of_kl(row["against_random_same_share"]),
            row["better_static"] or "",
        ]
        for row in report["policies"]
    ]
    if floor := report["noise_floor"]:
        rows.append(["bfloat16 noise", "", "", f"{floor['kl_mean']:.2g}", percent(floor["top1_agreement"]), "", ""])
    return table(["policy", "share", "MB/token", "mean KL", "agreement", "vs chance", "better static"], rows)


def buckets(results, model, *names):
    """Mean KL by the reference's top probability."""
    by_name = {row["name"]: row["buckets"] for row in read(results, MODELS[model])["policies"]}
    first = by_name[names[0]]
    rows = [
        [part["top_probability"], part["tokens"], *(f"{by_name[name][i]['kl_mean']:.2g}" for name in names)]
        for i, part in enumerate(first)
    ]
    return table(["top probability", "tokens", *names], rows)


def kickdown(results):
    rows = [
        [
            model,
            percent(row["share_top"], 0),
            change_of_kl(row["against_random_same_share"]),
            AIMS[row["share_wanted"]],
            change_of_kl(by_name[row["name"].replace("kickdown", "route")]["against_random_same_share"]),
            change_of_kl(row["against_random_same_bytes"]),
        ]
        for model, row, by_name in policy_rows(results)
        if row["policy"] == "kickdown"
    ]
    head = ["model", "share", "kickdown vs chance", "aim", "route vs chance", "kickdown at its bytes"]
    return table(head, rows)


def lossless(results):
    rows = []
    for found in reports(results, "lossless_*.json"):
        length, speculative = str(found["best_fixed"]), found.get("mlx_lm_speculative", {})
        fixed = found["fixed"][length]
        best = max(speculative, key=lambda n: speculative[n]["times_fewer_bytes"], default=None)
        rows.append(
            [
                Path(found["model"]).name,
                found["gears"][-1],
                found["draft_bits"],
                f"**{fixed['times_fewer_bytes']:.2f}** ({length})",
                f"{speculative[best]['times_fewer_bytes']:.2f} ({best})" if best else "",
            ]
        )
    return table(["model", "top", "draft", "times fewer bytes", "mlx-lm speculative"], rows)


def chi_square(results):
    found = [test for test in read_report(results / "chi.json")["chi_square"] if test]
    rows = [
        [number, f"{test['statistic']:.1f}", test["freedom"], f"{test['p']:.3f}"]
        for number, test in enumerate(found, 1)
    ]
    return table(["prompt", "chi-square", "degrees of freedom", "p"], rows)


def pair(results, folder, *thresholds):
    """Return a copy of a model has as many parameters, and fewer bytes."""
    policies = read(results, folder)["policies"]
    copy = all(row["parameter_ratio"] == 1 for row in policies)
    rows = [
        [
            str(row["threshold"]).removesuffix(".0"),
            percent(row["share_top"]),
            megabytes(row["weight_bytes_per_token"]) if copy else percent(row["parameter_ratio"]),
            f"{row['perplexity']:.3f}",
            f"{row['against_random_same_share']['perplexity']:.3f}",
            percent(row["top1_agreement"]),
            percent(row["against_random_same_share"]["top1_agreement"]),
            change_of_kl(row["against_random_same_share"]) if 0 < row["share_top"] < 1 else "",
        ]
        for row in policies
        if str(row["threshold"]).removesuffix(".0") in thresholds
    ]
    cost = "MB/token" if copy else "parameters"
    head = ["threshold", "large", cost, "perplexity", "by chance", "agreement", "by chance", "KL vs chance"]
    return table(head, rows)


def measured(results):
    """When, where and how long all of it was measured."""
    made = read_report(results / "made.json").values()
    days = sorted({each["day"] for each in made})
    machines = sorted({each["machine"] for each in made})
    hours = sum(each["minutes"] for each in made) / 60
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured {when} on {' and '.join(machines)}, by {len(made)} commands in {hours:.1f} hours.\n"


COLLECTED = (advice, measured, policies, buckets, kickdown, lossless, chi_square, pair)
TABLES = {function.__name__: function for function in COLLECTED}


PAGE = "research/evidence.md"
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
OUTPUTS = ("--out", "--json", "--mlx-path")
FEWER = ("gsm8k_test_50.jsonl", "gsm8k_test_200.jsonl", 50)  # a text, the one that it begins, its lines
PROGRAMS = {"python": [], "gearbx_mlx": ["-m", "gearbx_mlx"], "mlx_lm.convert": ["-m", "mlx_lm", "convert"]}
VARIABLE = re.compile(r"\w+=\S*")  # set for one command, as in OMP_NUM_THREADS=1


@dataclass(frozen=True)
class Made:
    """How a command ran. code: a digest of the package and the scripts at that time."""

    code: str
    machine: str
    day: str
    minutes: float


def page_commands(page: str) -> Iterator[str]:
    """Yield the commands of a page that write a report into the directory that they run in, each as one line."""
    for match in INDENTED.finditer(page):
        for line in re.sub(r"\\\n\s+", "", match[1]).splitlines():
            words = [word for word in shlex.split(line) if not VARIABLE.fullmatch(word)]
            if words[0] in PROGRAMS and output_of(words) is not None:
                yield line.strip()


def output_of(words: Sequence[str]) -> str | None:
    """Return the file or directory that a command writes."""
    return next((after for word, after in pairwise(words) if word in OUTPUTS), None)


def runnable(command: str, data: Path) -> list[str]:
    """Return the command for a process in RESULTS: DIR is the data; other files are the repository's."""
    words = [str(data) if word == "DIR" else word for word in shlex.split(command)]
    words = [str(ROOT / word) if word.startswith(("scripts/", "research/")) else word for word in words]
    variables = [word for word in words if VARIABLE.fullmatch(word)]
    program, *arguments = words[len(variables) :]
    return ["env", *variables, sys.executable, *PROGRAMS[program], *arguments]


def code_digest() -> str:
    """Return a digest of all sources that a figure depends on."""
    digest = hashlib.sha256()
    for folder in ("gearbx_mlx", "research", "scripts"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in {".py", ".cpp", ".h", ".safetensors", ".json"} and file.name != Path(__file__).name:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def lay_out(results: Path, models: Path, data: Path) -> None:
    """Put what the commands read beside what they write: links to models and texts."""
    results.mkdir(parents=True, exist_ok=True)
    whole, name = data / FEWER[1], results / FEWER[0]
    for source in [*models.iterdir(), whole]:
        link = results / source.name
        if (source.is_dir() or source == whole) and not link.exists():
            link.symlink_to(source.resolve())
    write_text(name, "".join(whole.read_text(encoding="utf-8").splitlines(keepends=True)[: FEWER[2]]))


def made_so_far(results: Path) -> dict[str, Made]:
    file = results / "made.json"
    return {name: Made(**made) for name, made in read_report(file).items()} if file.exists() else {}


def make(command: str, results: Path, data: Path, code: str) -> Made:
    """Run a command; what it says goes into RESULTS/log.txt. Raises subprocess.CalledProcessError."""
    began = time.monotonic()
    with (results / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n$ {command}\n")
        log.flush()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(runnable(command, data), cwd=results, env=environment, stdout=log, stderr=log, check=True)
    return Made(code, machine_name(), date.today().isoformat(), round((time.monotonic() - began) / 60, 1))


def make_all(commands: Sequence[str], results: Path, data: Path, keep: bool) -> None:
    """Run every command that the present code did not run yet."""
    code, made = code_digest(), made_so_far(results)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(commands))
        for command in commands:
            progress.update(task, description=str(output_of(shlex.split(command))))
            if command not in made or not (keep or made[command].code == code):
                made[command] = make(command, results, data, code)
                lines = {name: asdict(each) for name, each in made.items() if name in commands}
                write_text(results / "made.json", json.dumps(lines, indent=2) + "\n")
            progress.advance(task)


@study(PAGE, "docs/evidence.md", writes="images/pair.png")
def evidence_tables(results: Path) -> Found:
    """Write the tables of both pages from the reports of the commands; a table without a report stays unchanged.

    Args:
        results: Directory in which the commands ran.
    """
    tables = {name: partial(function, results) for name, function in TABLES.items()}
    drawn = results / "pair" / "evaluation.png"
    pictures = {"pair.png": partial(shutil.copy, drawn)} if drawn.exists() else {}
    return Found(tables, pictures=pictures)


@study(minutes=90, writes="research/evidence.md, docs/evidence.md and a part of docs/exact.md")
def evidence(
    results: Path, models: Path = Path("models"), data: Path = Path("data"), keep: bool = False, list: bool = False
) -> None:
    """Run every command of research/evidence.md that writes a report, and write its tables and the advice.

    The same command resumes after an interruption: RESULTS/made.json records each command with date, machine and code.
    Results of older code are measured again. Needs the extras `train` and `plots`.

    Args:
        results: Directory, made if missing.
        models: Directory of stories260K and babyllama105.
        data: Directory of the data of GSM8K and of train_demo_model.py.
        keep: Keep results of older code.
        list: Show the commands, and run none.
    """
    commands = [*page_commands((ROOT / PAGE).read_text(encoding="utf-8"))]
    if list:
        print("\n".join(commands))
        return
    for needed in (models / "stories260K", models / "babyllama105", data / FEWER[1]):
        if not needed.exists():
            raise GearbxError(f"{needed} is missing")
    results = results.resolve()
    lay_out(results, models, data)
    try:
        make_all(commands, results, data.resolve(), keep)
    except subprocess.CalledProcessError as error:
        raise GearbxError(f"{shlex.join(error.cmd)} failed; {results / 'log.txt'} says why") from error
    except KeyboardInterrupt:
        raise GearbxError("interrupted; the same command goes on") from None
    publish(STUDIES["evidence-tables"], evidence_tables(results), write=True)
    names = [str(results / name) for name in ("stories260K", "babyllama105")]
    publish(STUDIES["exact"], exact(names), write=True)


@study(minutes=5)
def sampled_text(
    model: str,
    out: Path,
    prompt: str = "Once upon a time",
    texts: int = 60,
    max_tokens: int = 250,
    seed: int = 0,
) -> None:
    """Sample text from a model, as JSON Lines, as a substitute for unavailable training data.

    It is sampled at temperature 1 in full precision, so the model's certainty equals that of its distribution.

    Args:
        model: Directory or Hub repository.
        out: File to write.
    """
    mx.random.seed(seed)
    loaded, tokenizer = load(model)
    gearbox, sampler = Gearbox(loaded, "16"), make_sampler(1.0)
    with out.open("w", encoding="utf-8") as file:
        for _ in range(texts):
            written = generate(loaded, tokenizer, prompt, gearbox=gearbox, max_tokens=max_tokens, sampler=sampler)
            file.write(json.dumps({"text": prompt + written}) + "\n")
