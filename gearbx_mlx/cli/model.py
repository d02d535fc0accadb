"""The model. Names and defaults of flags are mlx-lm's where it has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..gears.ladder import DTYPES
from .device import device_flag
from .settings import Settings, flag


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Which model to load (None: the one that ships), and the type and the device to compute in."""

    title: ClassVar[str] = "model"

    model: str | None = flag(
        None, "Local directory or Hub repository. Default: the model that ships with gearbx-mlx.", named=True
    )
    trust_remote_code: bool = flag(False, "Enable trusting remote code for tokenizer", rare=True)
    adapter_path: str | None = flag(None, "Optional path for the trained adapter weights and config.", named=True)
    extra_eos_token: Sequence[str] = flag(
        (), "Add tokens to the list of eos tokens. Default: none", nargs="+", rare=True
    )
    dtype: str = flag(
        "auto",
        "Type to compute in. auto: the checkpoint's, but float32 where a CPU runs quantized gears.",
        choices=("auto", *DTYPES),
        rare=True,
    )
    pipeline: bool = flag(False, "On several ranks: each has some of the layers, not a part of every layer.", rare=True)
    device: str | None = device_flag()
