"""The entry for programs: mlx-lm's stream_generate and generate, with a gearbox."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import GearbxError
from ..gears.attachment import attached
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.observer import Observer
from ..gears.saved import without_gears
from ..routing.acceptance import DraftRule
from ..routing.draft_file import DraftFile
from ..routing.gates import DEFAULT_HYSTERESIS, DEFAULT_MIN_GEAR_DURATION, Gate, ThresholdGate
from ..routing.monitor import DEFAULT_WINDOW, Monitor
from ..routing.prompt import first_gear
from ..routing.thresholds import check_thresholds, default_thresholds
from .drafting import make_lossless
from .entropy_sampler import drive
from .governor import Governor
from .kickdown import GearedModel, RecomputeRule
from .pair import stream_pair
from .response import GearResponse
from .route import route
from .wrapper import ModelWrapper

ROUTE, KICKDOWN, LOSSLESS, PAIR, TELEMETRY_ONLY = MODES = ("route", "kickdown", "lossless", "pair", "telemetry-only")
AUTO = "auto"


def choose_mode(model: nn.Module, gearbox: Gearbox | Observer | None, mode: str | None, small_model: Any = None) -> str:
    """Pair where there is a small model. Telemetry only for what cannot shift: a quantized checkpoint, or an Observer.

    Raises:
        GearbxError: a mode that does not exist, or one that the model or the gearbox cannot run.
    """
    if mode in (None, PAIR) and small_model is not None:
        if gearbox is not None:
            raise GearbxError("mode 'pair' runs both models as they are; leave the gearbox out")
        return PAIR
    watching = isinstance(gearbox, Observer) or (gearbox is None and without_gears(model) and attached(model) is None)
    if mode is None:
        return TELEMETRY_ONLY if watching else ROUTE
    if mode not in MODES:
        raise GearbxError(f"mode '{mode}' does not exist; choose from {', '.join(MODES)}")
    if mode == PAIR:
        raise GearbxError("mode 'pair' needs a small model besides the model; name one")
    if small_model is not None:
        raise GearbxError(f"mode '{mode}' has one model; leave the small model out, or use mode 'pair'")
    if mode != TELEMETRY_ONLY and watching:
        raise GearbxError(f"mode '{mode}' needs a gearbox, and this model is quantized already: use 'telemetry-only'")
    if mode == TELEMETRY_ONLY and isinstance(gearbox, Gearbox):
        raise GearbxError("mode 'telemetry-only' shifts no gears: give an Observer, or no gearbox")
    return mode


def prompt_text(tokenizer: Any, prompt: Any) -> str:
    """The prompt as text, whether it came as text or as tokens."""
    if isinstance(prompt, str):
        return prompt
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    return tokenizer.decode(tokens, skip_special_tokens=True)  # whose brackets are no mathematics


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    *,
    gearbox: Gearbox | Observer | None = None,
    gate: Gate | None = None,
    mode: str | None = None,
    thresholds: Sequence[float] | None = None,
    window: int | None = None,
    hysteresis: float | None = None,
    min_gear_duration: int | None = None,
    initial_gear: str | int = AUTO,
    small_model: nn.Module | None = None,
    decision: RecomputeRule | None = None,
    drafting: DraftFile | DraftRule | str | Path | int | None = None,
    controller: Governor | None = None,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate text while the gearbox changes the precision of the weights.

    Args:
        model, tokenizer, prompt, max_tokens: as in `mlx_lm.stream_generate`, as are all further keywords.
        gearbox: without one, that which is on the model, else a new one with the default ladder; for a checkpoint
            that is quantized already, an Observer.
        gate: route: a Gate of your own; otherwise a ThresholdGate of the four arguments that follow.
        mode: "route", "kickdown", "lossless", "pair" or "telemetry-only"; by itself "pair" where there is a small
            model, and else the first where gears can shift.
        thresholds: bits, one fewer than there are gears or models; the paper's, scaled to the vocabulary, if not given.
        window: tokens in the rolling mean; 3 if not given, in pair 5.
        hysteresis: bits; 0.1 if not given, in pair none.
        min_gear_duration: tokens; 4 if not given, in pair 10.
        initial_gear: route: name or bits of a gear, or "auto": from the prompt (GEARBX 11). The prompt is read in it.
            pair: "small", "large" or "auto".
        small_model: pair: takes turns with the model, whose tokenizer it shares (`stream_pair` says how).
        decision: kickdown: in place of thresholds.
        drafting: lossless: what `calibrate --mode lossless` wrote (a path or a DraftFile), a number of tokens, or a
            DraftRule; otherwise what ships for this model, or a rule for any.
        controller: route and kickdown: a Governor, which caps the gears by speed and by the machine's state.

    Yields:
        GearResponse for each token. In route, a shift acts two tokens after the one that caused it, since mlx-lm runs
        ahead.

    Raises:
        GearbxError: arguments that do not fit together.
    """
    if controller is not None and gearbox is None:
        gearbox = controller.gearbox
    mode = choose_mode(model, gearbox, mode, small_model)
    if controller is not None:
        check_controller(controller, gearbox, mode, kwargs.get("draft_model") is not None)
    if small_model is not None:
        settings = {
            "threshold": single(thresholds),
            "window": window,
            "min_duration": min_gear_duration,
            "gate": gate,
            "hysteresis": hysteresis,
            "decision": decision,
            "drafting": drafting,
        }
        kwargs |= {name: value for name, value in settings.items() if value is not None}
        return stream_pair(small_model, model, tokenizer, prompt, max_tokens, initial=str(initial_gear), **kwargs)
    window = DEFAULT_WINDOW if window is None else window
    if gearbox is None:
        gearbox = Observer(model) if mode == TELEMETRY_ONLY else attached(model) or Gearbox(model)
    elif gearbox.model is not model:
        raise GearbxError("the gearbox belongs to another model; make one with Gearbox(model)")
    gears, vocab_size = len(gearbox.ladder), vocabulary(model)
    monitor = Monitor(vocab_size, window)
    kwargs["max_tokens"] = max_tokens
    if isinstance(gearbox, Gearbox) and mode in (KICKDOWN, LOSSLESS):
        if kwargs.get("draft_model") is not None:
            raise GearbxError(f"mode '{mode}' takes no draft model: the gears are all of one model; use mode 'route'")
        geared: ModelWrapper
        if mode == KICKDOWN:
            geared = GearedModel(gearbox, thresholds, rule=decision)
        else:
            prompt = encoded(tokenizer, prompt)
            geared = make_lossless(gearbox, tokenizer, drafting, prompt_tokens=len(prompt), **kwargs)
        return drive(geared, tokenizer, prompt, monitor=monitor, controller=controller, **kwargs)
    if gate is None:
        chosen = default_thresholds(gears, vocab_size) if thresholds is None else tuple(thresholds)
        check_thresholds(chosen, gears)
        gate = ThresholdGate(
            chosen,
            DEFAULT_HYSTERESIS if hysteresis is None else hysteresis,
            DEFAULT_MIN_GEAR_DURATION if min_gear_duration is None else min_gear_duration,
        )
    if initial_gear == AUTO:
        first = gearbox.ladder[first_gear(prompt_text(tokenizer, prompt), gears)]
    else:
        first = gearbox.ladder.find(initial_gear)
    gate.reset(first.index)
    gearbox.shift(first)
    shared: dict[str, Any] = {"gearbox": gearbox, "gate": gate, "monitor": monitor, "controller": controller}
    return route(model, tokenizer, prompt, **shared, **kwargs)


def check_controller(controller: Governor, gearbox: Any, mode: str, has_draft_model: bool) -> None:
    """Raises GearbxError where gears cannot be capped."""
    if mode == LOSSLESS:
        raise GearbxError("mode 'lossless' writes the top gear's text, which a cap would change; use mode 'route'")
    if mode not in (ROUTE, KICKDOWN):
        raise GearbxError(f"mode '{mode}' changes no gear, so there is nothing to cap; use mode 'route'")
    if has_draft_model:
        raise GearbxError("with a draft model tokens come several at a time and cannot be timed; leave one of them out")
    if gearbox is not controller.gearbox:
        raise GearbxError("the controller belongs to another gearbox; make one with Governor(gearbox)")


def single(thresholds: Sequence[float] | None) -> float | None:
    """The threshold between two models. Raises GearbxError for more than one."""
    if thresholds is not None and len(thresholds) != 1:
        raise GearbxError(f"two models have one threshold between them, got {len(thresholds)}")
    return None if thresholds is None else thresholds[0]


def encoded(tokenizer: Any, prompt: Any) -> Any:
    """A prompt as tokens, as mlx-lm's stream_generate makes them of text."""
    if not isinstance(prompt, str):
        return prompt
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=special)


def generate(model: nn.Module, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    """The whole text at once; keywords as in stream_generate. `verbose` prints it as it is made."""
    text = ""
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print()
    return text
