"""What is measured about drafts: how often gears agree, what passes take, and how many steps to queue ahead.

`calibrate --mode lossless` records what each gear would have drafted along the top gear's own text, and with `--cost
time` how long passes take on this machine. Each step of a draft that is queued ahead (drafting.py) may save the time
for which the device would wait until a token is read and the next step is queued. It costs a pass of the draft gear
where the draft ends before it.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ..compat.arrays import dtype_name
from ..errors import GearbxError, GearbxWarning
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.kernel_choices import uncounted
from ..gears.ladder import Gear
from ..gears.offload import Resident
from ..kernels.compiler import processor_key
from ..kernels.dispatch import is_tuning, on_cpu
from ..ranks.agreement import agreement_of
from ..routing.acceptance import (
    MOST_DRAFTED,
    Dial,
    DraftFile,
    DraftRule,
    DraftTimes,
    FixedLength,
    ProductRule,
    Recorded,
    best_bound,
    best_length,
    fit_curve,
)
from ..routing.rounds import MOST_ROWS, LearnedCosts, PassTimes, joint_rule, predicted_cost
from .caches import Snapshot
from .draft_plans import name_of
from .drafting import Drafter, Proposals, Writer, looking, second_head
from .rows import Verifier
from .sampling import GREEDY, entropy_bits, reader_of

LOOP = 8  # tokens of a trial of mlx-lm's own loop
TRIALS = 9  # after one that compiles and fills caches


def machine_of(gearbox: Gearbox) -> str:
    """What times depend on beside the weights: the machine and how the gearbox computes. Equal where times compare.

    Processor, cores, kernels and device; format, group size, type of activations, and type to compute in.
    """
    kernels = "native" if gearbox.kernels.native else "mlx"
    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    threads = os.environ.get("GEARBX_THREADS", "")
    cores = f"{os.cpu_count()} cores{threads and f', {threads} threads'}"
    machine = f"{processor_key()}, {cores}, {kernels} kernels on {device}"
    activations = f"int{gearbox.kernels.x_bits}" if gearbox.kernels.x_bits else "float"
    stored = f"format {gearbox.format.name} in groups of {gearbox.group_size}"
    return f"{machine}, {stored}, {activations} activations, {dtype_name(gearbox.compute_dtype)}"


def few_pass_times(gearbox: Gearbox, draft: Gear) -> PassTimes | None:
    """Seconds of a drafted token, and of verifications of a few rows, in few trials, since a text waits for them.

    None where that would read weights from a disk, and where there is no memory for it.
    """
    top = gearbox.ladder.top
    if draft == top or not isinstance(gearbox.residency, Resident):
        return None
    try:
        with uncounted(gearbox):
            passes = TimedPasses(gearbox, top, draft, FEW_BEFORE)
            trials: list[Callable[[], float]] = [passes.drafted, *(partial(passes.verified, rows) for rows in FEW_ROWS)]
            step, *verified = map(statistics.median_low, passes.seconds(trials, PASS_TRIALS))
    except RuntimeError:  # the text must not end for that
        return None
    return step, dict(zip(FEW_ROWS, verified))


class TimedPasses:
    """Passes over a KV cache with so many tokens, each of which returns the seconds that it took."""

    def __init__(self, gearbox: Gearbox, top: Gear, draft: Gear, context: int):
        self.gearbox, self.top = gearbox, top
        gearbox.shift(top)
        self._size, self.cache = vocabulary(gearbox.model), make_prompt_cache(gearbox.model)
        mx.eval(gearbox.model(mx.arange(context)[None] % self._size, cache=self.cache))
        self._verifier, reader = Verifier(gearbox, top), reader_of(gearbox)
        self._drafters = {depth: Drafter(gearbox, draft, reader, depth) for depth in DEPTHS}

    def alone(self) -> float:
        """A token of the top gear in mlx-lm's own loop."""
        model, cache = self.gearbox.model, self.cache
        self.gearbox.shift(self.top)
        begun = [time.perf_counter() for _ in generate_step(mx.array([1]), model, max_tokens=LOOP, prompt_cache=cache)]
        mx.eval([layer.state for layer in cache])  # the loop has begun one token more
        return (begun[-1] - begun[0]) / (LOOP - 1)

    def drafted(self) -> float:
        """A token of a draft that is chosen greedily."""
        begun = time.perf_counter()
        self._draft(FixedLength(FEW_DRAFTED), FEW_DRAFTED)
        return (time.perf_counter() - begun) / FEW_DRAFTED

    def round(self, ahead: int, drafted: int) -> float:
        """A draft of so many tokens, with so many steps ahead, and its verification."""
        begun = time.perf_counter()
        # It ends after so many tokens, whatever they are.
        rule = ProductRule(lambda entropy: 0.5, 0.5 ** (drafted - 0.5))
        proposals = self._draft(rule, drafted + max(DEPTHS), ahead)
        mx.eval(self._verifier.rows(mx.array(proposals.rows()), self.cache).logits)
        return time.perf_counter() - begun

    def _draft(self, rule: DraftRule, most: int, ahead: int = 0) -> Proposals:
        text = Writer(GREEDY, 1, MOST_DRAFTED, lambda token: False)
        return self._drafters[ahead].draft([text], self.cache, joint_rule(rule), most)

    def verified(self, rows: int) -> float:
        """A verification."""
        begun = time.perf_counter()
        mx.eval(self._verifier.rows(mx.arange(rows)[None] % self._size, self.cache).logits)
        return time.perf_counter() - begun

    def seconds(self, trials: Sequence[Callable[[], float]], count: int) -> list[list[float]]:
        """Of each of the trials, which take turns `count` times, after one that compiles and fills caches.

        The top gear is then engaged.
        """
        before, seconds = Snapshot(self.cache), [list[float]() for _ in trials]
        for _ in range(count + 1):
            for trial, found in zip(trials, seconds):
                with before.borrowed():
                    found.append(trial())
        self.gearbox.shift(self.top)
        return [found[1:] for found in seconds]


def times_here(times: DraftTimes | None, gearbox: Gearbox) -> DraftTimes | None:
    """The times of a drafting file if they were measured as this gearbox runs; else none, and a warning says so."""
    if times is None or times.machine == machine_of(gearbox):
        return times
    said = f"the drafting file's times belong to {times.machine}, and this is {machine_of(gearbox)}"
    warnings.warn(f"{said}: they are not used; calibrate --cost time here", GearbxWarning, stacklevel=4)
    return None


DEPTHS = (0, 1, 2)
DRAFTED = 8  # tokens of a usual draft

FEW_TRIALS, FEW_DRAFTED, FEW_BEFORE = 2, 4, 32  # some 50 passes of the draft gear; FEW_BEFORE: tokens before a draft
PASS_TRIALS, FEW_ROWS = 4, (1, 4, 8, 16)  # trials, and rows of verifications; others cost what lies between
NEARLY = 1.02  # of the least time is as good: what is queued ahead in vain costs energy


def default_depth() -> int:
    """Steps to queue ahead where nothing is measured.

    On a CPU none: the device that waits is the one that would queue the next step, and steps that are thrown away
    delay the verification. On a GPU one, as mlx-lm does: it hides the wait after every token, and costs one pass of
    the draft gear in a draft.
    """
    return 0 if on_cpu() else 1


def depth_here(gearbox: Gearbox, draft: Gear, rule: DraftRule) -> int:
    """Steps to queue ahead when `draft` drafts, by what was measured here; measured now if that was not done yet.

    The times are kept with those of kernels (kernels/tuner.py). Nothing is measured where it would change
    nothing (a CPU, drafts of a fixed length), where it would read weights from a disk, and with GEARBX_TUNE=0; nor by
    ranks, which would all have to run the passes at once, and whose caches of times differ.
    """
    if isinstance(rule, FixedLength) or draft == gearbox.ladder.top:
        return 0
    shared = agreement_of(gearbox.model).group is not None
    if on_cpu() or shared or not is_tuning() or not isinstance(gearbox.residency, Resident):
        return default_depth()
    tuner, name = gearbox.kernel_choices.tuner, name_of(gearbox, draft)
    known = tuner.measured if gearbox.kernels.again else tuner.cache.times
    if not known.get(name, {}).keys() >= {*map(str, DEPTHS)}:
        try:
            with uncounted(gearbox):  # a text waits for these trials
                found = round_times(gearbox, draft, FEW_BEFORE, FEW_TRIALS, FEW_DRAFTED)
        except RuntimeError:  # without memory for it, say: the text must not end for that
            return default_depth()
        tuner.seconds += sum(map(sum, found.values()))
        tuner.measured[name] = {str(depth): statistics.median(seconds) for depth, seconds in found.items()}
        tuner.cache.keep(name, tuner.measured[name])
        tuner.cache.save()
    return shallowest({depth: tuner.cache.times[name][str(depth)] for depth in DEPTHS})


def shallowest(seconds: Mapping[int, float]) -> int:
    """The smallest depth that takes hardly longer than the fastest one, from the seconds of each."""
    enough = NEARLY * min(seconds.values())
    return min(depth for depth, value in seconds.items() if value <= enough)


def round_times(
    gearbox: Gearbox, draft: Gear, context: int, trials: int = TRIALS, drafted: int = DRAFTED
) -> dict[int, list[float]]:
    """Seconds of a draft and its verification, by depth, of each of the trials, which take turns.

    The rule ends each draft, so that all steps beyond are thrown away, and their time counts. The top gear is engaged
    afterwards.

    Args:
        draft: the gear that drafts.
        context: tokens in the KV cache before the draft.
        trials: after one that does not count.
        drafted: tokens of a draft.
    """
    passes = TimedPasses(gearbox, gearbox.ladder.top, draft, context)
    return dict(zip(DEPTHS, passes.seconds([partial(passes.round, depth, drafted) for depth in DEPTHS], trials)))


BLOCK = 8  # tokens that a gear reads on the top gear's cache before it is put right again: the length of a usual draft


@dataclass
class GearRecord:
    """One gear's entropy (bits) at each token of a text, and whether it would choose the top gear's token.

    gaps: by how many nats its own choice is less likely in the top gear than that gear's, 0 where both agree. margins:
    of its choices (`acceptance.LearnedAgreement`).
    """

    entropies: list[float]
    agrees: list[bool]
    gaps: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def kept(self, tolerance: float) -> list[bool]:
        """Whether each token would stay as a draft, within so many nats of the top gear's choice."""
        return [agrees or gap <= tolerance for agrees, gap in zip(self.agrees, self.gaps)] if tolerance else self.agrees


def record_agreement(
    gearbox: Gearbox, top: Gear, gears: Sequence[Gear], prompt: Sequence[int], text: Sequence[int]
) -> list[GearRecord]:
    """Run the gears over a text that the top gear wrote, each on the top gear's KV cache, as when it drafts.

    Args:
        top: the gear that verifies.
        gears: those that might draft.
        prompt: tokens, one or more.
        text: tokens that the top gear wrote after it, greedily.

    Returns:
        for each gear, len(text) entropies and answers. The top gear is engaged afterwards.
    """
    model, reader = gearbox.model, reader_of(gearbox)
    cache = make_prompt_cache(model)
    gearbox.shift(top)
    if len(prompt) > 1:
        model(mx.array(list(prompt[:-1]))[None], cache=cache)
    inputs = [prompt[-1], *text[:-1]]
    found = [GearRecord([], []) for _ in gears]
    for start in range(0, len(inputs), BLOCK):
        block = mx.array(inputs[start : start + BLOCK])[None]
        chosen = mx.array(list(text[start : start + BLOCK]))
        before = Snapshot(cache)
        drafts = []
        for gear, agreement in zip(gears, found):
            gearbox.shift(gear)
            with looking(second_head(gearbox, gear)):
                logits = model(block, cache=cache)[0]
            before.restore()
            drafts.append(mx.argmax(logits, axis=-1))
            agreement.entropies += np.array(entropy_bits(logits)).tolist()
            agreement.margins += np.array(reader.margins(logits)).tolist()
            agreement.agrees += np.array(drafts[-1] == chosen).tolist()
        gearbox.shift(top)
        logprobs = reader.normalized(model(block, cache=cache)[0].astype(mx.float32))
        for draft, agreement in zip(drafts, found):
            theirs, own = (mx.take_along_axis(logprobs, tokens[:, None], -1)[:, 0] for tokens in (chosen, draft))
            agreement.gaps += np.array(mx.maximum(theirs - own, 0)).tolist()
    return found


def record_along(gearbox: Gearbox, top: Gear, gear: Gear, text: Sequence[int]) -> GearRecord:
    """Run both gears over a text of any origin, each on its own KV cache: where would they choose the same next token?

    Args:
        text: tokens, two or more. The top gear is engaged afterwards.
    """
    tokens = mx.array(list(text))[None]
    gearbox.shift(gear)
    with looking(second_head(gearbox, gear)):
        logits = gearbox.model(tokens)[0, :-1]
    entropies, chosen = entropy_bits(logits), mx.argmax(logits, axis=-1)
    mx.eval(entropies, chosen)
    gearbox.shift(top)
    agrees = mx.argmax(gearbox.model(tokens)[0, :-1], axis=-1) == chosen
    return GearRecord(np.array(entropies).tolist(), np.array(agrees).tolist())


def draft_files(
    gearbox: Gearbox,
    top: Gear,
    recorded: dict[Gear, list[GearRecord]],
    name: str,
    group_size: int,
    format: str,
    context: int | None = None,
    dial: Dial | None = None,
) -> Iterable[DraftFile]:
    """For each gear that was recorded, the curve and the bound that cost the fewest bytes of weights per token.

    Args:
        context: measure what passes take after so many tokens, too.
        dial: which drafted tokens are to stay; without it those that the top gear chooses.

    Raises:
        GearbxError: no tokens were recorded.
    """
    verification, original = gearbox.weight_bytes_per_token(top), gearbox.original_bytes_per_token()
    for gear, texts in recorded.items():
        gaps = [gap for text in texts for gap in text.gaps]
        tolerance = 0.0 if dial is None or not gaps else dial.tolerance(gaps)
        sequences = [(text.entropies, text.kept(tolerance)) for text in texts if text.entropies]
        if not sequences:
            raise GearbxError("calibration has no tokens; give prompts that the model answers")
        entropies = [value for text in texts for value in text.entropies]
        agrees = [value for _, kept in sequences for value in kept]
        curve = fit_curve(entropies, agrees)
        draft = gearbox.weight_bytes_per_token(gear)
        bound, read = best_bound(sequences, curve, draft, verification)
        length, fixed = best_length(sequences, draft, verification)
        yield DraftFile(
            gears=[g.bits for g in gearbox.ladder if g.bits <= top.bits],
            draft=gear.bits,
            bound=bound,
            edges=list(curve.edges),
            agreement=list(curve.agreement),
            vocab_size=vocabulary(gearbox.model),
            fingerprint=gearbox.fingerprint,
            model=name,
            group_size=group_size,
            format=format,
            tokens=len(entropies),
            agreement_overall=sum(agrees) / len(agrees),
            weight_bytes_per_token=read,
            weight_bytes_per_token_top=verification,
            best_fixed_length=length,
            fixed_weight_bytes_per_token=fixed,
            weight_bytes_per_token_original=None if original == verification else original,
            tolerance=tolerance,
            times=None if context is None else draft_times(gearbox, top, gear, context, sequences, curve),
        )


def draft_times(
    gearbox: Gearbox, top: Gear, draft: Gear, context: int, sequences: Recorded, curve: Callable[[float], float]
) -> DraftTimes:
    """What passes take, measured now, and what a token of the recorded texts takes with them.

    Seconds are medians of trials in turn. Alone, the top gear writes in mlx-lm's own loop, which runs ahead.

    Args:
        top, draft: the gears that verify and draft; `top` is engaged afterwards.
        context: tokens in the KV cache before the pass.
    """
    passes = TimedPasses(gearbox, top, draft, context)
    verified = [partial(passes.verified, rows) for rows in range(1, MOST_ROWS + 1)]
    seconds = passes.seconds([passes.alone, passes.drafted, *verified], TRIALS)
    alone, token, *rows = map(statistics.median_low, seconds)
    predicted = predicted_cost(sequences, curve, LearnedCosts((token, dict(enumerate(rows, 1)))))
    return DraftTimes(machine_of(gearbox), context, alone, token, rows, predicted)
