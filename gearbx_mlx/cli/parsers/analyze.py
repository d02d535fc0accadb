"""Flags and settings of gearbx_mlx.analyze."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ..gate import GateSettings, RoutingSettings
from ..gears import LadderSettings
from ..model import ModelSettings
from ..prompt import PromptSettings
from ..remote import ServerSettings
from ..settings import Settings, command_settings, flag, parser_of


@dataclass(frozen=True)
class AnalysisSettings(Settings):
    """Which prompts, which gears, and where the report goes."""

    title: ClassVar[str] = "analysis"

    prompts: str = flag(help="One prompt per line, or JSON Lines as of GSM8K.", named=True)
    num_prompts: int | None = flag(None, "Use only this many prompts, the first ones.", least=1)
    out: str = flag("analysis", "Directory for trace, summary and pictures.", named=True)


@dataclass(frozen=True)
class AnalyzeSettings:
    model: ModelSettings
    prompt: PromptSettings
    gate: GateSettings
    routing: RoutingSettings
    ladder: LadderSettings
    analysis: AnalysisSettings
    server: ServerSettings

    def __post_init__(self) -> None:
        self.server.check(self.model, self.prompt)


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        AnalyzeSettings,
        "analyze",
        "Run prompts with telemetry only: every token is recorded, and no layer changes gear. With --server, the "
        "model is behind a server, whose log-probabilities give bounds of the entropies.",
    )


def parse() -> AnalyzeSettings:
    """Raises GearbxError for flags that no model can be analyzed with."""
    return command_settings(AnalyzeSettings, vars(setup_arg_parser().parse_args()))
