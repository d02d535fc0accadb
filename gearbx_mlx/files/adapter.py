"""The directory of an adapter, as mlx-lm's `lora` command writes it: settings and arrays."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from ..errors import GearbxError
from .model_directory import check_regular, count_arrays
from .reading import parse_json, read_as, typed, unreadable

ARRAYS, SETTINGS = "adapters.safetensors", "adapter_config.json"
REMEDY = "give the directory that mlx_lm.lora wrote"
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal["lora", "dora", "full"]


class Lora(Struct, frozen=True):
    """rank: r. scale: of the product. keys: names of the adapted layers; None: all that mlx-lm can adapt."""

    rank: Annotated[int, Meta(ge=1, le=2**16)]
    scale: float
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    keys: Sequence[str] | None = None


class Adapter(Struct, frozen=True):
    """The settings of an adapter. num_layers: blocks that it changes, counted from the last one; -1 and 0: all."""

    fine_tune_type: Kind = "lora"
    num_layers: Annotated[int, Meta(ge=-1, le=2**16)] = -1
    lora_parameters: Lora | None = None

    def __post_init__(self) -> None:
        if self.fine_tune_type != "full" and self.lora_parameters is None:
            raise GearbxError("lora_parameters is missing")


def read_adapter(directory: Path) -> Adapter:
    """The settings of an adapter, whose files are complete.

    Raises:
        GearbxError: no such directory, a pipe or a device in it, files that are missing or damaged.
    """
    try:
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "the adapter path does not exist"
            raise GearbxError(f"{directory}: {what}; {REMEDY}")
        check_regular(directory)
        for name in (ARRAYS, SETTINGS):
            if not os.path.lexists(directory / name):
                raise GearbxError(f"{directory}: no {name} there; {REMEDY}")
        count_arrays(directory, ARRAYS)
    except OSError as error:
        raise unreadable(directory, error) from error
    what = "the settings of an adapter"
    return read_as(directory / SETTINGS, lambda text: typed(parse_json(text), Adapter), what, REMEDY)
