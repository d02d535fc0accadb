"""`TextModel`: the language model of mlx-vlm's models, called as mlx-lm calls its own.

Every mode runs it, images in the prompt.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError


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
