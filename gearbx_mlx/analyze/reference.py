"""Agreement of a checkpoint with its original on a text, for `analyze --reference`."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.nn as nn
import numpy as np

from ..bit_selection.sensitivity import CALIBRATION
from ..cli import terminal
from ..cli.build import load_model
from ..cli.flags import ModelSettings
from ..decoding.sampling import reader_of
from ..errors import GearbxError
from ..evaluation.predictions import check_windows, choices_along, context_for, read_documents, windows_of
from ..gears.discovery import is_quantized
from ..gears.gearbox import in_one_gear
from ..gears.in_place import own_codes
from ..gears.ladder import DENSE
from ..loading import model_name
from ..telemetry.agreement import Choices, TokenAgreement, agreement_of
from . import ReferenceSettings


def measured_agreement(checkpoint: ModelSettings, settings: ReferenceSettings) -> TokenAgreement:
    """Return how often a checkpoint chooses its original's token. One of both models is in memory at a time.

    Raises:
        GearbxError: a text that cannot be used, or a model that cannot be loaded, or models of different tokenizers.
    """
    assert settings.reference is not None
    text = settings.data or str(CALIBRATION)
    original = replace(checkpoint, model=settings.reference, adapter_path=None)
    documents = read_documents(Path(text))
    read = partial(choices_of, documents=documents, tokens=settings.tokens, text=text)
    mine, windows, bits = read(checkpoint)
    theirs, others, original_bits = read(original)
    if windows != others:
        raise GearbxError(
            f"--reference {settings.reference}: must split the text as {model_name(checkpoint.model)} does, got other "
            "tokens; use its original"
        )
    return agreement_of(
        mine,
        theirs.token,
        np.array([token for window in windows for token in window[1:]]),
        model=model_name(checkpoint.model),
        reference=settings.reference,
        bits=(bits, original_bits),
        data=text,
    )


def choices_of(
    settings: ModelSettings, documents: list[str], tokens: int, text: str
) -> tuple[Choices, list[list[int]], int | None]:
    """Return a model's choices along a text, the windows of the text, and the bits of the model's weights."""
    model, tokenizer, config = load_model(settings)
    windows = windows_of(tokenizer, documents, context_for(None, config), tokens, text)
    check_windows(windows, model, text)
    bits = bits_of(model)
    gearbox = in_one_gear(model, settings.dtype)
    with terminal.progress_bar() as progress:
        tracked = progress.track(windows, description=model_name(settings.model))
        return choices_along(model, tracked, reader_of(gearbox)), windows, bits


def bits_of(model: nn.Module) -> int | None:
    """Return the bits of most of a model's weights; None for codes of an unknown kind."""
    codes = own_codes(model)
    if codes is not None:
        return codes.bits
    return None if is_quantized(model) else DENSE
