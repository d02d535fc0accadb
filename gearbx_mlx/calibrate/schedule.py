"""calibrate --schedule-gears: how many tokens of a text each gear of a schedule computes, for a wish."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from ..cli.settings import human_bytes
from ..cli.tables import columns
from ..errors import GearbxError, about
from ..evaluation.policies import scheduled_plan
from ..evaluation.replay import after_prompts, driven, positions_of
from ..evaluation.target import Candidate, PolicyOutcome, Wish, in_order, schedules
from ..gears.ladder import DENSE, Gear, Ladder
from ..routing.gates import ScheduleFile
from . import CalibrateSettings
from .shared import Calibration, Study, shown


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
    prompt = settings.target.prompt
    study = Study(settings, ",".join(map(str, sorted({*bits, DENSE}))), prompt)
    with about(f"--schedule-gears {','.join(map(str, bits))}"):
        gears = study.gearbox.ladder.descending(list(map(str, bits)))
    with study.kept(place):
        if study.prompts:  # a prompt's last token has a pass of its own, in the gear of the text
            texts = Texts.split(study.written(), [len(tokens) - 1 for tokens, _ in study.prompts])
        else:
            texts = Texts.split(study.windows, [prompt] * len(study.windows))
        chosen, verified, static = found_on(study, texts, gears, wish)
    assert chosen.schedule is not None
    file = ScheduleFile(
        schedule=str(chosen.schedule),
        model=study.loaded.name,
        method=str(wish),
        gears=list(chosen.gears),
        tokens=len(positions_of(texts.windows)),
        longest=max(map(len, texts.windows)) - 1,
        fingerprint=study.gearbox.fingerprint,
    )
    outcomes = {"wish": str(wish), "predicted": vars(chosen.predicted), "verified": vars(verified)}
    notes = notes_on(verified, static, wish, file)
    return Calibration(file, str(chosen), notes, schedule_table(chosen, verified, static), outcomes)


def found_on(
    study: Study, texts: Texts, gears: Sequence[Gear], wish: Wish
) -> tuple[Candidate, PolicyOutcome, list[Candidate]]:
    """The schedule that is predicted to meet the wish best, its outcome in a real run, and the gears alone.

    The real run is one token at a time, on a KV cache that keeps what each gear wrote.

    Raises:
        GearbxError: no schedule is predicted to meet it.
    """
    positions, gearbox = positions_of(texts.windows), study.gearbox
    begun = after_prompts(gearbox, texts.prompts, gearbox.ladder.top)
    reference, recordings = study.recorded(texts.windows, begun)

    def read(ladder: Ladder, gear: Gear) -> float:
        return gearbox.costed_in(ladder).weight_bytes_per_token(gear)

    found = schedules(recordings, gears, positions, read)
    chosen = in_order(found, wish)[0]
    schedule = chosen.schedule
    assert schedule is not None

    def run() -> PolicyOutcome:
        steps = driven(gearbox, texts.windows, scheduled_plan(schedule, positions), begun)
        used = sorted({*schedule.gears, gearbox.ladder.top}, key=lambda gear: gear.index)
        return study.outcome(f"--schedule {schedule}", steps, reference, gearbox, used)

    verified = study.session.journal("verified", PolicyOutcome).made(str(chosen), run)
    alone = [each for each in found if each.schedule is not None and not each.schedule.tokens]
    return chosen, verified, alone


def notes_on(verified: PolicyOutcome, static: Sequence[Candidate], wish: Wish, file: ScheduleFile) -> list[str]:
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
    rows = {f"static {each.schedule}": each.predicted for each in static}
    rows |= {f"{chosen.schedule}, predicted": chosen.predicted, f"{chosen.schedule}, real run": verified}
    return columns(
        ("", "read per token", "KL mean", "agreement"),
        (
            (name, human_bytes(found.weight_bytes), f"{found.kl_mean:.3g}", f"{found.agreement:.4f}")
            for name, found in rows.items()
        ),
    )
