"""The entry for programs: mlx-lm's stream_generate and generate, with gears."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np

from ..gears.gearbox import Gearbox, Observer, attached
from ..gears.ladder import check_kv_gears
from ..gears.saved import without_gears
from ..kernels.device import check_device
from .cache_checks import check_quantizable
from .governor import Governor
from .known_vocabulary import vocabulary_of
from .kv_gears import cache_in_gears, check_mode
from .mode import Mode
from .modes import mode_class
from .prompt import check_known
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
    kv_gears: str | Sequence[int] | None = None,
    kv_gear: int | None = None,
    **kwargs: Any,
) -> Iterator[GearResponse]:
    """Generate text while the gearbox changes the precision of the weights.

    Several texts may be begun with one gearbox, in several threads as well: they take turns, and each keeps its gears.

    Args:
        model, tokenizer, prompt, max_tokens: as in `mlx_lm.stream_generate`, as are all further keywords.
        mode: how gears become tokens, such as `Lossless(draft=4)`: Route, Kickdown, Lossless, Pair, Static or
            TelemetryOnly, or its name for the default settings. Without one Route, or TelemetryOnly for a checkpoint
            that is quantized already.
        gearbox: without one, the model's, else a new one with the default ladder; for a quantized model, an Observer.
        controller: route and kickdown: a Governor, which caps the gears by speed and by the machine's state.
        kv_gears: bits of the KV cache's gears, such as "4,16" (docs/kv_gears.md), which a `prompt_cache` gets in place.
        kv_gear: bits of the one that all passes read; without it, it follows the gear of the weights.

    Yields:
        GearResponse for each token.

    Raises:
        GearbxError: arguments that do not fit together; unknown tokens; a gearbox of another device.
    """
    if controller is not None and gearbox is None:
        gearbox = controller.gearbox
    chosen = choose_mode(model, gearbox, mode)
    with making:
        box = chosen.gearbox_for(model, gearbox)
    check_tokens(prompt, box)
    kwargs |= cache_keywords(chosen, model, box, kv_gears, kv_gear, kwargs)
    check_kv_bits((model, getattr(chosen, "small_model", None), kwargs.get("draft_model")), kwargs)
    if controller is not None:
        chosen.check_controller(controller, box, kwargs.get("draft_model") is not None)
    keywords = {"gearbox": box, "controller": controller, "max_tokens": max_tokens, **kwargs}
    if box is None:
        return chosen.stream(model, tokenizer, prompt, **keywords)
    check_device(box.device)
    with turn(box):
        responses = chosen.stream(model, tokenizer, prompt, **keywords)
    return in_turn(responses, box)


def check_tokens(prompt: Any, gearbox: Gearbox | Observer | None) -> None:
    """Raises GearbxError for a prompt of tokens one of which the model does not know."""
    if gearbox is not None and not isinstance(prompt, str):
        check_known("prompt", np.array(prompt, int).reshape(-1).tolist(), vocabulary_of(gearbox))


def cache_keywords(
    mode: Mode,
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    bits: str | Sequence[int] | None,
    fixed: int | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The `prompt_cache` for mlx-lm where the KV cache has gears; nothing without.

    Raises:
        GearbxError: gears that do not go with the mode, the other keywords or the model.
    """
    check_kv_gears(bits, fixed, kwargs.get("kv_bits"), kwargs.get("draft_model"))
    if bits is None:
        return {}
    check_mode(mode.name, fixed)
    given, size = kwargs.get("prompt_cache"), kwargs.get("max_kv_size")
    return {"prompt_cache": cache_in_gears(model, gearbox, bits, fixed, given, size)}


def check_kv_bits(models: Sequence[nn.Module | None], kwargs: Mapping[str, Any]) -> None:
    """Raises GearbxError where the KV cache of one of the models cannot be quantized, if that is asked for."""
    for each in models:
        if each is not None and kwargs.get("kv_bits") is not None:
            check_quantizable(each, kwargs["kv_bits"], kwargs.get("kv_group_size", 64), kwargs.get("max_kv_size"))


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
