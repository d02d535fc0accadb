"""`TextModel`: the language model of a vision-language model of mlx-vlm, with mlx-lm's interface.

Every mode runs it, with images in the prompt.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError


class TextModel(nn.Module):
    """Language model of a vision-language model, for `Gearbox` and `stream_generate`.

    The layers of the vision encoder are not part of it, and keep their precision.

    Args:
        model: of mlx-vlm, with a `language_model`.

    Raises:
        GearbxError: a model without a `language_model`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
            raise GearbxError(f"{type(model).__name__}: has no language_model of mlx-vlm; pass the model itself")
        self.language_model = model.language_model
        object.__setattr__(self, "_whole", model)  # hidden from the modules
        object.__setattr__(self, "_seen", {})

    def prompt(self, input_ids: mx.array, pixel_values: mx.array | None = None, **inputs: Any) -> dict[str, Any]:
        """Return the keywords `prompt` and `input_embeddings` of the next call of `stream_generate`.

        Args:
            input_ids: tokens (1, n), with placeholders of the image.
            pixel_values, inputs: other results of `mlx_vlm.utils.prepare_inputs`.

        Raises:
            GearbxError: a batch of prompts.
        """
        if input_ids.shape[0] != 1:
            raise GearbxError(f"input_ids: must be one prompt, got a batch of {input_ids.shape[0]}; pass one at a time")
        inputs["mask"] = inputs.pop("attention_mask", None)
        embedded = self._whole.get_input_embeddings(input_ids, pixel_values, **inputs)
        features = embedded.to_dict()
        embeddings = features.pop("inputs_embeds")
        object.__setattr__(self, "_seen", {name: value for name, value in features.items() if value is not None})
        return {"prompt": input_ids[0], "input_embeddings": embeddings[0]}

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Return logits (B, N, V)."""
        if input_embeddings is None:
            return self.language_model(inputs, cache=cache).logits
        part = {"n_to_process": inputs.shape[1]} if inputs.shape[1] > 1 else {}  # cuts inputs of the whole prompt
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
