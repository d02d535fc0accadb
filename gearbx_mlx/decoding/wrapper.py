"""A model wrapper: mlx-lm calls it as it calls the model, and it decides which gear computes what."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import does_model_support_input_embeddings

from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..ranks.agreement import agreement_of
from .entropy import fast_entropy
from .step import Step

OF_MODULES = frozenset(name for name in vars(nn.Module) if not name.startswith("__"))  # parameters, update, ...


class ModelWrapper(nn.Module):
    """A model that decides for itself which gear computes what; everything else is the model's own.

    Parameters, layers, `args`, `make_cache` and all other attributes are those of the model, under the same names, and
    changes to them are changes to the model.

    Args:
        gearbox: of the model.
    """

    def __init__(self, gearbox: Gearbox):
        object.__setattr__(self, "gearbox", gearbox)
        super().__init__()
        self.step = Step(gearbox.ladder.top)
        """The latest step of one token."""
        self.entropy = fast_entropy(gearbox)
        self.agreement = agreement_of(gearbox.model)
        self._takes_embeddings = does_model_support_input_embeddings(gearbox.model)

    def run(self, gear: Gear, inputs: mx.array, cache: Any, **kwargs: Any) -> mx.array:
        """The model's own logits (B, N, V), in a gear."""
        self.gearbox.shift(gear)
        return self.gearbox.model(inputs, cache=cache, **kwargs)

    def passes(self, *gears: Gear) -> tuple[int, ...]:
        """Passes in each gear of the ladder, counted from those that ran."""
        return tuple(sum(gear == ran for ran in gears) for gear in self.gearbox.ladder)

    def model_keywords(self, input_embeddings: mx.array | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords for the model. Raises GearbxError for embeddings that it does not take."""
        if input_embeddings is None:
            return kwargs
        if not self._takes_embeddings:
            raise GearbxError(f"{type(self.gearbox.model).__name__} takes no input embeddings; give tokens")
        return {**kwargs, "input_embeddings": input_embeddings}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not into the dictionary of parameters and layers

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.gearbox.model, name) if name in OF_MODULES else super().__getattribute__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.gearbox.model.__reduce_ex__(protocol)  # which says why it can be neither copied nor pickled

    def __getattr__(self, name: str) -> Any:
        if name == "gearbox":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self.gearbox.model, name)
