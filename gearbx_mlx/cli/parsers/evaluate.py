"""Flags and settings of gearbx_mlx.evaluate."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import GearbxError
from ..floors import FloorSettings, add_floor_flags
from ..gate import GateSettings, add_gate_flags
from ..gears import GearFlags, LayoutSettings, add_gear_flags
from ..model import ModelSettings, add_model_flags
from ..pair import add_sweep_flags, turns_of
from ..prompt import PromptSettings, add_prompt_flags
from ..settings import LARGEST_SHOWN, Settings, command_settings, name, new_parser, number, one_of

POLICIES = ("static", "random", "route", "kickdown", "inverted", "position", "oracle", "lossless", "lossless-fixed")
WRITING = ("static", "route", "kickdown", "lossless")  # the policies that can write a text of their own
TASKS = TEXT, GSM8K = "text", "gsm8k"
REFERENCE_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class AnswerSettings(PromptSettings):
    """How a problem becomes tokens, and how long its answer may be."""

    max_tokens: int = 256


@dataclass(frozen=True)
class ComparisonSettings(Settings):
    """The policies to compare along a text, and the shares of tokens in the higher of two gears."""

    policy: Sequence[str] | None = None
    share: str = "0.25,0.5"
    between: str | None = None
    context: int | None = number(None, 2, LARGEST_SHOWN)
    tokens: int = number(2000, 1, LARGEST_SHOWN)
    seed: int = number(0, 0, 2**63)
    reference_dtype: str = one_of("float32", *REFERENCE_DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [policy for policy in self.policy or () if policy not in POLICIES]
        if unknown:
            raise GearbxError(f"--policy is {unknown[0]}; choose from {', '.join(POLICIES)}")
        self.shares()

    def shares(self) -> list[float]:
        """--share as numbers, ascending. Raises GearbxError for anything but parts of 1."""
        try:
            shares = sorted({float(part) for part in self.share.split(",")})
        except ValueError as error:
            raise GearbxError(
                f"--share '{self.share}' are not numbers with commas between, such as 0.25,0.5"
            ) from error
        if not all(0 < share < 1 for share in shares):
            raise GearbxError(f"--share '{self.share}': give parts of 1, more than 0 and less than 1")
        return shares


@dataclass(frozen=True)
class TaskSettings(Settings):
    """The data, the task on it, and the models: one in gears, or two that take turns."""

    data: str = name("")
    out: str = name("evaluation")
    task: str = one_of(TEXT, *TASKS)
    num_problems: int = number(50, 1)
    num_shots: int = number(0, 0)
    thresholds: str | None = name()
    small_model: str | None = name()
    answers_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answers_only and self.small_model is None:
            raise GearbxError("--answers-only goes with --small-model; give both, or leave it out")


@dataclass(frozen=True)
class EvaluateSettings:
    model: ModelSettings
    prompt: AnswerSettings
    layout: LayoutSettings
    gears: GearFlags
    floors: FloorSettings
    gate: GateSettings
    comparison: ComparisonSettings
    task: TaskSettings

    def __post_init__(self) -> None:
        if self.task.small_model is not None:
            if self.comparison.policy or self.comparison.between:
                raise GearbxError("--policy and --between are of one model in gears; leave them out with --small-model")
            turns_of(self.task.thresholds, self.gate, several=True)
        elif self.task.task == GSM8K:
            following = [policy for policy in self.comparison.policy or () if policy not in WRITING]
            if following:
                raise GearbxError(
                    f"--policy {following[0]}: needs a text to follow; task gsm8k has {', '.join(WRITING)}"
                )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "evaluate",
        "Read a text under several policies, one token at a time on a KV cache, and compare each token's distribution "
        "with the top gear's. Give the same command again after an interrupt, and it continues.",
    )
    add_model_flags(parser)
    add_gear_flags(parser)
    add_floor_flags(parser)
    add_gate_flags(parser)
    add_sweep_flags(parser)
    add_comparison_flags(parser)
    add_prompt_flags(parser)
    add_task_flags(parser)
    return parser


def add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument("--data", required=True, help="A text, or JSON Lines with text, or question and answer (GSM8K).")
    group.add_argument("--out", help="Directory for the report. Default: evaluation")
    group.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
        help="Policies to compare; every report has static and random as well. Default: all",
    )
    group.add_argument("--share", help="Shares of tokens in the higher gear. Default: 0.25,0.5")
    group.add_argument("--between", metavar="LOW,HIGH", help="The two gears. Default: the lowest and the top gear")
    group.add_argument("--context", type=int, help="Tokens in a window. Default: 256, or the model's context if less")
    group.add_argument("--tokens", type=int, help="Predictions in all. Default: 2000")
    group.add_argument("--seed", type=int, help="Seed of the random gate and of the noise. Default: 0")
    group.add_argument(
        "--reference-dtype",
        choices=REFERENCE_DTYPES,
        help="Type in which the top gear's log-probabilities are stored on disk. Default: float32",
    )


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("task gsm8k: the model writes greedily, and its final number is right or wrong")
    group.add_argument("--task", choices=TASKS, help="Default: text")
    group.add_argument("--num-problems", type=int, help="Problems to solve. Default: 50")
    group.add_argument("--num-shots", type=int, help="First problems of the file to show as examples. Default: 0")
    group.add_argument(
        "--thresholds",
        metavar="FILE|BITS",
        help="For route and kickdown; with --small-model, for both tasks, a sweep: inf,1,0.5,0. Default: the papers'",
    )


def parse() -> EvaluateSettings:
    """Raises GearbxError for flags that no model can be evaluated with."""
    return command_settings(EvaluateSettings, vars(setup_arg_parser().parse_args()))
