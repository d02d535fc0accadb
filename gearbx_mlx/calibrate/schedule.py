"""calibrate --schedule-gears: how many tokens of a text each gear of a schedule computes, for a wish."""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.progress import Progress
from rich.table import Table

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.resolved import resolve_gears
from ..cli.settings import human_bytes
from ..errors import GearbxError, about
from ..evaluation.policies import scheduled_plan
from ..evaluation.replay import Reference, after_prompts, driven, positions_of, record
from ..evaluation.report import RecordingCosts
from ..evaluation.session import EvaluationSession
from ..evaluation.target import Candidate, PolicyOutcome, Wish, in_order, schedules
from ..evaluation.text import read_documents
from ..gears.gearbox import Gearbox
from ..gears.ladder import DENSE, Gear, Schedule
from ..routing.gates import ScheduleFile
from . import CalibrateSettings
from .shared import Calibration, Prompts, encoded, inputs_of, prompts_of, windows_for
from .target import record_gears, reference_of, shown, written


@dataclass(frozen=True)
class Texts:
    """What is read: prompts, in the top gear, and after each a window of tokens that a schedule computes."""

    prompts: Sequence[Sequence[int]]
    windows: Sequence[Sequence[int]]

    @classmethod
    def split(cls, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> "Texts":
        """Texts without a token to predict are left out. lengths: tokens of each prompt."""
        both = [(text[:length], text[length:]) for text, length in zip(texts, lengths) if len(text) > length + 1]
        if not both:
            raise GearbxError("no text goes on after its prompt; give longer texts, or more --max-tokens")
        return cls(*zip(*both))


def calibrate_schedule(
    settings: CalibrateSettings, bits: tuple[int, ...], wish: Wish, place: Path | None
) -> Calibration:
    """Record each gear along the texts, predict every schedule, and read the texts by the best one.

    Args:
        bits: of the gears, descending.
        place: the directory of the records, which serve any wish; None: they are not kept.
    """
    target, default = settings.target, ",".join(map(str, sorted({*bits, DENSE})))
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors, default=default)
    asked = prompts_of(settings.calibration)
    documents = read_documents(Path(target.data)) if target.data else None
    loaded = Loaded.of(resolved)
    loaded.check_gears()
    resolved = loaded.resolved
    with about(f"--schedule-gears {','.join(map(str, bits))}"):
        gears = resolved.ladder.descending(list(map(str, bits)))
    gearbox, tokenizer = loaded.gearbox(), loaded.tokenizer
    prompts: Prompts = [] if documents else encoded(asked, settings.prompt, tokenizer, loaded.config)
    whole, depends_on = windows_for(target, loaded, gearbox, documents, target.prompt)
    inputs = inputs_of(settings, resolved, prompts) | depends_on | {"prompt_tokens": target.prompt}
    with contextlib.ExitStack() as stack:
        folder = place or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(terminal.progress_bar())
        session = EvaluationSession(folder, inputs)
        if documents is None:  # a prompt's last token has a pass of its own, in the gear of the text
            wrote = written(prompts, gearbox, tokenizer, session, progress)
            texts = Texts.split(wrote, [len(tokens) - 1 for tokens, _ in prompts])
        else:
            texts = Texts.split(whole, [target.prompt] * len(whole))
        chosen, verified, static = found_on(texts, gearbox, gears, wish, session, progress)
    assert chosen.schedule is not None
    file = ScheduleFile(
        schedule=str(chosen.schedule),
        model=loaded.name,
        method=str(wish),
        gears=list(chosen.gears),
        tokens=len(positions_of(texts.windows)),
        longest=max(map(len, texts.windows)) - 1,
        fingerprint=gearbox.fingerprint,
    )
    outcomes = {"wish": str(wish), "predicted": vars(chosen.predicted), "verified": vars(verified)}
    notes = notes_on(chosen, verified, static, wish, file)
    return Calibration(file, str(chosen), notes, schedule_table(chosen, verified, static), outcomes)


def found_on(
    texts: Texts,
    gearbox: Gearbox,
    gears: Sequence[Gear],
    wish: Wish,
    session: EvaluationSession,
    progress: Progress,
) -> tuple[Candidate, PolicyOutcome, list[Candidate]]:
    """The schedule that is predicted to meet the wish best, its outcome in a real run, and the gears alone.

    Raises:
        GearbxError: no schedule is predicted to meet it.
    """
    positions = positions_of(texts.windows)
    begun = after_prompts(gearbox, texts.prompts, gearbox.ladder.top)
    reference = reference_of(gearbox, texts.windows, session, progress, begun)
    recordings = record_gears(gearbox, texts.windows, reference, session, progress, begun)

    def read(ladder: Any, gear: Gear) -> float:
        return gearbox.costed_in(ladder).weight_bytes_per_token(gear)

    found = schedules(recordings, gears, positions, read)
    chosen = in_order(found, wish)[0]
    assert chosen.schedule is not None
    journal = session.journal("verified", PolicyOutcome)
    schedule = chosen.schedule
    verified = journal.made(str(chosen), lambda: outcome_of(schedule, texts, gearbox, positions, reference, progress))
    alone = [each for each in found if each.schedule is not None and not each.schedule.tokens]
    return chosen, verified, alone


def outcome_of(
    schedule: Schedule,
    texts: Texts,
    gearbox: Gearbox,
    positions: np.ndarray,
    reference: Reference,
    progress: Progress,
) -> PolicyOutcome:
    """The outcome of a real run, one token at a time, on a KV cache that keeps what each gear wrote."""
    begun = after_prompts(gearbox, texts.prompts, gearbox.ladder.top)
    steps = driven(gearbox, texts.windows, scheduled_plan(schedule, positions), begun)
    recording = record(progress.track(steps, len(positions), description=f"--schedule {schedule}"), reference)
    used = sorted({*schedule.gears, gearbox.ladder.top}, key=lambda gear: gear.index)
    read = RecordingCosts(gearbox, used).weight_bytes(recording)
    return PolicyOutcome(float(recording.agree.mean()), float(recording.kl.mean()), read)


def notes_on(
    chosen: Candidate, verified: PolicyOutcome, static: Sequence[Candidate], wish: Wish, file: ScheduleFile
) -> list[str]:
    """What a real run says of the schedule, and which gear alone is at least as good."""
    notes = [f"in texts of {file.longest} tokens after the prompt: {shown(verified)}"]
    if not wish.met_by(verified):
        notes.append(f"predicted to meet {wish}, but a real run does not; allow more")
    better = [
        str(each.schedule)
        for each in static
        if each.predicted.weight_bytes <= verified.weight_bytes and each.predicted.kl_mean <= verified.kl_mean
    ]
    if file.schedule.isdecimal():
        notes.append(f"a static gear is better here than any schedule of these: use --gear {file.schedule}")
    elif better:
        notes.append(f"--gear {better[0]} alone reads no more and is as close to the top gear")
    return notes


def schedule_table(chosen: Candidate, verified: PolicyOutcome, static: Sequence[Candidate]) -> Table:
    """The gears alone, and the schedule as predicted and as it ran."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "read per token", "KL mean", "agreement"):
        table.add_column(name, justify="left" if not name else "right")
    rows = {f"static {each.schedule}": each.predicted for each in static}
    rows |= {f"{chosen.schedule}, predicted": chosen.predicted, f"{chosen.schedule}, real run": verified}
    for name, outcome in rows.items():
        read, kl = human_bytes(outcome.weight_bytes), f"{outcome.kl_mean:.3g}"
        table.add_row(name, read, kl, f"{outcome.agreement:.4f}")
    return table
