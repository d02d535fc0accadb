"""The entry for programs: mlx-lm's stream_generate and generate, with gears."""

from collections.abc import Iterator
from typing import Any

import mlx.nn as nn

from ..gears.attachment import attached
from ..gears.gearbox import Gearbox
from ..gears.observer import Observer
from ..gears.saved import without_gears
from ..kernels.device import check_device
from .cache_checks import check_quantizable
from .governor import Governor
from .mode import Mode
from .modes import mode_class
from .response import GearResponse
from .turns import in_turn, making, turn


def choose_mode(model: nn.Module, gearbox: Gearbox | Observer | None, mode: Mode | str | None) -> Mode:
    """The mode that is named; without a name telemetry-only for what cannot shift, else route.

    Raises:
        GearbxError: a mode that does not exist.
    """
    if isinstance(mode, Mode):
        return mode
    if mode is None:
        observed = isinstance(gearbox, Observer)
        quantized = gearbox is None and without_gears(model) and attached(model) is None
        mode = "telemetry-only" if observed or quantized else "route"
    return mode_class(mode)()


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    *,
    mode: Mode | str | None = None,
    gearbox: Gearbox | Observer | None = None,
    controller: Governor | None = None,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate text while the gearbox changes the precision of the weights.

    Several texts may be begun with one gearbox, in several threads as well: they take turns, and each keeps its gears.

    Args:
        model, tokenizer, prompt, max_tokens: as in `mlx_lm.stream_generate`, as are all further keywords.
        mode: how gears become tokens, such as `Lossless(draft=4)`: Route, Kickdown, Lossless, Pair, Static or
            TelemetryOnly, or its name for the default settings. Without one Route, or TelemetryOnly for a checkpoint
            that is quantized already.
        gearbox: without one, the gearbox of the model, else a new one with the default ladder; for a checkpoint
            that is quantized already, an Observer.
        controller: route and kickdown: a Governor, which caps the gears by speed and by the machine's state.

    Yields:
        GearResponse for each token.

    Raises:
        GearbxError: arguments that do not fit together; a gearbox that was made on another device.
    """
    if controller is not None and gearbox is None:
        gearbox = controller.gearbox
    chosen = choose_mode(model, gearbox, mode)
    with making:
        box = chosen.gearbox_for(model, gearbox)
    if kwargs.get("kv_bits") is not None:
        small, draft = getattr(chosen, "small_model", None), kwargs.get("draft_model")
        for each in (each for each in (model, small, draft) if each is not None):
            check_quantizable(each, kwargs["kv_bits"], kwargs.get("kv_group_size", 64), kwargs.get("max_kv_size"))
    if controller is not None:
        chosen.check_controller(controller, box, kwargs.get("draft_model") is not None)
    keywords = {"gearbox": box, "controller": controller, "max_tokens": max_tokens, **kwargs}
    if box is None:
        return chosen.stream(model, tokenizer, prompt, **keywords)
    check_device(box.device)
    with turn(box):
        responses = chosen.stream(model, tokenizer, prompt, **keywords)
    return in_turn(responses, box)


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
