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
from ..errors import LARGEST_SHOWN, GearbxError
from ..routing.gates import AUTO, Thresholds
from ..settings import Settings, flag, flag_of, given_names

DEFAULT_TOKENS = 2000  # predictions of a comparison with the original


@dataclass(frozen=True)
class TelemetrySettings(Settings):
    """Thresholds and initial gear of the recorded gears."""

    title: ClassVar[str] = "routing"

    thresholds: Thresholds = thresholds_flag()
    gear: str = flag(AUTO, "Initial gear: name or bits; auto: by the prompt", named=True)

    def given(self) -> dict[str, Any]:
        """Return the flags of modes, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class AnalysisSettings(Settings):
    """Prompts and kernels of an analysis, and the directory of its report."""

    title: ClassVar[str] = "analysis"

    prompts: str | None = flag(
        None, "File with one prompt per line, or JSON Lines as in GSM8K", default_text="three bundled ones", named=True
    )
    num_prompts: int | None = flag(None, "Number of prompts to use, from the first", minimum=1)
    out: str = flag("analysis", "Directory for trace, summary and pictures", named=True)
    kernels: Any = flag("auto", "Kernels, as for generate", parse=parse_kernels)


@dataclass(frozen=True)
class ReferenceSettings(Settings):
    """The original of a quantized checkpoint, and the text on which their choices are compared."""

    title: ClassVar[str] = "original"

    reference: str | None = flag(
        None, "Original of a quantized checkpoint, to measure how often both choose the same token", named=True
    )
    data: str | None = flag(
        None,
        "Text for --reference, or JSON Lines as for evaluate",
        default_text="the bundled text",
        metavar="FILE",
        named=True,
    )
    tokens: int = flag(DEFAULT_TOKENS, "Number of predictions for --reference", minimum=1, maximum=LARGEST_SHOWN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is None and (self.data, self.tokens) != (None, DEFAULT_TOKENS):
            raise GearbxError("--data, --tokens: are for --reference, got none; set it, or omit them")


@dataclass(frozen=True)
class AnalyzeSettings:
    """Settings of analyze; `mode` has the flags of mode telemetry-only."""

    model: ModelSettings
    prompt: PromptSettings
    mode: TelemetrySettings
    ladder: LadderSettings
    analysis: AnalysisSettings
    reference: ReferenceSettings
    server: OtherServerSettings

    def __post_init__(self) -> None:
        """Validate that the flags go together. Raises GearbxError if they do not."""
        self.server.check_named()
        if self.server.server is None:
            return
        for name in given_names(self.model, ModelSettings()):
            raise GearbxError(f"{flag_of(name)}: is for a local model, got --server; omit one of them")
        if self.reference.reference is not None:
            raise GearbxError("--reference: is for a local model, got --server; omit one of them")
        if self.analysis.kernels != parse_kernels("auto"):
            raise GearbxError("--kernels: is for a local model, got --server; omit one of them")
        if self.prompt.max_tokens == -1:
            raise GearbxError("--max-tokens: must be 1 or more with --server, whose context is unknown, got -1; set it")
        if self.prompt.ignore_chat_template:
            check_untemplated(self.prompt)


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        AnalyzeSettings,
        "analyze",
        "Run prompts with telemetry only: every token is recorded, and no layer changes gear. With --server, a server "
        "runs the model, and its log-probabilities bound the entropies.",
    )


def analyze(prompts: str | Path, **keywords: Any) -> dict[str, Any]:
    """Return the summary of `python -m gearbx_mlx.analyze`, and write its files into the directory `out`.

    Args:
        prompts: a file with one prompt per line, or JSON Lines as in GSM8K.
        keywords: named like the command's flags, with their defaults: model=..., gears="4,8,16".

    Returns:
        the content of summary.json.

    Raises:
        GearbxError: an unknown keyword, or settings, a model or prompts that cannot be analyzed.
    """
    return call("analyze", "summary_of_analysis", command_settings(AnalyzeSettings, {"prompts": prompts, **keywords}))


main = command("analyze")
