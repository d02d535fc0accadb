"""calibrate --target-agreement, --target-kl, --target-bytes: the policy that meets a wish at the least cost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..cli import terminal
from ..cli.loaded import Loaded
from ..decoding.draft_trials import GearRecord, draft_files
from ..errors import GearbxError
from ..evaluation.metrics import entropy_of_logprobs, log_softmax
from ..evaluation.policies import SameToken, StaticPolicy
from ..evaluation.replay import Recording, Reference, ReplayStep, drafted, driven, sequences_of
from ..evaluation.session import Journal
from ..evaluation.target import KICKDOWN, LOSSLESS, STATIC, Candidate, PolicyOutcome, Wish, candidates, in_order
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from ..routing.acceptance import DraftFile
from ..routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, DEFAULT_WINDOW, ThresholdFile
from . import CalibrateSettings
from .shared import Calibration, Study, Windows, shown

CLEARLY = 1.02  # after a candidate that fell short, the next one reads at least this many times as much, or as little
DEFAULT_GEARS = "4,5,6,8,16"


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
    study = Study(settings, DEFAULT_GEARS)
    gearbox = study.gearbox
    with study.kept(place):
        windows: Windows = study.windows or [text[: settings.target.context] for text in study.written()]
        reference, recordings = study.recorded(windows)
        found = candidates(recordings, lambda ladder, gear: gearbox.costed_in(ladder).weight_bytes_per_token(gear))
        if gearbox.in_place:  # where every ladder has the whole codes
            found = [candidate for candidate in found if candidate.gears[-1] == gearbox.ladder.top.bits]
        by_bits = {gear.bits: recording for gear, recording in recordings.items()}
        journal = study.session.journal("verified", PolicyOutcome)
        try:
            chosen = Search(study, wish, windows, by_bits, reference, journal).first_that_meets(in_order(found, wish))
        except GearbxError as error:
            kept = "" if place is None else f"; with another wish, the same command goes on from {place}"
            raise GearbxError(f"{error}{kept}") from error
    about = {"wish": str(wish), "predicted": vars(chosen.candidate.predicted), "verified": vars(chosen.outcome)}
    return Calibration(
        chosen.file, str(chosen.candidate), notes_on(chosen, best_static(found, wish), wish), about=about
    )


@dataclass(frozen=True)
class Search:
    """The search for a candidate that meets the wish not in the prediction alone.

    recordings: bits to the gear alone along the windows. outcomes: of candidates in sequential runs.
    """

    study: Study
    wish: Wish
    windows: Windows
    recordings: Mapping[int, Recording]
    reference: Reference
    outcomes: Journal

    def first_that_meets(self, promising: Sequence[Candidate]) -> Chosen:
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
            chosen = self.verified(candidate)
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

    def verified(self, candidate: Candidate) -> Chosen:
        """A candidate with its outcome in a sequential run, in a gearbox of its own."""
        gearbox = self.gearbox_of(candidate)
        file = self.file_of(candidate, gearbox)

        def run() -> PolicyOutcome:
            steps = steps_of(gearbox, candidate, file, self.windows)
            return self.study.outcome(f"verify {candidate}", steps, self.reference, gearbox, gearbox.ladder)

        return Chosen(candidate, self.outcomes.made(f"{candidate} {candidate.thresholds}", run), file)

    def gearbox_of(self, candidate: Candidate) -> Gearbox:
        """The candidate's gears, on the model as it is loaded."""
        resolved, ladder = self.study.loaded.resolved, Ladder(candidate.gears)
        asked = replace(resolved.asked, gears=ladder)
        geared = Loaded.of(replace(resolved, ladder=ladder, asked=asked)).in_gears().gearbox
        assert isinstance(geared, Gearbox)
        return geared

    def file_of(self, candidate: Candidate, gearbox: Gearbox) -> DraftFile | ThresholdFile:
        """The file that generate --thresholds reads."""
        loaded, recorded = self.study.loaded, self.recordings[candidate.gears[0]]
        if candidate.mode == LOSSLESS:
            low, top = gearbox.ladder
            agreements = {low: [GearRecord(*sequence) for sequence in sequences_of(recorded)]}
            about = loaded.name, loaded.resolved.group_size, loaded.resolved.format.name
            (file,) = draft_files(gearbox, top, agreements, *about)
            return file
        return ThresholdFile(
            thresholds=list(candidate.thresholds),
            vocab_size=vocabulary(gearbox.model),
            model=loaded.name,
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
