"""Two loaded models that take turns, and the summary of what they wrote."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import get_total_parameters

from ..compat.arrays import dtype_name
from ..decoding.pair import Pair, bytes_read
from ..gears.activations import compute_in, model_dtype, stored_dtype
from ..gears.discovery import is_quantized, vocabulary
from ..loading import load_small, model_name
from ..routing.pair import NAMES, parameter_ratio
from ..telemetry.summary import Tally, summarize
from .loaded import load_model, trust
from .model import ModelSettings
from .results import Speed
from .room import warn_of_pair


@dataclass(frozen=True)
class LoadedPair:
    """Two loaded models and their figures: (small, large) each."""

    small: nn.Module
    large: nn.Module
    tokenizer: Any
    config: dict

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.small, self.large

    @property
    def vocab_size(self) -> int:
        return min(vocabulary(model) for model in self.models)

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters; quantized ones count as the weights that they stand for."""
        small, large = (int(get_total_parameters(model)) for model in self.models)
        return small, large

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes that a token reads, in the type of the checkpoint."""
        return bytes_read(self.small), bytes_read(self.large)


def load_pair(settings: ModelSettings, small_model: str, chat_template: str = "") -> LoadedPair:
    """Both models as loaded, in the type that --dtype asks for.

    Raises:
        GearbxError: a model that cannot be loaded, or another tokenizer.
    """
    warn_of_pair(small_model, settings.model)
    large, tokenizer, config = load_model(settings, chat_template)
    small = load_small(small_model, tokenizer, **trust(settings.trust_remote_code))
    for model in (small, large):
        compute_in(model, settings.dtype, is_quantized(model))
    return LoadedPair(small, large, tokenizer, config)


def summary_of_pair(
    names: tuple[str, str | None], pair: LoadedPair, mode: Pair, tally: Tally, speed: Speed, peak_memory: int
) -> dict[str, Any]:
    """The summary of one run.

    Args:
        names: of the small and the large model, as given.
        mode: with its threshold.
        peak_memory: bytes.
    """
    read, parameters = dict(zip(NAMES, pair.weight_bytes)), dict(zip(NAMES, pair.parameters))
    bits = {name: 8 * read[name] / parameters[name] for name in NAMES}
    return summarize(
        tally,
        model=model_name(names[1]),
        small_model=names[0],
        mode=mode.name,
        ladder=[{"name": name, "bits": bits[name], "bytes_per_weight": bits[name] / 8} for name in NAMES],
        bits_per_weight=bits,
        weight_bytes=read,
        of_mode=mode.summary(tally),
        parameters=parameters,
        parameter_ratio=parameter_ratio(tally.mean(tally.gear_tokens["large"]), pair.parameters),
        threshold_bits=mode.threshold,
        window=mode.window,
        min_gear_duration=mode.min_gear_duration,
        tokens_per_second=speed.tokens_per_second,
        prompt_tokens=speed.prompt_tokens,
        prompt_tokens_per_second=speed.prompt_tokens_per_second,
        peak_memory_bytes=peak_memory,
        compute_dtype=dtype_name(model_dtype(pair.large)),
        storage_dtype=dtype_name(stored_dtype(pair.large)),
    )
