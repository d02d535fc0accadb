"""Flags that name a model. Names and defaults are mlx-lm's where it has them."""

import argparse
from dataclasses import dataclass

from ..gears.names import DTYPES
from .settings import Settings, name, one_of


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Which model to load (None: the one that ships), and the type to compute in."""

    model: str | None = name()
    trust_remote_code: bool = False
    adapter_path: str | None = name()
    extra_eos_token: tuple[str, ...] | list[str] = ()
    dtype: str = one_of("auto", "auto", *DTYPES)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="Local directory or Hub repository. Default: the model that ships with gearbx-mlx."
    )
    group.add_argument("--trust-remote-code", action="store_true", help="Enable trusting remote code for tokenizer")
    group.add_argument("--adapter-path", help="Optional path for the trained adapter weights and config.")
    group.add_argument("--extra-eos-token", nargs="+", help="Add tokens to the list of eos tokens.")
    group.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        help="Type to compute in. auto: the checkpoint's, but float32 where a CPU runs quantized gears. Default: auto",
    )
