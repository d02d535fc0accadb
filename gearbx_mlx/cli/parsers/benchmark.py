"""Flags of `benchmark`, and the settings that they become: a group for each of the three things that it measures."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ...errors import GearbxError
from ...gears.ladder import Ladder
from ..settings import Settings, add_flags, flag, settings_of

MOST = 100_000  # trials or tokens: more take days
HEAD = 64  # width of an attention head of the random Llama
GROUP = 64


@dataclass(frozen=True)
class KernelBenchmark(Settings):
    """Matrix times vector, in every format. rows, cols: of the matrix; megabytes: of weights, read in a trial."""

    what: ClassVar[str] = "kernels"

    rows: int = flag(4096, "Rows of the matrix.", least=1, most=2**20)
    cols: int = flag(4096, "Columns of the matrix.", least=GROUP)
    vectors: int = flag(1, "Vectors in one call.", least=1, most=2**10)
    megabytes: int = flag(256, "Weights read in a trial.", least=1, most=2**20)
    native_only: bool = flag(False, "Leave MLX's own kernels out.")
    trials: int = flag(5, "Counted trials.", least=1, most=MOST)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)

    def __post_init__(self) -> None:
        if self.cols < GROUP or self.cols % GROUP:
            raise GearbxError(f"--cols is {self.cols}; give a multiple of {GROUP}")
        super().__post_init__()


@dataclass(frozen=True)
class ModelBenchmark(Settings):
    """What is decoded. model: None means a random Llama of `shape`; gears: None means the checkpoint's, or 4,8,16."""

    model: str | None = flag(None, "Local directory or Hub repository. Default: a random Llama of --shape", named=True)
    shape: str = flag("1024x8", "WIDTHxLAYERS of the random Llama.")
    gears: str | None = flag(None, "Bits of the gears. Default: those of a geared checkpoint, or 4,8,16")
    tokens: int = flag(16, "Tokens in a trial.", least=1, most=MOST)
    trials: int = flag(5, "Counted trials.", least=1, most=MOST)
    json: str | None = flag(None, "Write all rows as JSON.", metavar="FILE", named=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_shape(self.shape)
        if self.gears is not None:
            Ladder.parse(self.gears)


@dataclass(frozen=True)
class DecodeBenchmark(ModelBenchmark):
    """Tokens per second of each gear. context: tokens in the KV cache before the first one."""

    what: ClassVar[str] = "decode"

    context: int = flag(0, "Tokens in the KV cache before the first one. Default: 0", least=0)


@dataclass(frozen=True)
class RoutingBenchmark(ModelBenchmark):
    """What routing adds to a token."""

    what: ClassVar[str] = "routing"


Benchmark = KernelBenchmark | DecodeBenchmark | RoutingBenchmark
KINDS: dict[str, type[Benchmark]] = {kind.what: kind for kind in (KernelBenchmark, DecodeBenchmark, RoutingBenchmark)}


def parse_shape(text: str) -> tuple[int, int]:
    """Width and layers of the random Llama.

    Raises:
        GearbxError: what is not of the form WIDTHxLAYERS, or a width that its heads do not divide.
    """
    try:
        width, layers = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise GearbxError(f"--shape '{text}' is not WIDTHxLAYERS, such as 1024x24") from error
    if width % (4 * HEAD) or width < 4 * HEAD or layers < 1:
        raise GearbxError(f"--shape '{text}': give a width that is a multiple of {4 * HEAD}, and 1 layer or more")
    return width, layers


def setup_arg_parser() -> argparse.ArgumentParser:
    description = "Time kernels and gears on this machine."
    parser = argparse.ArgumentParser(prog="python -m gearbx_mlx.benchmark", description=description)
    commands = parser.add_subparsers(dest="what", required=True)
    for what, kind in KINDS.items():
        add_flags(commands.add_parser(what, help=kind.__doc__, argument_default=argparse.SUPPRESS), kind)
    return parser


def parse() -> Benchmark:
    flags = setup_arg_parser().parse_args()
    return settings_of(KINDS[flags.what], flags)
