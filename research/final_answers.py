"""Problems of GSM8K or MATH, which a model solves by writing: the final answers are right or wrong."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

from gearbx_mlx.cli.loaded import Loaded
from gearbx_mlx.cli.prompt import PromptSettings, encoded
from gearbx_mlx.decoding.modes import made
from gearbx_mlx.decoding.route import Route
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.loading import model_name
from gearbx_mlx.routing.gates import read_thresholds

from .evaluation import answers
from .evaluation.model import Model, settings_of
from .evaluation.report import markdown_table
from .studies import Found, keep_report, study

Problems = list[dict[str, str]]
WRITING = ("static", "route", "kickdown", "lossless")  # the policies that can write a text of their own


@study(minutes=30)
def final_answers(
    data: Path,
    out: Path = Path("evaluation"),
    model: str | None = None,
    gears: str | None = None,
    format: str | None = None,
    group_size: int | None = None,
    kernels: str = "auto",
    task: Literal["gsm8k", "math"] = "gsm8k",
    policy: list[Literal["static", "route", "kickdown", "lossless"]] = [],  # noqa: B006
    thresholds: str | None = None,
    num_problems: int = 50,
    num_shots: int = 0,
    max_tokens: int = 256,
) -> Found:
    """Final answers of static gears, route, kickdown and lossless: right or wrong, against the top gear's.

    The model writes greedily after each question. Differences from the top gear on the same problems come with
    standard errors and McNemar's exact test.

    Args:
        data: JSON Lines with question and answer (GSM8K), or problems of MATH: JSON Lines or a folder of JSON files.
        out: Directory for evaluation.json.
        model: A directory or a Hub repository; the model that ships if not given.
        policy: All of them if not given; static gears are always there.
        thresholds: For route and kickdown: a file from calibrate, or bits. The paper's if not given.
        num_problems: Problems to solve.
        num_shots: First problems of the file, to show as examples.
        max_tokens: Of an answer. Solutions of MATH are long: give 512 or more.
    """
    examples, problems = problems_of(data, task, num_shots, num_problems)
    loaded = Loaded.of(settings_of(Model(model, gears, format, group_size, None, kernels)))
    ladder, gearbox = loaded.decision.ladder, loaded.gearbox()
    route = made("route", {"thresholds": None if thresholds is None else read_thresholds(thresholds)})
    assert isinstance(route, Route)
    settled = replace(route, thresholds=route.bits(gearbox))
    modes = answers.modes_of(policy or WRITING, ladder, settled)
    prompts = prompts_of(max_tokens, task, loaded.tokenizer, loaded.config, examples, problems)
    attempts = {
        name: [
            answers.solve(gearbox, loaded.tokenizer, answers.TASKS[task], prompts, mode, number)
            for number in track(range(len(prompts)), name)
        ]
        for name, mode in modes.items()
    }
    reference = next(iter(attempts))
    rows = answers.grouped(problems, answers.score(attempts, reference))
    report: dict[str, Any] = {"model": model_name(model), "data": str(data), "reference": reference, "policies": rows}
    keep_report(out, report, {})
    tables = {"final_answers": markdown_table(answers.COLUMNS, rows), **answers.group_tables(rows)}
    return Found(tables, report)


def problems_of(data: Path, task: str, num_shots: int, num_problems: int) -> tuple[Problems, Problems]:
    """Examples and problems.

    Raises:
        GearbxError: as the task's reader, or nothing left but examples.
    """
    rows = answers.TASKS[task].read(data)
    examples, problems = rows[:num_shots], rows[num_shots:][:num_problems]
    if not problems:
        raise GearbxError(f"{data}: has {len(rows)} problems, all of them examples; give fewer --num-shots")
    return examples, problems


def prompts_of(
    max_tokens: int, task: str, tokenizer: Any, config: dict, examples: Problems, problems: Problems
) -> Sequence[answers.Prompt]:
    """The prompt of each problem; in the model's chat template, if it has one and there are no examples."""
    if tokenizer.has_chat_template and not examples:
        texts = [row["question"] + answers.TASKS[task].instruction for row in problems]
    else:
        texts = [answers.prompt_of(row, examples) for row in problems]
    prompts = encoded(texts, PromptSettings(max_tokens=max_tokens), tokenizer, config)
    return [(tokens, room, row["answer"]) for (tokens, room), row in zip(prompts, problems)]
