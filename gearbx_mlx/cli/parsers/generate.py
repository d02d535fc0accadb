"""Flags and settings of gearbx_mlx.generate."""

import argparse
from dataclasses import dataclass

from ...errors import GearbxError
from ..controller import ControllerSettings, add_controller_flags
from ..floors import FloorSettings, add_floor_flags
from ..gate import AUTO, GateSettings, RoutingSettings, add_routing_flags
from ..gears import GearFlags, LayoutSettings, add_gear_flags
from ..model import ModelSettings, add_model_flags
from ..modes import ModeSettings, add_mode_flags
from ..output import OutputSettings, add_output_flags
from ..pair import add_pair_flags
from ..prompt import PromptSettings, add_prompt_flags
from ..sampling import CacheSettings, SamplingSettings, add_cache_flags, add_sampling_flags
from ..settings import Settings, command_settings, flag_of, name, new_parser

DEFAULT_PROMPT = (
    "A baker makes 36 rolls in the morning and half as many in the afternoon. "
    "She sells each roll for $2. How much money does she earn that day?"
)


@dataclass(frozen=True)
class InputSettings(Settings):
    """What is to be answered, how the answer begins, and what was read before."""

    prompt: str = DEFAULT_PROMPT
    prefill_response: str | None = None
    prompt_cache_file: str | None = name()


@dataclass(frozen=True)
class GenerateSettings:
    model: ModelSettings
    prompt: PromptSettings
    input: InputSettings
    sampling: SamplingSettings
    cache: CacheSettings
    layout: LayoutSettings
    gears: GearFlags
    floors: FloorSettings
    routing: RoutingSettings
    gate: GateSettings
    mode: ModeSettings
    controller: ControllerSettings
    output: OutputSettings

    def __post_init__(self) -> None:
        if self.mode.small_model is not None:
            self.check_pair()

    def check_pair(self) -> None:
        """Raises GearbxError for flags of a single model."""
        single = {
            "draft_model": self.cache.draft_model,
            "prompt_cache_file": self.input.prompt_cache_file,
            "gears": self.layout.gears,
            "curve": self.mode.curve,
            "draft_length": self.mode.draft_length,
            "telemetry_only": self.mode.telemetry_only,
            "gear": self.mode.gear,
        }
        for flag, value in single.items():
            if value:
                raise GearbxError(f"{flag_of(flag)} is of one model; leave it out with --small-model")
        if self.routing.initial_gear not in (AUTO, "small", "large"):
            raise GearbxError(f"--initial-gear {self.routing.initial_gear}: a pair has {AUTO}, small, large")


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "generate",
        "Generate text with a model that changes the precision of its weights while it writes.",
        "In mode route, a shift acts two tokens after the one that caused it: mlx-lm computes one token ahead. In mode "
        "lossless, 'token for token' means: as --mode static writes with the same gears, kernels and type. Without "
        "native kernels (on a GPU, say) several rows are rounded otherwise than one, so that a near-tie between two "
        "tokens may end differently; the summary counts near-ties.",
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    prompt = parser.add_argument_group("input")
    prompt.add_argument("--prompt", "-p", help="Message to be processed ('-' reads from stdin)")
    prompt.add_argument("--prefill-response", help="Prefill response to be used for the chat template")
    prompt.add_argument("--prompt-cache-file", help="A file containing saved KV caches to avoid recomputing them")
    add_sampling_flags(parser)
    add_cache_flags(parser)
    add_gear_flags(parser)
    add_floor_flags(parser)
    add_routing_flags(parser)
    add_mode_flags(parser)
    add_pair_flags(parser)
    add_controller_flags(parser)
    add_output_flags(parser)
    return parser


def parse() -> GenerateSettings:
    """Raises GearbxError for flags that no model can be run with."""
    return command_settings(GenerateSettings, vars(setup_arg_parser().parse_args()))
