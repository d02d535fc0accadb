"""The recordings of one report, made in turn, each kept as soon as it is complete."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..gears.activations import dtype_name
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear, Ladder
from ..routing.acceptance import FixedLength, ProductRule, best_length
from .drafting import best_rule, drafted, sequences_of
from .metrics import by_bucket, quality
from .noise import noisy
from .plans import Entry, Setting, make_policy
from .policies import Static
from .replay import Recording, Reference, Step, driven, record, targets_of
from .report import SCHEMA, VERSION, compare_with_chance, compare_with_static, row_of, tokens_of
from .session import Session

NOISE = "noise"


class Runs:
    """Reference, noise floor, and one recording for each row.

    Args:
        session: where they are kept.
        windows: of tokens.
        between: the two gears that policies shift between.
        gate: window, hysteresis and min_gear_duration of routing.
        seed: of the random gate and the noise.
        dtype: in which the reference is kept.
    """

    def __init__(
        self,
        session: Session,
        gearbox: Gearbox,
        windows: Sequence[Sequence[int]],
        between: tuple[Gear, Gear],
        gate: dict[str, Any],
        seed: int,
        dtype: str,
    ):
        self.session, self.gearbox, self.windows, self.between = session, gearbox, windows, between
        self.gate, self.seed, self.dtype = gate, seed, dtype
        self.targets = targets_of(windows)
        self.track: Callable[[Iterable[Step], int, str], Iterable[Step]] = lambda steps, total, name: steps
        self.recordings: dict[Entry, Recording] = {}
        self.thresholds: dict[Entry, float | None] = {}
        self.noise: Recording | None = None

    def compute(self, entries: Sequence[Entry]) -> None:
        """Make what is not there yet. `recordings` holds what is complete, after an interrupt as well."""
        self.reference = Reference(self.session.file("reference.npy", self._write_reference), self.targets)
        # Static gears first: from the low one come all thresholds.
        for entry in sorted(entries, key=lambda entry: entry.policy != "static"):
            steps, self.thresholds[entry] = self._steps(entry)
            self.recordings[entry] = self._recording(entry.name, steps)
        with noisy(self.gearbox, self.seed):
            self.noise = self._recording(NOISE, self._static(self.gearbox.ladder.top))

    def _steps(self, entry: Entry) -> tuple[Iterator[Step], float | None]:
        """The predictions of a row, and the threshold of its policy."""
        low, high = self.between
        if entry.policy == "static":
            return self._static(self.gearbox.ladder.find(entry.bits or low)), None
        recorded = self.recordings[Entry("static", bits=low.bits)]
        if entry.policy.startswith("lossless"):
            return self._drafts(entry.policy, recorded)
        setting = Setting(self.gearbox, self.windows, low, high, self.reference, recorded, self.gate, self.seed)
        policy, threshold = make_policy(entry, setting)
        return driven(self.gearbox, self.windows, policy), threshold

    def _drafts(self, policy: str, recorded: Recording) -> tuple[Iterator[Step], float]:
        """Lossless by the best rule, or by the best fixed length, and the bound or the length."""
        low, top = self.between[0], self.gearbox.ladder.top
        pair = Ladder([low.bits, top.bits])
        costs = [self.gearbox.costed_in(pair).weight_bytes_per_token(gear) for gear in pair]
        if policy == "lossless":
            curve, bound, _ = best_rule(recorded, *costs)
            return drafted(self.gearbox, self.windows, low, top, ProductRule(curve, bound)), bound
        length, _ = best_length(sequences_of(recorded), *costs)
        return drafted(self.gearbox, self.windows, low, top, FixedLength(length)), length

    def _static(self, gear: Gear) -> Iterator[Step]:
        return driven(self.gearbox, self.windows, Static(gear))

    def _recording(self, name: str, steps: Iterator[Step]) -> Recording:
        def make() -> Recording:
            return record(self.track(steps, len(self.targets), name), self.reference)

        return self.session.recording(name, make, len(self.targets), len(self.gearbox.ladder))

    def _write_reference(self, place: Path) -> None:
        tracked = self.track(self._static(self.gearbox.ladder.top), len(self.targets), "reference")
        Reference.write(place, tracked, len(self.targets), self.dtype)

    def report(self, told: dict[str, Any]) -> dict[str, Any]:
        """The report of what is complete; `told` is what the command knows of the run."""
        low, high = self.between
        ladder, reference = self.gearbox.ladder, self.reference
        rows = []
        for entry, recording in self.recordings.items():
            rows.append(row_of(entry, recording, reference, self.gearbox, self.between))
            rows[-1]["threshold"] = self.thresholds[entry]
        recordings = {entry.name: recording for entry, recording in self.recordings.items()}
        compare_with_chance(rows, recordings, low.bits, high.bits)
        compare_with_static(rows)
        top = self.recordings.get(Entry("static", bits=ladder.top.bits))
        exact = tokens_of(top, reference) if top else None
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **told,
            "tokens": len(self.targets),
            "windows": len(self.windows),
            "ladder": self.gearbox.ladder_report(),
            "between": [low.bits, high.bits],
            "gate": self.gate,
            "seed": self.seed,
            "compute_dtype": dtype_name(self.gearbox.compute_dtype),
            "reference": {
                "bits": ladder.top.bits,
                "dtype": self.dtype,
                # What storing it changed: the KL of the top gear, run again, from what was stored.
                "kl_mean_of_itself": float(top.kl.mean()) if top else None,
                "perplexity": quality(**exact)["perplexity"] if exact else None,
                "tokens_by_top_probability": [
                    {key: bucket[key] for key in ("top_probability", "tokens")}
                    for bucket in (by_bucket(reference.top_probability, exact) if exact else [])
                ],
            },
            "noise_floor": quality(**tokens_of(self.noise, reference)) if self.noise else None,
            "policies": rows,
        }
