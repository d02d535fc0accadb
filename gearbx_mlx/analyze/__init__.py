"""Flags and settings of gearbx_mlx.analyze."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..cli.flags import LadderSettings, ModelSettings, OtherServerSettings, parse_kernels
from ..cli.parser import command_settings, parser_of
from ..cli.prompt import PromptSettings, check_untemplated
from ..cli.start import call, command
from ..decoding.modes import thresholds_flag
from ..errors import GearbxError
from ..routing.gates import AUTO, Thresholds
from ..settings import Settings, flag, flag_of, given_names


@dataclass(frozen=True)
class TelemetrySettings(Settings):
    """Choose the gear that a record names."""

    title: ClassVar[str] = "routing"

    thresholds: Thresholds = thresholds_flag()
    gear: str = flag(AUTO, "Initial gear: name or bits; auto: by the prompt", named=True)

    def given(self) -> dict[str, Any]:
        """Return the flags of modes, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class AnalysisSettings(Settings):
    """Which prompts, which gears, and where the report goes."""

    title: ClassVar[str] = "analysis"

    prompts: str | None = flag(
        None, "File with one prompt per line, or JSON Lines as in GSM8K", default_text="three bundled ones", named=True
    )
    num_prompts: int | None = flag(None, "Number of prompts to use, from the first", minimum=1)
    out: str = flag("analysis", "Directory for trace, summary and pictures", named=True)
    kernels: Any = flag("auto", "Kernels, as for generate", parse=parse_kernels)


@dataclass(frozen=True)
class AnalyzeSettings:
    """The settings; `mode` are those of mode telemetry-only that are flags."""

    model: ModelSettings
    prompt: PromptSettings
    mode: TelemetrySettings
    ladder: LadderSettings
    analysis: AnalysisSettings
    server: OtherServerSettings

    def __post_init__(self) -> None:
        """Raises GearbxError for flags that do not go together."""
        self.server.check_named()
        if self.server.server is None:
            return
        for name in given_names(self.model, ModelSettings()):
            raise GearbxError(f"{flag_of(name)} is for a model that is loaded here; leave it out with --server")
        if self.analysis.kernels != parse_kernels("auto"):
            raise GearbxError("--kernels is for a model that is loaded here; leave it out with --server")
        if self.prompt.max_tokens == -1:
            raise GearbxError("--max-tokens is -1, and the context of a server is not known; give 1 or more")
        if self.prompt.ignore_chat_template:
            check_untemplated(self.prompt)


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        AnalyzeSettings,
        "analyze",
        "Run prompts with telemetry only: every token is recorded, and no layer changes gear. With --server, the "
        "model is behind a server, whose log-probabilities give bounds of the entropies.",
    )


def analyze(prompts: str | Path, **keywords: Any) -> dict[str, Any]:
    """Return the summary of `python -m gearbx_mlx.analyze`, after writing its files into the directory `out`.

    Args:
        prompts: a file with one prompt per line, or JSON Lines as in GSM8K.
        keywords: named like the command's flags, with their defaults: model=..., gears="4,8,16".

    Returns:
        the content of summary.json.

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or prompts that cannot be analyzed.
    """
    return call("analyze", "summary_of_analysis", command_settings(AnalyzeSettings, {"prompts": prompts, **keywords}))


main = command("analyze")
