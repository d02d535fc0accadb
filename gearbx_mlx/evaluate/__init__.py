"""Flags and settings of gearbx_mlx.evaluate."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..cli.flags import SMALL_MODEL, ModelSettings, turns_of
from ..cli.gears import FloorSettings, GateSettings, GearFlags, LayoutSettings
from ..cli.prompt import AnswerLengthSettings
from ..cli.settings import Settings, command_settings, flag, parser_of
from ..cli.start import call, command
from ..errors import LARGEST_SHOWN, GearbxError, numbers
from ..gears.ladder import KV_BITS, kv_ladder

POLICIES = ("static", "random", "route", "kickdown", "inverted", "oracle", "lossless")
WRITING = ("static", "route", "kickdown", "lossless")  # the policies that can write a text of their own
TASKS = TEXT, *WRITTEN = "text", "gsm8k", "math"  # those in which the model writes answers
REFERENCE_DTYPES = ("float32", "float16")


def parse_shares(text: str) -> tuple[float, ...]:
    """--share as numbers, ascending. Raises GearbxError for anything but parts of 1."""
    shares = {*numbers("--share", text, float, "0.25,0.5")}
    if not all(0 < share < 1 for share in shares):
        raise GearbxError(f"--share '{text}': give parts of 1, more than 0 and less than 1")
    return tuple(sorted(shares))


@dataclass(frozen=True)
class ComparisonSettings(Settings):
    """The policies to compare along a text, and the shares of tokens in the higher of two gears."""

    title: ClassVar[str] = "evaluation"

    policy: Sequence[str] | None = flag(
        None,
        "Policies to compare; every report has static and random as well. Default: all",
        choices=POLICIES,
        nargs="+",
    )
    share: tuple[float, ...] = flag(
        (0.25, 0.5), "Shares of tokens in the higher gear. Default: 0.25,0.5", parse=parse_shares
    )
    between: str | None = flag(None, "The two gears. Default: the lowest and the top gear", metavar="LOW,HIGH")
    context: int | None = flag(
        None, "Tokens in a window. Default: 256, or the model's context if less", least=2, most=LARGEST_SHOWN
    )
    tokens: int = flag(2000, "Predictions in all.", least=1, most=LARGEST_SHOWN)
    prompt_tokens: int = flag(
        0, "The first tokens of a window that are its prompt: read, and not predicted. Default: 0", least=0
    )
    prompt_gear: str | None = flag(
        None, "The gear that reads prompts: name, bits, or same (the one that follows). Default: the top gear"
    )
    seed: int = flag(0, "Seed of the random gate and of the noise. Default: 0", least=0, most=2**63)
    kv_gears: tuple[int, ...] | None = flag(
        None,
        "Gears of the KV cache: each is compared too, under the top gear of the weights.",
        metavar="4,8,16",
        parse=kv_ladder,
    )
    reference_dtype: str = flag(
        "float32", "Type in which the top gear's log-probabilities are stored on disk.", choices=REFERENCE_DTYPES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_gears == KV_BITS[-1:]:
            raise GearbxError("--kv-gears is 16: keys and values as they are, which all rows have; add a lower gear")


@dataclass(frozen=True)
class TaskSettings(Settings):
    """The data, the task on it, and the models: one in gears, or two that take turns."""

    title: ClassVar[str] = "task"

    data: str = flag(
        help="A text, or JSON Lines with text, or question and answer (GSM8K), or problems of MATH.", named=True
    )
    out: str = flag("evaluation", "Directory for the report.", named=True)
    task: str = flag(
        TEXT, "gsm8k, math: the model writes greedily, and its final answer is right or wrong.", choices=TASKS
    )
    num_problems: int = flag(50, "Tasks gsm8k, math: problems to solve.", least=1)
    num_shots: int = flag(0, "Tasks gsm8k, math: first problems to show as examples. Default: 0", least=0)
    thresholds: str | None = flag(
        None,
        "For route and kickdown; with --small-model, for both tasks, a sweep: inf,1,0.5,0. Default: the papers'",
        metavar="FILE|BITS",
        named=True,
    )
    small_model: str | None = flag(None, SMALL_MODEL, named=True)
    answers_only: bool = flag(
        False,
        "With --small-model: count the answers alone, not the questions, which are given in use.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answers_only and self.small_model is None:
            raise GearbxError("--answers-only goes with --small-model; give both, or leave it out")


@dataclass(frozen=True)
class EvaluateSettings:
    model: ModelSettings
    prompt: AnswerLengthSettings
    layout: LayoutSettings
    gears: GearFlags
    floors: FloorSettings
    gate: GateSettings
    comparison: ComparisonSettings
    task: TaskSettings

    def __post_init__(self) -> None:
        if self.comparison.kv_gears and (self.task.small_model is not None or self.task.task in WRITTEN):
            raise GearbxError("--kv-gears are compared along a text by one model; leave out --small-model and --task")
        if self.task.small_model is not None:
            if self.comparison.policy or self.comparison.between:
                raise GearbxError("--policy and --between are for one model's gears; leave them out with --small-model")
            turns_of(self.task.thresholds, self.gate, several=True)
        elif self.task.task in WRITTEN:
            following = [policy for policy in self.comparison.policy or () if policy not in WRITING]
            if following:
                raise GearbxError(
                    f"--policy {following[0]}: needs a text to follow; task {self.task.task} has {', '.join(WRITING)}"
                )


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        EvaluateSettings,
        "evaluate",
        "Read a text under several policies, one token at a time on a KV cache, and compare each token's distribution "
        "with the top gear's. Give the same command again after an interrupt, and it continues.",
    )


def evaluate(data: str | Path, **keywords: Any) -> dict[str, Any]:
    """The report of `python -m gearbx_mlx.evaluate`, after writing its files into the directory `out`.

    Args:
        data: a text, or JSON Lines with text, or question and answer (GSM8K); of MATH also a folder.
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", policy=["kickdown"].

    Returns:
        the content of evaluation.json: a row for each policy in "policies".

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or data that cannot be evaluated.
    """
    return call("evaluate", "content_of", command_settings(EvaluateSettings, {"data": data, **keywords}))


main = command("evaluate")
