"""What can stand in a model's place: mlx-lm calls it as it would call the model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import does_model_support_input_embeddings

from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear


@dataclass(frozen=True)
class Draft:
    """A token that a gear proposed for the place where the top gear then computed its own."""

    token: int
    gear: Gear


@dataclass(frozen=True)
class Step:
    """How the logits of one token came about.

    gear: that they are of. entropies: bits, of the distributions that decided about it, in the order in which they
    were seen. passes: over the weights, in each gear of the ladder. weight_bytes: that those passes read. draft: what
    was drafted in this place. drafted: tokens drafted in this step. noise: how much rounding may move a logit, where
    several positions were computed in one pass. accepted: whether the token is the one that was drafted.
    """

    gear: Gear
    entropies: tuple[float, ...] = ()
    passes: tuple[int, ...] = ()
    weight_bytes: int = 0
    draft: Draft | None = None
    drafted: int = 0
    noise: mx.array | None = None
    accepted: bool = False

    def given(self, token: int) -> "Step":
        """The step once its token is known: one that was drafted is the draft gear's."""
        if self.draft is None or self.draft.token != token:
            return self
        return replace(self, gear=self.draft.gear, accepted=True)


class ModelWrapper(nn.Module):
    """A model that decides for itself which gear computes what; all else is the model's own.

    Parameters, layers, `args`, `make_cache` and whatever else is asked for are those of the model, under the same
    names, and changes to them are changes to the model.

    Args:
        gearbox: of the model.
    """

    def __init__(self, gearbox: Gearbox):
        super().__init__()
        self.gearbox = gearbox
        self.step = Step(gearbox.ladder.top)
        """The latest step of one token."""
        self._takes_embeddings = does_model_support_input_embeddings(gearbox.model)

    def run(self, gear: Gear, inputs: mx.array, cache: Any, **kwargs: Any) -> mx.array:
        """The model's own logits (B, N, V), in a gear."""
        self.gearbox.shift(gear)
        return self.gearbox.model(inputs, cache=cache, **kwargs)

    def passes(self, *gears: Gear) -> tuple[int, ...]:
        """Passes in each gear of the ladder, counted from those that ran."""
        return tuple(sum(gear == ran for ran in gears) for gear in self.gearbox.ladder)

    def further(self, input_embeddings: mx.array | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords for the model. Raises GearbxError for embeddings that it does not take."""
        if input_embeddings is None:
            return kwargs
        if not self._takes_embeddings:
            raise GearbxError(f"{type(self.gearbox.model).__name__} takes no input embeddings; give tokens")
        return {**kwargs, "input_embeddings": input_embeddings}

    # A module keeps its parameters and layers in the dictionary that it is: this one has the model's.
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "gearbox":  # not yet set
            raise AttributeError(name)
        return getattr(self.gearbox.model, name)

    def __getitem__(self, key: str) -> Any:
        return self.gearbox.model[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.gearbox.model[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self.gearbox.model

    def __iter__(self) -> Iterator[str]:
        return iter(self.gearbox.model)

    def __len__(self) -> int:
        return len(self.gearbox.model)

    def __bool__(self) -> bool:
        return True

    def keys(self) -> Any:
        return self.gearbox.model.keys()

    def values(self) -> Any:
        return self.gearbox.model.values()

    def items(self) -> Any:
        return self.gearbox.model.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self.gearbox.model.get(key, default)
