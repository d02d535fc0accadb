"""calibrate --mode route and --mode kickdown: entropy thresholds between the gears."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.resolved import Resolved, resolve_gears
from ..decoding.kickdown import GearedModel
from ..decoding.sampling import entropy_bits, sampled
from ..decoding.stream import stream_generate
from ..evaluation.session import Journal
from ..gears.discovery import vocabulary
from ..gears.gearbox import Observer
from ..routing import calibration
from ..routing.gates import ThresholdFile
from . import KICKDOWN, MANUAL, MEDIAN, PERCENTILE, SHARE, CalibrateSettings
from .shared import Calibration, Prompts, bits_line, check_ladder, encoded, inputs_of, prompts_by_kind, shares_note

Entropies = list[list[float]]  # bits, one list for each prompt


def calibrate_route(settings: CalibrateSettings, place: Path | None) -> Calibration:
    """Thresholds from the entropies of a model that does not change gear. place: of the journal, if there is one."""
    resolved, shares = settle(settings)
    gate, method = vars(settings.gate.filled()), settings.calibration.method
    texts = prompts_by_kind(settings.calibration)
    loaded = Loaded.of(resolved)
    model, tokenizer, config = loaded.model, loaded.tokenizer, loaded.config
    observer = Observer(model, resolved.ladder, dtype=settings.model.dtype)
    prompts = {kind: encoded(kind_texts, settings.prompt, tokenizer, config) for kind, kind_texts in texts.items()}
    journal = Journal(place, inputs_of(settings, resolved, prompts), list[float])
    samples = record_entropies(method, observer, tokenizer, prompts, journal)
    vocab_size = vocabulary(model)
    thresholds = find_thresholds(method, samples, shares, vocab_size, gate)
    sequences = [sequence for kind in samples.values() for sequence in kind]
    reached = calibration.reached_shares(sequences, thresholds, vocab_size, **gate)
    file = ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocab_size,
        model=loaded.name,
        method=method,
        gears=[gear.bits for gear in resolved.ladder],
        tokens=sum(map(len, sequences)),
        shares=reached,
        **gate,
    )
    return Calibration(file, bits_line(thresholds), [shares_note(resolved.ladder, reached, file.tokens)])


def calibrate_kickdown(settings: CalibrateSettings, place: Path | None) -> Calibration:
    """Thresholds from every token's entropy in every gear on the way to the top one. place: as for route."""
    resolved, shares = settle(settings)
    texts = prompts_by_kind(settings.calibration)["mixed"]
    loaded = Loaded.of(resolved)
    gearbox, tokenizer = loaded.gearbox(), loaded.tokenizer
    climbing = GearedModel(gearbox, rule=lambda entropy, position, gear: True)
    prompts = encoded(texts, settings.prompt, tokenizer, loaded.config)
    inputs = inputs_of(settings, resolved, {"mixed": prompts}) | {"native": gearbox.kernels.native}
    journal = Journal(place, inputs, list[tuple[float, ...]])
    entropies: list[tuple[float, ...]] = []
    with terminal.progress_bar() as progress:
        for number, prompt in enumerate(progress.track(prompts, description="prompts")):
            entropies += journal.made(f"prompt {number}", partial(climbed_entropies, climbing, tokenizer, *prompt))
    thresholds, reached = calibration.kickdown_thresholds(entropies, shares)
    file = ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocabulary(loaded.model),
        model=loaded.name,
        method=SHARE,
        gears=[gear.bits for gear in resolved.ladder],
        tokens=len(entropies),
        window=1,
        hysteresis=0.0,
        min_gear_duration=1,
        shares=reached,
        mode=KICKDOWN,
        fingerprint=gearbox.fingerprint,
    )
    return Calibration(file, bits_line(thresholds), [shares_note(resolved.ladder, reached, file.tokens)])


def climbed_entropies(climbing: GearedModel, tokenizer: Any, tokens: list[int], length: int) -> list[tuple[float, ...]]:
    """Bits of every generated token in every gear."""
    source = sampled(climbing, tokenizer, tokens, lambda: climbing.step, max_tokens=length)
    return [source.seen(response).step.entropies for response in source.responses]


def settle(settings: CalibrateSettings) -> tuple[Resolved, list[float]]:
    """The gears, and the share of tokens for each. Raises GearbxError for gears that need no threshold."""
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors)
    check_ladder(resolved.ladder, "no thresholds")
    return resolved, settings.calibration.shares_of(len(resolved.ladder))


def record_entropies(
    method: str, observer: Observer, tokenizer: Any, prompts: Mapping[str, Prompts], journal: Journal
) -> dict[str, Entropies]:
    """Kind of prompt to entropies; each prompt's go into the journal.

    Args:
        prompts: by kind.
    """
    samples: dict[str, Entropies] = {kind: [] for kind in prompts}
    with terminal.progress_bar() as progress:
        for kind, encoded_prompts in prompts.items():
            tracked = progress.track(encoded_prompts, description=f"{kind} prompts")
            for number, (tokens, length) in enumerate(tracked):
                record = partial(generated_entropies, observer, tokenizer, tokens, length)
                if method == PERCENTILE:
                    record = partial(prefill_entropies, observer.model, tokens)
                samples[kind].append(journal.made(f"{kind} prompt {number}", record))
    return samples


def generated_entropies(observer: Observer, tokenizer: Any, tokens: list[int], length: int) -> list[float]:
    """Bits of every generated token; the model does not change gear."""
    responses = stream_generate(observer.model, tokenizer, tokens, length, mode="telemetry-only", gearbox=observer)
    return [response.entropy for response in responses]


def prefill_entropies(model: nn.Module, tokens: list[int]) -> list[float]:
    """Bits at every position of a prompt, from one pass over it."""
    return [float(h) for h in entropy_bits(model(mx.array(tokens)[None]))[0]]


def find_thresholds(
    method: str,
    samples: Mapping[str, Entropies],
    shares: Sequence[float],
    vocab_size: int,
    gate: Mapping[str, Any],
) -> tuple[float, ...]:
    """Thresholds in bits, one fewer than there are shares.

    Args:
        samples: kind of prompt to entropies.
        gate: window, hysteresis and min_gear_duration.
    """
    gears = len(shares)
    pooled = {kind: [h for sequence in sequences for h in sequence] for kind, sequences in samples.items()}
    if method == PERCENTILE:
        return calibration.percentile_thresholds(pooled["mixed"], gears, vocab_size)
    if method == MEDIAN:
        return calibration.median_thresholds(pooled["mixed"], gears)
    if method == MANUAL:
        return calibration.manual_thresholds(pooled["trivial"], pooled["hard"], gears)
    return calibration.share_thresholds(samples["mixed"], shares, vocab_size, **gate)[0]
