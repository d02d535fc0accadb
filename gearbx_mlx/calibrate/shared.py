"""What all ways to calibrate share: prompts as tokens, and what they hand back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..cli.loaded import Loaded, room_for
from ..cli.prompt import PromptSettings, encode_prompt, read_prompts
from ..cli.resolved import Resolved
from ..decoding.route import SHORT_PROMPTS
from ..errors import GearbxError
from ..evaluation.session import hash_of_tokens
from ..evaluation.text import check_windows, windows_of
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from ..routing.acceptance import DraftFile
from ..routing.gates import ScheduleFile, ThresholdFile
from ..telemetry.summary import as_json
from . import CalibrateSettings, CalibrationSettings, TargetSettings

Prompts = Sequence[tuple[list[int], int]]  # tokens, and how many may follow


@dataclass(frozen=True)
class Calibration:
    """What was found.

    file: to be written. line: the same in a few words. notes, table: for the user. about: further fields of the file,
    for the user alone.
    """

    file: ThresholdFile | DraftFile | ScheduleFile
    line: str
    notes: Sequence[str] = ()
    table: Table | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> str:
        return as_json(json.loads(self.file.text()) | self.about)


def prompts_of(settings: CalibrationSettings) -> list[str]:
    """The prompts of a file or, where none is named, the few that ship."""
    found = list(SHORT_PROMPTS) if settings.prompts is None else read_prompts(Path(settings.prompts))
    return found[: settings.num_prompts]


def encoded(
    texts: Iterable[str], settings: PromptSettings, tokenizer: Any, config: dict
) -> list[tuple[list[int], int]]:
    """The tokens of each prompt, and how many tokens may follow it."""
    tokens = [encode_prompt(settings, tokenizer, text) for text in texts]
    return [(prompt, room_for(config, len(prompt), settings.max_tokens)) for prompt in tokens]


def windows_for(
    settings: TargetSettings, loaded: Loaded, gearbox: Gearbox, documents: list[str] | None, prompt: int = 0
) -> tuple[list[list[int]], dict[str, Any]]:
    """The windows of a text, none without one, and what records of them depend on.

    Args:
        prompt: as of `windows_of`.

    Raises:
        GearbxError: a text without a whole window, or with tokens that the model does not have.
    """
    name, windows = str(settings.data), []
    if documents:
        windows = windows_of(loaded.tokenizer, documents, settings.context, settings.tokens, name, prompt)
    check_windows(windows, loaded.model, name)
    return windows, {"native": gearbox.kernels.native, "windows": hash_of_tokens(windows)}


def inputs_of(settings: CalibrateSettings, resolved: Resolved, prompts: Prompts) -> dict[str, Any]:
    """All that the records of prompts depend on."""
    return {
        "mode": settings.calibration.mode,
        **resolved.inputs(),
        "prompts": hash_of_tokens([tokens for tokens, _ in prompts]),
        "max_tokens": settings.prompt.max_tokens,
        "extra_eos_token": [*settings.model.extra_eos_token],
    }


def check_ladder(ladder: Ladder, missing: str) -> None:
    """Raises GearbxError for a single gear, which leaves `missing`."""
    if len(ladder) < 2:
        raise GearbxError(f"--gears {ladder}: one gear has {missing}; give two or more")


def bits_line(thresholds: Iterable[float]) -> str:
    """1.234, 2.345 bits"""
    return f"{', '.join(f'{threshold:.3f}' for threshold in thresholds)} bits"


def shares_note(ladder: Ladder, shares: Iterable[float], tokens: int) -> str:
    shown = ", ".join(f"{gear.name} {share:.0%}" for gear, share in zip(ladder, shares))
    return f"{tokens} tokens; with these thresholds the gate puts {shown} of them in each gear"
