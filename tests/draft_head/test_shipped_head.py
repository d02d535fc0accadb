"""The head that ships with the demo model, on the model's answers to problems that nobody trained on."""

import json

import mlx.core as mx
import numpy as np

from gearbx_mlx import stream_generate
from gearbx_mlx.draft_head.answers import Answer
from gearbx_mlx.draft_head.layer import HeadShape
from gearbx_mlx.draft_head.target import HeadTarget
from gearbx_mlx.draft_head.training import Trainer, tokens_a_round
from gearbx_mlx.loading import DEMO_MODEL

SHIPPED = DEMO_MODEL / "draft_head"


def test_shipped_head_drafts_most_tokens_right(fresh_demo, held_out):
    model, tokenizer = fresh_demo.model, fresh_demo.tokenizer
    answers = []
    for number, row in enumerate(held_out[:6]):
        message = [{"role": "user", "content": row["question"]}]
        prompt = list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        written = [each.token for each in stream_generate(model, tokenizer, prompt, 40, mode="telemetry-only")]
        answers.append(Answer(number, prompt + written, len(prompt), 0.0))
    config, arrays = json.loads((SHIPPED / "config.json").read_text()), mx.load(str(SHIPPED / "model.safetensors"))
    layer, form = config["transformer_layer_config"], config["quantization"]
    names = HeadShape.__dataclass_fields__
    shape = HeadShape(**{name: {**layer, **config}[name] for name in names})
    tokens = np.array(arrays["d2t"]) + np.arange(shape.draft_vocab_size)
    target = HeadTarget(model, "demo")
    trainer = Trainer(target, shape, tokens, answers, answers)
    trainer.weights = {name: dense(arrays, name, form) for name in trainer.weights}
    trainer.rows = dense(arrays, "lm_head.weight", form)
    target.scale = mx.ones_like(target.scale)  # part of the saved matrix
    places = trainer.test()
    assert places[0] > 0.5
    assert tokens_a_round(places) > 1.8


def dense(arrays, name: str, form: dict) -> mx.array:
    """An array of a head, not quantized."""
    path = name.removesuffix(".weight")
    if f"{path}.scales" not in arrays:
        return arrays[name].astype(mx.float32)
    parts = (arrays[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
    return mx.dequantize(*parts, form["group_size"], form["bits"]).astype(mx.float32)


def test_shipped_head_is_small():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 400_000
