"""Flags and settings of gearbx_mlx.evaluate."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..cli.flags import GearFlags, LayerSettings, ModelSettings
from ..cli.parser import command_settings, parser_of
from ..cli.start import call, command
from ..decoding.modes import KICKDOWN, ROUTE
from ..errors import LARGEST_SHOWN, GearbxError
from ..gears.ladder import KV_BITS, kv_ladder
from ..routing.gates import Thresholds, read_thresholds
from ..settings import Settings, flag

MIXING = ROUTE, KICKDOWN  # modes with tokens of several gears
NONE = "none"


@dataclass(frozen=True)
class EvaluationSettings(Settings):
    """Text of an evaluation, and the modes and KV cache gears that read it besides each gear."""

    title: ClassVar[str] = "evaluation"

    data: str | None = flag(
        None,
        "Text, or JSON Lines with text, or with question and answer (GSM8K)",
        default_text="the bundled text",
        metavar="FILE",
        named=True,
    )
    out: str = flag("evaluation", "Directory for the report", named=True)
    modes: Sequence[str] = flag(
        MIXING, "Modes to evaluate besides each single gear, or none", choices=(*MIXING, NONE), nargs="+"
    )
    thresholds: Thresholds = flag(
        None,
        "Entropy thresholds of these modes: bits such as 1.8,3.5, or a file from gearbx_mlx calibrate",
        default_text="the paper's",
        metavar="FILE|BITS",
        named=True,
        parse=read_thresholds,
    )
    context: int | None = flag(
        None,
        "Tokens in a window",
        default_text="256, or the model's context if shorter",
        minimum=2,
        maximum=LARGEST_SHOWN,
    )
    kld: bool = flag(
        False,
        "Compute the figures of llama.cpp's --kl-divergence, on the second half of windows of 512 tokens",
    )
    tokens: int = flag(2000, "Number of predictions", minimum=1, maximum=LARGEST_SHOWN)
    kv_gears: tuple[int, ...] | None = flag(
        None,
        "Gears of the KV cache to evaluate with the top gear of the weights",
        metavar="4,8,16",
        parse=kv_ladder,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_gears == KV_BITS[-1:]:
            raise GearbxError("--kv-gears: needs a gear below 16, got 16 as in all rows; set a lower one")


@dataclass(frozen=True)
class EvaluateSettings:
    model: ModelSettings
    layout: LayerSettings
    gears: GearFlags
    evaluation: EvaluationSettings


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(
        EvaluateSettings,
        "evaluate",
        "Read text in each gear and mode, and compare the distribution of each token with the top gear's.",
    )


def evaluate(data: str | Path, **keywords: Any) -> dict[str, Any]:
    """Return the report of `python -m gearbx_mlx.evaluate`, and write its files into the directory `out`.

    Args:
        data: a file with text, or JSON Lines with text, or question and answer (GSM8K).
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", modes=["kickdown"].

    Returns:
        the content of evaluation.json: a row for each gear and mode in "rows".

    Raises:
        GearbxError: an unknown keyword, or settings, a model or data that cannot be evaluated.
    """
    return call("evaluate", "report_of", command_settings(EvaluateSettings, {"data": data, **keywords}))


main = command("evaluate")
