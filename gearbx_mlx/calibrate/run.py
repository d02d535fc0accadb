"""Calibration of a model's thresholds, for generate."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..cli import terminal
from ..cli.build import Loaded, decided
from ..cli.decide import Decision, JustGears
from ..cli.flags import output_path
from ..cli.prompt import encoded_prompts, read_prompts
from ..compat.versions import program_versions
from ..decoding.kickdown import Kickdown
from ..decoding.modes import KICKDOWN
from ..decoding.route import SHORT_PROMPTS
from ..decoding.stream import stream_generate
from ..errors import GearbxError
from ..files.journal import JOURNAL, Journal, hash_of_tokens, place_beside
from ..files.writing import write_text
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox, Observer, in_one_gear, model_fingerprint
from ..gears.ladder import Ladder
from ..kernels.device import device_in_use
from ..loading import adapter_contents, fingerprint, model_contents
from ..routing import calibration
from ..routing.gates import ThresholdFile
from . import CalibrateSettings, CalibrationSettings

Prompts = Sequence[tuple[list[int], int]]  # tokens, and the most tokens after them


def prompts_of(settings: CalibrationSettings) -> list[str]:
    """Return the prompts of a file, or the bundled ones."""
    found = list(SHORT_PROMPTS) if settings.prompts is None else read_prompts(Path(settings.prompts))
    return found[: settings.num_prompts]


def record_inputs(settings: CalibrateSettings, decision: Decision, prompts: Prompts) -> dict[str, Any]:
    """Return all inputs that the records of prompts depend on."""
    gears = settings.gears
    return {
        "mode": settings.calibration.mode,
        "model contents": model_contents(settings.model.model),
        "dtype": settings.model.dtype,
        "device": device_in_use(),
        "adapter_path": settings.model.adapter_path,
        "adapter contents": adapter_contents(settings.model.adapter_path),
        **program_versions(),
        "gears": str(decision.ladder),
        "format": decision.format.name,
        "manage": decision.stored.manage,
        "q_group_size": decision.stored.group_size,
        "kernels": gears.kernels.name,
        "activations": gears.kernels.activations,
        **({"low model contents": model_contents(gears.low_model)} if gears.low_model else {}),
        **({"base": gears.base_text} if gears.base_text is not None else {}),
        **({"manifest contents": fingerprint(Path(gears.manifest))} if gears.manifest else {}),
        "prompts": hash_of_tokens([tokens for tokens, _ in prompts]),
        "max_tokens": settings.prompt.max_tokens,
        "extra_eos_token": [*settings.model.extra_eos_token],
    }


def calibrate_thresholds(settings: CalibrateSettings, place: Path | None) -> ThresholdFile:
    """Return thresholds from entropies along the model's output: for kickdown in every gear up to the top one, for
    route of the model without shifts.

    Args:
        place: of the journal; None without one.

    Raises:
        GearbxError: a ladder of one gear.
    """
    texts = prompts_of(settings.calibration)
    wanted = JustGears(settings.model, settings.layout, settings.gears)
    decision = decided(wanted)
    ladder = decision.ladder
    if len(ladder) < 2 and not decision.one_gear:
        raise GearbxError(f"--gears: must have two gears for a threshold, got {ladder}; set two or more")
    loaded = Loaded.of(decision)
    loaded.check_gears()
    shares, vocab_size = settings.calibration.shares_of(len(ladder)), vocabulary(loaded.model)
    prompts = encoded_prompts(texts, settings.prompt, loaded.tokenizer, loaded.config)
    inputs = record_inputs(settings, decision, prompts)
    gate: dict[str, Any]
    if settings.calibration.mode == KICKDOWN:
        gearbox, gate = loaded.gearbox(), {"window": 1, "hysteresis": 0.0, "min_gear_duration": 1, "mode": KICKDOWN}
        journal = Journal(place, inputs | {"native": gearbox.kernels.native}, list[tuple[float, ...]])
        entropies = recorded(journal, prompts, partial(climbed_entropies, gearbox, loaded.tokenizer))
        thresholds, reached = calibration.kickdown_thresholds([found for text in entropies for found in text], shares)
    else:
        gate = vars(settings.gate)
        in_one_gear(loaded.model, settings.model.dtype, **settings.gears.kernels.of_gearbox)
        observer = Observer(loaded.model, ladder)
        journal = Journal(place, inputs | {"native": observer.kernels.native}, list[float])
        entropies = recorded(journal, prompts, partial(generated_entropies, observer, loaded.tokenizer))
        thresholds, reached = calibration.share_thresholds(entropies, shares, vocab_size, **gate)
    return ThresholdFile(
        thresholds=list(thresholds),
        vocab_size=vocab_size,
        model=loaded.name,
        method="share",
        gears=[gear.bits for gear in ladder],
        tokens=sum(map(len, entropies)),
        shares=reached,
        fingerprint=model_fingerprint(loaded.model),
        **gate,
    )


def recorded(journal: Journal, prompts: Prompts, record: Callable[..., Sequence[Any]]) -> list[Any]:
    """Return the record of each prompt, also from an earlier run."""
    with terminal.progress_bar() as progress:
        numbered: Iterable[Any] = enumerate(progress.track(prompts, description="prompts"))
        return [journal.made(f"prompt {number}", partial(record, *prompt)) for number, prompt in numbered]


def climbed_entropies(gearbox: Gearbox, tokenizer: Any, tokens: list[int], length: int) -> list[tuple[float, ...]]:
    """Return the entropies in bits of every generated token, in every gear but the top one."""
    found = list[tuple[float, ...]]()

    def climb(entropy: float, position: int, gear: int) -> bool:
        found[position:] = [(*(found[position] if gear else ()), entropy)]
        return True

    mode = Kickdown(rule=climb, prompt_gear=gearbox.ladder.top.name)
    for _ in stream_generate(gearbox.model, tokenizer, tokens, length, mode=mode, gearbox=gearbox):
        pass
    return found


def generated_entropies(observer: Observer, tokenizer: Any, tokens: list[int], length: int) -> list[float]:
    """Return the entropy in bits of every generated token, without shifts."""
    responses = stream_generate(observer.model, tokenizer, tokens, length, mode="telemetry-only", gearbox=observer)
    return [response.entropy for response in responses]


def run(settings: CalibrateSettings) -> int:
    out = output_path(settings.calibration.out or "thresholds.json")
    found = calibrated_file(settings, out)
    shares = ", ".join(f"{gear.name} {share:.0%}" for gear, share in zip(Ladder(found.gears), found.shares))
    terminal.note(f"{found.tokens} tokens; shares of the gears with these thresholds: {shares}")
    print(f"{out}: {', '.join(f'{threshold:.3f}' for threshold in found.thresholds or ())} bits")
    return 0


def as_object(settings: CalibrateSettings) -> ThresholdFile:
    """Return the thresholds, and write them if --out is given."""
    out = settings.calibration.out
    return calibrate_thresholds(settings, None) if out is None else calibrated_file(settings, output_path(out))


def calibrated_file(settings: CalibrateSettings, out: Path) -> ThresholdFile:
    """Return the thresholds, and write them. An interrupted run leaves its records beside the file for the next
    one."""
    place = place_beside(out, JOURNAL)
    found = calibrate_thresholds(settings, place)
    write_text(out, found.text())
    if place is not None:
        place.unlink(missing_ok=True)
    return found
