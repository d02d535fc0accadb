"""calibrate --target-agreement, --target-kl, --target-bytes: the policy that meets a wish at the least cost."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.resolved import Resolved, resolve_gears
from ..cli.settings import human_bytes
from ..decoding.draft_trials import GearRecord, draft_files
from ..decoding.stream import stream_generate
from ..errors import GearbxError
from ..evaluation.metrics import entropy_of_logprobs, log_softmax
from ..evaluation.policies import SameToken, StaticPolicy
from ..evaluation.replay import (
    Begun,
    Recording,
    Reference,
    ReplayStep,
    drafted,
    driven,
    read_at_once,
    record,
    sequences_of,
    targets_of,
)
from ..evaluation.report import RecordingCosts
from ..evaluation.session import EvaluationSession, Journal
from ..evaluation.target import KICKDOWN, LOSSLESS, STATIC, Candidate, PolicyOutcome, Wish, candidates, in_order
from ..evaluation.text import read_documents
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..loading import model_name
from ..routing.acceptance import DraftFile
from ..routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, DEFAULT_WINDOW, ThresholdFile
from . import CalibrateSettings
from .shared import Calibration, Prompts, encoded, inputs_of, prompts_of, windows_for

CLEARLY = 1.02  # after a candidate that fell short, the next one reads at least this many times as much, or as little
DEFAULT_GEARS = "4,5,6,8,16"

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Chosen:
    """A candidate that meets the wish in a sequential run, its outcome there, and its file."""

    candidate: Candidate
    outcome: PolicyOutcome
    file: DraftFile | ThresholdFile


def calibrate_target(settings: CalibrateSettings, wish: Wish, place: Path | None) -> Calibration:
    """Record each gear, predict every candidate's outcome, and verify the best ones until one meets the wish.

    Args:
        place: the directory of the records, which serve any wish; None: they are not kept.
    """
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors, default=DEFAULT_GEARS)
    asked = prompts_of(settings.calibration)
    documents = read_documents(Path(settings.target.data)) if settings.target.data else None
    loaded = Loaded.of(resolved)
    resolved = loaded.resolved
    gearbox, tokenizer = loaded.gearbox(), loaded.tokenizer
    prompts = [] if documents else encoded(asked, settings.prompt, tokenizer, loaded.config)
    target = settings.target
    windows, depends_on = windows_for(target, loaded, gearbox, documents)
    inputs = inputs_of(settings, resolved, prompts) | depends_on | {"context": target.context}
    with contextlib.ExitStack() as stack:
        folder = place or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(terminal.progress_bar())
        session = EvaluationSession(folder, inputs)
        if documents is None:
            texts = written(prompts, gearbox, tokenizer, session, progress)
            windows = [text[: target.context] for text in texts]
        reference = reference_of(gearbox, windows, session, progress)
        recordings = record_gears(gearbox, windows, reference, session, progress)
        found = candidates(recordings, lambda ladder, gear: gearbox.costed_in(ladder).weight_bytes_per_token(gear))
        if gearbox.in_place:  # where every ladder has the whole codes
            found = [candidate for candidate in found if candidate.gears[-1] == gearbox.ladder.top.bits]
        by_bits = {gear.bits: recording for gear, recording in recordings.items()}
        search = Search(resolved, wish, windows, by_bits, reference, session.journal("verified", PolicyOutcome))
        try:
            chosen = search.first_that_meets(in_order(found, wish), progress)
        except GearbxError as error:
            kept = "" if place is None else f"; with another wish, the same command goes on from {place}"
            raise GearbxError(f"{error}{kept}") from error
    about = {"wish": str(wish), "predicted": vars(chosen.candidate.predicted), "verified": vars(chosen.outcome)}
    return Calibration(
        chosen.file, str(chosen.candidate), notes_on(chosen, best_static(found, wish), wish), about=about
    )


def written(
    prompts: Prompts, gearbox: Gearbox, tokenizer: Any, session: EvaluationSession, progress: Progress
) -> list[list[int]]:
    """The prompts, each with the text that the top gear writes after it greedily; tokens."""

    def write(number: int) -> list[int]:
        tokens, length = prompts[number]
        responses = stream_generate(gearbox.model, tokenizer, tokens, length, mode="static", gearbox=gearbox)
        return [*tokens, *(response.token for response in responses)]

    return session.rows("text", write, list[int], progress.track(range(len(prompts)), description="text"))


def reference_of(
    gearbox: Gearbox, windows: Windows, session: EvaluationSession, progress: Progress, begun: Begun | None = None
) -> Reference:
    """The top gear's log-probabilities. begun: the KV cache of what stands before a window."""
    targets = targets_of(windows)

    def write(place: Path) -> None:
        steps = read_at_once(gearbox, windows, gearbox.ladder.top, begun)
        tracked = progress.track(steps, len(targets), description="the top gear")
        Reference.write(place, tracked, len(targets), "float32")

    return Reference(session.file("reference.npy", write), targets)


def record_gears(
    gearbox: Gearbox,
    windows: Windows,
    reference: Reference,
    session: EvaluationSession,
    progress: Progress,
    begun: Begun | None = None,
) -> dict[Gear, Recording]:
    """Each gear alone along the windows. begun: as in `reference_of`."""
    tokens = len(reference.nll)

    def make(gear: Gear) -> Recording:
        steps = read_at_once(gearbox, windows, gear, begun)
        return record(progress.track(steps, tokens, description=f"{gear.bits} bits"), reference)

    load = partial(Recording.load, tokens=tokens, gears=len(gearbox.ladder))
    return {gear: session.recording(f"static-{gear.bits}", partial(make, gear), load) for gear in gearbox.ladder}


@dataclass(frozen=True)
class Search:
    """The search for a candidate that meets the wish not in the prediction alone.

    recordings: bits to the gear alone along the windows. outcomes: of candidates in sequential runs.
    """

    resolved: Resolved
    wish: Wish
    windows: Windows
    recordings: Mapping[int, Recording]
    reference: Reference
    outcomes: Journal

    def first_that_meets(self, promising: Sequence[Candidate], progress: Progress) -> Chosen:
        """The best candidate that meets the wish in a sequential run too.

        Args:
            promising: candidates that are predicted to meet it, the best first.

        Raises:
            GearbxError: none does.
        """
        least, most = 0.0, math.inf
        for candidate in promising:
            if candidate.mode != STATIC and not least <= candidate.predicted.weight_bytes <= most:
                continue  # too near to the one that fell short; of a static gear the prediction is exact
            chosen = self.verified(candidate, progress)
            if self.wish.met_by(chosen.outcome):
                return chosen
            terminal.note(
                f"{candidate}: predicted to meet {self.wish}, but does not in a sequential run "
                f"({shown(chosen.outcome)})"
            )
            if self.wish.weight_bytes is None:
                least = candidate.predicted.weight_bytes * CLEARLY
            else:
                most = candidate.predicted.weight_bytes / CLEARLY
        raise GearbxError(f"nothing that was predicted to meet {self.wish} does so in a sequential run; allow more")

    def verified(self, candidate: Candidate, progress: Progress) -> Chosen:
        """A candidate with its outcome in a sequential run, in a gearbox of its own."""
        gearbox = self.gearbox_of(candidate)
        file = self.file_of(candidate, gearbox)
        part = f"{candidate} {candidate.thresholds}"
        outcome = self.outcomes.made(part, partial(self.outcome_of, candidate, gearbox, file, progress))
        return Chosen(candidate, outcome, file)

    def outcome_of(
        self, candidate: Candidate, gearbox: Gearbox, file: DraftFile | ThresholdFile, progress: Progress
    ) -> PolicyOutcome:
        """The outcome of a sequential run."""
        steps = steps_of(gearbox, candidate, file, self.windows)
        tracked = progress.track(steps, len(self.reference.nll), description=f"verify {candidate}")
        recording = record(tracked, self.reference)
        read = RecordingCosts(gearbox, gearbox.ladder).weight_bytes(recording)
        return PolicyOutcome(float(recording.agree.mean()), float(recording.kl.mean()), read)

    def gearbox_of(self, candidate: Candidate) -> Gearbox:
        """The candidate's gears, on the model as it is loaded."""
        ladder = Ladder(candidate.gears)
        asked = replace(self.resolved.asked, gears=ladder)
        geared = Loaded.of(replace(self.resolved, ladder=ladder, asked=asked)).in_gears().gearbox
        assert isinstance(geared, Gearbox)
        return geared

    def file_of(self, candidate: Candidate, gearbox: Gearbox) -> DraftFile | ThresholdFile:
        """The file that generate --thresholds reads."""
        name, recorded = model_name(self.resolved.model.model), self.recordings[candidate.gears[0]]
        if candidate.mode == LOSSLESS:
            low, top = gearbox.ladder
            agreements = {low: [GearRecord(*sequence) for sequence in sequences_of(recorded)]}
            (file,) = draft_files(gearbox, top, agreements, name, self.resolved.group_size, self.resolved.format)
            return file
        return ThresholdFile(
            thresholds=list(candidate.thresholds),
            vocab_size=vocabulary(gearbox.model),
            model=name,
            method=str(self.wish),
            gears=list(candidate.gears),
            tokens=len(recorded.nll),
            window=DEFAULT_WINDOW,
            hysteresis=DEFAULT_HYSTERESIS,
            min_gear_duration=DEFAULT_MIN_GEAR_DURATION,
            mode=candidate.mode,
            fingerprint=gearbox.fingerprint,
        )


def steps_of(
    gearbox: Gearbox, candidate: Candidate, file: DraftFile | ThresholdFile, windows: Windows
) -> Iterator[ReplayStep]:
    """A candidate, one token at a time, on a KV cache that keeps the low gear's entries."""
    low, high = gearbox.ladder[0], gearbox.ladder.top
    if isinstance(file, DraftFile):
        return drafted(gearbox, windows, low, high, file.rule())
    if candidate.mode == KICKDOWN:
        threshold = candidate.thresholds[0]
        policy = SameToken(low, high, lambda place, q: float(entropy_of_logprobs(log_softmax(q))), threshold)
        return driven(gearbox, windows, policy)
    return driven(gearbox, windows, StaticPolicy(low))


def best_static(found: Sequence[Candidate], wish: Wish) -> Candidate | None:
    """The best static gear that meets the wish, if one does."""
    static = [c for c in found if c.mode == STATIC and wish.met_by(c.predicted)]
    return min(static, key=lambda c: wish.rank(c.predicted), default=None)


def notes_on(chosen: Chosen, static: Candidate | None, wish: Wish) -> list[str]:
    """What was chosen, and what a static gear would be."""
    candidate = chosen.candidate
    note = f"{candidate} meets {wish} with {shown(chosen.outcome)} (predicted: {shown(candidate.predicted)})"
    if candidate.mode == STATIC:
        return [note, "a static gear is better here than any way of shifting: use it alone"]
    if static is None:
        return [note, "no static gear of this ladder meets it"]
    return [note, f"the best static gear that meets it is {static}, with {shown(static.predicted)}"]


def shown(outcome: PolicyOutcome) -> str:
    return (
        f"agreement {outcome.agreement:.4f}, mean KL {outcome.kl_mean:.3g}, "
        f"{human_bytes(outcome.weight_bytes)} of weights per token"
    )
