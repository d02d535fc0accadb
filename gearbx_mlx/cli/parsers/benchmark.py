"""Flags of `benchmark`, and the settings that they become: a group for each of the three things that it measures."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from ...errors import GearbxError
from ...gears.ladder import Ladder
from ..settings import Settings, name, new_parser, number, settings_of

MOST = 100_000  # trials or tokens: more take days
HEAD = 64  # width of an attention head of the random Llama
GROUP = 64


@dataclass(frozen=True)
class KernelBenchmark(Settings):
    """Matrix times vector, in every format. rows, cols: of the matrix; megabytes: of weights, read in a trial."""

    what: ClassVar[str] = "kernels"

    rows: int = number(4096, 1, 2**20)
    cols: int = number(4096, GROUP)
    vectors: int = number(1, 1, 2**10)
    megabytes: int = number(256, 1, 2**20)
    native_only: bool = False
    trials: int = number(5, 1, MOST)
    json: str | None = name()

    def __post_init__(self) -> None:
        if self.cols < GROUP or self.cols % GROUP:
            raise GearbxError(f"--cols is {self.cols}; give a multiple of {GROUP}")
        super().__post_init__()


@dataclass(frozen=True)
class ModelBenchmark(Settings):
    """What is decoded. model: None means a random Llama of `shape`; gears: None means the checkpoint's, or 4,8,16."""

    model: str | None = name()
    shape: str = "1024x8"
    gears: str | None = None
    tokens: int = number(16, 1, MOST)
    trials: int = number(5, 1, MOST)
    json: str | None = name()

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_shape(self.shape)
        if self.gears is not None:
            Ladder.parse(self.gears)


@dataclass(frozen=True)
class DecodeBenchmark(ModelBenchmark):
    """Tokens per second of each gear. context: tokens in the KV cache before the first one."""

    what: ClassVar[str] = "decode"

    context: int = number(0, 0)


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
    parser = new_parser("benchmark", "Time kernels and gears on this machine.")
    commands = parser.add_subparsers(dest="what", required=True)
    absent = argparse.SUPPRESS  # a flag that is not given is not in the result
    kernels = commands.add_parser(
        "kernels", help="Matrix times vector, for each format, against the read bandwidth.", argument_default=absent
    )
    kernels.add_argument("--rows", type=int, help="Default: 4096")
    kernels.add_argument("--cols", type=int, help="Default: 4096")
    kernels.add_argument("--vectors", type=int, help="In one call. Default: 1")
    kernels.add_argument("--megabytes", type=int, help="Weights read in a trial. Default: 256")
    kernels.add_argument("--native-only", action="store_true", help="Leave MLX's own kernels out.")
    decode = commands.add_parser("decode", help="Tokens per second of each gear.", argument_default=absent)
    decode.add_argument("--context", type=int, help="Tokens in the KV cache before the first one. Default: 0")
    routing = commands.add_parser(
        "routing", help="What entropy, monitor, gate and record add to a token.", argument_default=absent
    )
    for command in (decode, routing):
        command.add_argument("--model", help="Local directory or Hub repository. Default: a random Llama of --shape")
        command.add_argument("--shape", help="WIDTHxLAYERS of the random Llama. Default: 1024x8")
        command.add_argument("--gears", help="Default: those of a geared checkpoint, or 4,8,16")
        command.add_argument("--tokens", type=int, help="Tokens in a trial. Default: 16")
    for command in (kernels, decode, routing):
        command.add_argument("--trials", type=int, help="Counted trials. Default: 5")
        command.add_argument("--json", metavar="FILE", help="Write all rows as JSON.")
    return parser


def parse() -> Benchmark:
    flags = setup_arg_parser().parse_args()
    return settings_of(KINDS[flags.what], flags)
