"""Flags and settings of gearbx_mlx.analyze."""

import argparse
from dataclasses import dataclass

from ...gears.ladder import Ladder
from ..gate import GateSettings, RoutingSettings, add_routing_flags
from ..gears import add_ladder_flags
from ..model import ModelSettings, add_model_flags
from ..prompt import PromptSettings, add_prompt_flags
from ..settings import Settings, command_settings, name, new_parser, number


@dataclass(frozen=True)
class AnalysisSettings(Settings):
    """Which prompts, which gears, and where the report goes."""

    prompts: str = name("")
    num_prompts: int | None = number(None, 1)
    out: str = name("analysis")
    gears: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gears is not None:
            Ladder.parse(self.gears)


@dataclass(frozen=True)
class AnalyzeSettings:
    model: ModelSettings
    prompt: PromptSettings
    gate: GateSettings
    routing: RoutingSettings
    analysis: AnalysisSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "analyze", "Run prompts with telemetry only: every token is recorded, and no layer changes gear."
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    group = parser.add_argument_group("analysis")
    group.add_argument("--prompts", required=True, help="One prompt per line, or JSON Lines as of GSM8K.")
    group.add_argument("--num-prompts", type=int, help="Use only this many prompts, the first ones.")
    group.add_argument("--out", help="Directory for trace, summary and pictures. Default: analysis")
    add_ladder_flags(parser)
    add_routing_flags(parser)
    return parser


def parse() -> AnalyzeSettings:
    """Raises GearbxError for flags that no model can be analyzed with."""
    return command_settings(AnalyzeSettings, vars(setup_arg_parser().parse_args()))
