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

MIXING = ROUTE, KICKDOWN  # whose tokens are not all the top gear's
NONE = "none"


@dataclass(frozen=True)
class EvaluationSettings(Settings):
    """Name the text, and what reads it besides each gear."""

    title: ClassVar[str] = "evaluation"

    data: str | None = flag(
        None,
        "A text, or JSON Lines with text, or with question and answer, as in GSM8K. Default: the text that ships",
        metavar="FILE",
        named=True,
    )
    out: str = flag("evaluation", "Directory for the report.", named=True)
    modes: Sequence[str] = flag(
        MIXING, "Modes that read the text besides each gear alone, or none.", choices=(*MIXING, NONE), nargs="+"
    )
    thresholds: Thresholds = flag(
        None,
        "Of these modes: a file from gearbx_mlx calibrate, or bits such as 1.8,3.5. Default: the paper's",
        metavar="FILE|BITS",
        named=True,
        parse=read_thresholds,
    )
    context: int | None = flag(
        None, "Tokens in a window. Default: 256, or the model's context if less", minimum=2, maximum=LARGEST_SHOWN
    )
    kld: bool = flag(
        False,
        "As llama.cpp's --kl-divergence: windows of 512 tokens, of which the second half counts, and its figures.",
    )
    tokens: int = flag(2000, "Predictions in all.", minimum=1, maximum=LARGEST_SHOWN)
    kv_gears: tuple[int, ...] | None = flag(
        None,
        "Gears of the KV cache: the top gear of the weights reads the text over each of them, too.",
        metavar="4,8,16",
        parse=kv_ladder,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_gears == KV_BITS[-1:]:
            raise GearbxError("--kv-gears is 16: keys and values as they are, which all rows have; add a lower gear")


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
        "Read a text in each gear and mode, and compare the distribution of each token with the top gear's.",
    )


def evaluate(data: str | Path, **keywords: Any) -> dict[str, Any]:
    """Return the report of `python -m gearbx_mlx.evaluate`, after writing its files into the directory `out`.

    Args:
        data: a text, or JSON Lines with text, or question and answer (GSM8K).
        keywords: named like the command's flags, with their defaults: model=..., gears="4,16", modes=["kickdown"].

    Returns:
        the content of evaluation.json: a row for each gear and mode in "rows".

    Raises:
        GearbxError: a keyword that does not exist, or settings, a model or data that cannot be evaluated.
    """
    return call("evaluate", "report_of", command_settings(EvaluateSettings, {"data": data, **keywords}))


main = command("evaluate")
