"""What all ways to calibrate share: prompts as tokens, what gears say along texts, and what is handed back."""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.prompt import encoded, read_prompts
from ..cli.resolved import Resolved, resolve_gears
from ..cli.settings import human_bytes
from ..decoding.route import SHORT_PROMPTS
from ..decoding.stream import stream_generate
from ..errors import GearbxError
from ..evaluation.replay import Begun, Recording, Reference, ReplayStep, read_at_once, record, targets_of
from ..evaluation.report import read_per_token
from ..evaluation.session import EvaluationSession, hash_of_tokens
from ..evaluation.target import PolicyOutcome
from ..evaluation.text import check_windows, read_documents, windows_of
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..routing.acceptance import DraftFile
from ..routing.gates import ScheduleFile, ThresholdFile
from ..telemetry.summary import as_json
from . import CalibrateSettings, CalibrationSettings

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


Windows = Sequence[Sequence[int]]


class Study:
    """A model and its texts, along which a policy or a schedule is looked for.

    Args:
        default: the ladder where nothing says which.
        prompt: how many first tokens of a window of --data are its prompt.

    Attributes:
        prompts: none where there is a text. windows: of that text.
        session, progress: while `kept` lasts.

    Raises:
        GearbxError: a model without gears, a text without a whole window, or with tokens that the model does not have.
    """

    session: EvaluationSession
    progress: Progress

    def __init__(self, settings: CalibrateSettings, default: str, prompt: int = 0):
        target = settings.target
        resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors, default=default)
        asked = prompts_of(settings.calibration)
        documents = read_documents(Path(target.data)) if target.data else None
        self.loaded = Loaded.of(resolved)
        self.gearbox, tokenizer = self.loaded.gearbox(), self.loaded.tokenizer
        self.prompts = [] if documents else encoded(asked, settings.prompt, tokenizer, self.loaded.config)
        self.windows: list[list[int]] = []
        if documents:
            self.windows = windows_of(tokenizer, documents, target.context, target.tokens, str(target.data), prompt)
            check_windows(self.windows, self.loaded.model, str(target.data))
        self._inputs = inputs_of(settings, self.loaded.resolved, self.prompts) | {
            "native": self.gearbox.kernels.native,
            "windows": hash_of_tokens(self.windows),
            "context": target.context,
            "prompt_tokens": prompt,
        }

    @contextlib.contextmanager
    def kept(self, place: Path | None) -> Iterator[None]:
        """While the context lasts, records go into a directory, where they serve any wish; None: into one that goes."""
        with contextlib.ExitStack() as stack:
            folder = place or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.progress = stack.enter_context(terminal.progress_bar())
            self.session = EvaluationSession(folder, self._inputs)
            yield

    def written(self) -> list[list[int]]:
        """The prompts, each with the text that the top gear writes after it greedily; tokens."""
        model, tokenizer = self.gearbox.model, self.loaded.tokenizer

        def write(number: int) -> list[int]:
            tokens, length = self.prompts[number]
            responses = stream_generate(model, tokenizer, tokens, length, mode="static", gearbox=self.gearbox)
            return [*tokens, *(response.token for response in responses)]

        numbers = self.progress.track(range(len(self.prompts)), description="text")
        return self.session.rows("text", write, list[int], numbers)

    def recorded(self, windows: Windows, begun: Begun | None = None) -> tuple[Reference, dict[Gear, Recording]]:
        """The top gear's log-probabilities along windows, and each gear alone. begun: the caches before each window."""
        targets, ladder = targets_of(windows), self.gearbox.ladder

        def read(gear: Gear, name: str) -> Iterable[ReplayStep]:
            steps = read_at_once(self.gearbox, windows, gear, begun)
            return self.progress.track(steps, len(targets), description=name)

        def write(place: Path) -> None:
            Reference.write(place, read(ladder.top, "the top gear"), len(targets), "float32")

        def make(gear: Gear) -> Recording:
            return record(read(gear, f"{gear.bits} bits"), reference)

        reference = Reference(self.session.file("reference.npy", write), targets)
        load = partial(Recording.load, tokens=len(targets), gears=len(ladder))
        return reference, {
            gear: self.session.recording(f"static-{gear.bits}", partial(make, gear), load) for gear in ladder
        }

    def outcome(
        self, name: str, steps: Iterable[ReplayStep], reference: Reference, gearbox: Gearbox, used: Sequence[Gear]
    ) -> PolicyOutcome:
        """The outcome of a sequential run. used: the gears of its passes."""
        tracked = self.progress.track(steps, len(reference.nll), description=name)
        recording = record(tracked, reference)
        read, _ = read_per_token(gearbox, used, recording)
        return PolicyOutcome(float(recording.agree.mean()), float(recording.kl.mean()), read)


def shown(outcome: PolicyOutcome) -> str:
    return (
        f"agreement {outcome.agreement:.4f}, mean KL {outcome.kl_mean:.3g}, "
        f"{human_bytes(outcome.weight_bytes)} of weights per token"
    )
