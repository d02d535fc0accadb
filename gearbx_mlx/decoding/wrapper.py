"""A model in another's place: mlx-lm calls a wrapper as it calls the model, and it decides which gear computes what.

`TextModel` is the language model of mlx-vlm's models, called as mlx-lm calls its own: every mode runs it, images in the
prompt.
"""

from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import does_model_support_input_embeddings

from ..errors import GearbxError
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..ranks.agreement import agreement_of
from .response import Step
from .sampling import reader_of

OF_MODULES = frozenset(name for name in vars(nn.Module) if not name.startswith("__"))  # parameters, update, ...


class ModelWrapper(nn.Module):
    """A model that decides for itself which gear computes what; everything else is the model's own.

    Parameters, layers, `args`, `make_cache` and all other attributes are those of the gearbox's model, under the same
    names, and changes to them are changes to the model.
    """

    def __init__(self, gearbox: Gearbox):
        object.__setattr__(self, "gearbox", gearbox)
        super().__init__()
        self["wrapped"] = gearbox.model  # where mlx-lm counts the bytes of a model, to warn of one that is too large
        self.step = Step(gearbox.ladder.top)
        """The latest step of one token."""
        self.reader = reader_of(gearbox)
        self.agreement = agreement_of(gearbox.model)
        self._takes_embeddings = does_model_support_input_embeddings(gearbox.model)

    def run(self, gear: Gear, inputs: mx.array, cache: Any, **kwargs: Any) -> mx.array:
        """Return the model's own logits (B, N, V), in a gear."""
        self.gearbox.shift(gear)
        return self.gearbox.model(inputs, cache=cache, **kwargs)

    def model_keywords(self, input_embeddings: mx.array | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords for the model. Raises GearbxError for embeddings that it does not take."""
        if input_embeddings is None:
            return kwargs
        if not self._takes_embeddings:
            raise GearbxError(f"{type(self.gearbox.model).__name__} takes no input embeddings; give tokens")
        return {**kwargs, "input_embeddings": input_embeddings}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not into the dictionary of parameters and layers

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.gearbox.model.__reduce_ex__(protocol)  # which says why it can be neither copied nor pickled

    def __getattr__(self, name: str) -> Any:
        if name == "gearbox":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self.gearbox.model, name)


for name in OF_MODULES:  # as properties of the class, they cost other attributes nothing, which a token reads often
    setattr(ModelWrapper, name, property(attrgetter(f"gearbox.model.{name}")))


class TextModel(nn.Module):
    """The language model of a model that sees, for `Gearbox` and `stream_generate`.

    The layers that read images do not belong to it, and keep their precision.

    Args:
        model: of mlx-vlm; it has a `language_model`.

    Raises:
        GearbxError: a model without a language model of its own.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
            raise GearbxError(
                f"{type(model).__name__} is not a model of mlx-vlm's with a language_model; give it as it is"
            )
        self.language_model = model.language_model
        object.__setattr__(self, "_whole", model)  # not one of the modules
        object.__setattr__(self, "_seen", {})

    def prompt(self, input_ids: mx.array, pixel_values: mx.array | None = None, **inputs: Any) -> dict[str, Any]:
        """Return the keywords `prompt` and `input_embeddings` for `stream_generate`, which is to run this prompt next.

        Args:
            input_ids: tokens (1, n), with the places of the image.
            pixel_values, inputs: what else `mlx_vlm.utils.prepare_inputs` returned.

        Raises:
            GearbxError: a batch of prompts.
        """
        if input_ids.shape[0] != 1:
            raise GearbxError(f"a text has one prompt, and this is a batch of {input_ids.shape[0]}; give one at a time")
        inputs["mask"] = inputs.pop("attention_mask", None)
        embedded = self._whole.get_input_embeddings(input_ids, pixel_values, **inputs)
        further = embedded.to_dict()
        embeddings = further.pop("inputs_embeds")
        object.__setattr__(self, "_seen", {name: value for name, value in further.items() if value is not None})
        return {"prompt": input_ids[0], "input_embeddings": embeddings[0]}

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Logits (B, N, V)."""
        if input_embeddings is None:
            return self.language_model(inputs, cache=cache).logits
        part = {"n_to_process": inputs.shape[1]} if inputs.shape[1] > 1 else {}  # to cut what belongs to all the prompt
        return self.language_model(inputs, inputs_embeds=input_embeddings, cache=cache, **self._seen, **part).logits

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        return make_prompt_cache(self.language_model)

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.language_model.layers
        return layers

    @property
    def args(self) -> Any:
        return self.language_model.args
