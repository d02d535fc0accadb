"""Models of mlx-vlm: an image in the prompt, and the language model in gears."""

import mlx.core as mx
import pytest

from gearbx_mlx import Gearbox, Kickdown, Lossless, Route, Static, TextModel, stream_generate

pytest.importorskip("mlx_vlm", reason="MODELS OF MLX-VLM WERE NOT CHECKED: pip install '.[vlm]'")

pytestmark = pytest.mark.slow  # where CI installs it

IMAGE, START = 120, 121  # tokens
LANGUAGE = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2}
LANGUAGE |= {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 128}
LANGUAGE |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}


def seeing_model():
    """A random qwen2_vl that reads images of 4 x 4 patches."""
    from mlx_vlm.models import qwen2_vl

    mx.random.seed(0)
    vision = qwen2_vl.VisionConfig(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2.0)
    text = qwen2_vl.TextConfig(model_type="qwen2_vl", **LANGUAGE)
    tokens = {"image_token_id": IMAGE, "video_token_id": 122, "vision_start_token_id": START}
    model = qwen2_vl.Model(qwen2_vl.ModelConfig(text, vision, "qwen2_vl", **tokens))
    mx.eval(model.parameters())
    return model


def inputs(seed: int = 0) -> dict[str, mx.array]:
    """A prompt around an image of four tokens."""
    pixels = mx.random.normal((16, 3 * 2 * 4 * 4), key=mx.random.key(seed))
    ids = mx.array([[1, 5, START, *[IMAGE] * 4, 9, 2, 7]])
    grid = mx.array([[1, 4, 4]])
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mx.ones_like(ids), "image_grid_thw": grid}


def written(text, tokenizer, mode, seed: int = 0, **keywords) -> list[int]:
    """Tokens of a text; random logits never end one."""
    prompt = text.prompt(**inputs(seed))
    responses = stream_generate(text, tokenizer, max_tokens=12, mode=mode, **prompt, **keywords)
    return [response.token for response in responses]


def test_top_gear_output_equals_mlx_vlm(tokenizer):
    from mlx_vlm.generate import generate_step

    model, given = seeing_model(), inputs()
    ids, pixels, mask = (given.pop(name) for name in ("input_ids", "pixel_values", "attention_mask"))
    steps = generate_step(ids, model, pixels, mask, **given, max_tokens=12, temperature=0.0)
    expected = [int(token) for token, _ in steps]
    text = TextModel(model)
    gearbox = Gearbox(text, "4,16")
    assert written(text, tokenizer, Static("high"), gearbox=gearbox) == expected
    assert written(text, tokenizer, Static("high"), prefill_step_size=3, gearbox=gearbox) == expected
    assert written(text, tokenizer, Lossless(draft_length=3), gearbox=gearbox) == expected
    assert written(text, tokenizer, Static("high"), seed=1, gearbox=gearbox) != expected  # it sees


def test_route_and_kickdown_shift_over_an_image(tokenizer):
    text = TextModel(seeing_model())
    gearbox = Gearbox(text, "4,16")
    gears = []
    for mode in (Route(thresholds=[0.0], min_gear_duration=1, initial_gear="low"), Kickdown(thresholds=[0.0])):
        prompt = text.prompt(**inputs())
        responses = stream_generate(text, tokenizer, max_tokens=8, mode=mode, gearbox=gearbox, **prompt)
        gears.append([response.gear for response in responses])
    assert gears == [["low"] * 2 + ["high"] * 6, ["high"] * 8]


def test_image_layers_keep_their_precision():
    model = seeing_model()
    gearbox = Gearbox(TextModel(model), "4,16", kernels="mlx")
    before = {path: type(module) for path, module in model.vision_tower.named_modules()}
    gearbox.shift("low")
    assert {path: type(module) for path, module in model.vision_tower.named_modules()} == before
    assert all(layer.path.startswith("language_model.") for layer in gearbox.layers)
    assert type(model.language_model.model.layers[0].mlp.down_proj).__name__ == "QuantizedLinear"
