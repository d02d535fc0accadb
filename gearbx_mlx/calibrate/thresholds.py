"""calibrate --mode route and --mode kickdown: entropy thresholds between the gears."""

from functools import partial
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.loaded import Loaded
from ..cli.resolved import resolve_gears
from ..decoding.kickdown import GearedModel
from ..decoding.sampling import sampled
from ..decoding.stream import stream_generate
from ..evaluation.session import Journal
from ..gears.discovery import vocabulary
from ..gears.gearbox import Observer, model_fingerprint
from ..routing import calibration
from ..routing.gates import ThresholdFile
from . import KICKDOWN, SHARE, CalibrateSettings
from .shared import Calibration, bits_line, check_ladder, encoded, inputs_of, prompts_of, shares_note


def calibrate_route(settings: CalibrateSettings, place: Path | None) -> Calibration:
    """Thresholds from the entropies of a model that does not change gear. place: of the journal, if there is one."""
    gate = vars(settings.gate.filled())
    texts = prompts_of(settings.calibration)
    loaded, shares = settle(settings)
    resolved = loaded.resolved
    observer = Observer(loaded.model, resolved.ladder, dtype=settings.model.dtype)
    prompts = encoded(texts, settings.prompt, loaded.tokenizer, loaded.config)
    journal = Journal(place, inputs_of(settings, resolved, prompts), list[float])
    entropies: list[list[float]] = []
    with terminal.progress_bar() as progress:
        for number, prompt in enumerate(progress.track(prompts, description="prompts")):
            record = partial(generated_entropies, observer, loaded.tokenizer, *prompt)
            entropies.append(journal.made(f"prompt {number}", record))
    vocab_size = vocabulary(loaded.model)
    thresholds, reached = calibration.share_thresholds(entropies, shares, vocab_size, **gate)
    file = ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocab_size,
        model=loaded.name,
        method=SHARE,
        gears=[gear.bits for gear in resolved.ladder],
        tokens=sum(map(len, entropies)),
        shares=reached,
        fingerprint=model_fingerprint(loaded.model),
        **gate,
    )
    return Calibration(file, bits_line(thresholds), [shares_note(resolved.ladder, reached, file.tokens)])


def calibrate_kickdown(settings: CalibrateSettings, place: Path | None) -> Calibration:
    """Thresholds from every token's entropy in every gear on the way to the top one. place: as for route."""
    texts = prompts_of(settings.calibration)
    loaded, shares = settle(settings)
    resolved = loaded.resolved
    gearbox, tokenizer = loaded.gearbox(), loaded.tokenizer
    climbing = GearedModel(gearbox, rule=lambda entropy, position, gear: True)
    prompts = encoded(texts, settings.prompt, tokenizer, loaded.config)
    inputs = inputs_of(settings, resolved, prompts) | {"native": gearbox.kernels.native}
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
    return [token.step.entropies for _, token in source]


def settle(settings: CalibrateSettings) -> tuple[Loaded, list[float]]:
    """The model, and the share of tokens for each of its gears, which are its own codes' if it is quantized.

    Raises:
        GearbxError: gears that need no threshold.
    """
    resolved = resolve_gears(settings.model, settings.layout, settings.gears, settings.floors)
    check_ladder(resolved.ladder, "no thresholds")
    loaded = Loaded.of(resolved)
    loaded.check_gears()
    return loaded, settings.calibration.shares_of(len(loaded.resolved.ladder))


def generated_entropies(observer: Observer, tokenizer: Any, tokens: list[int], length: int) -> list[float]:
    """Bits of every generated token; the model does not change gear."""
    responses = stream_generate(observer.model, tokenizer, tokens, length, mode="telemetry-only", gearbox=observer)
    return [response.entropy for response in responses]
