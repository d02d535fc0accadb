"""A codebook gear is a gear like any other: low in a ladder, drafting, compared, converted."""

import json

import mlx.core as mx
import pytest
from conftest import PROMPT, save_model, tiny_model
from mlx_lm.generate import generate_step

from gearbx_mlx import Gearbox
from gearbx_mlx.decoding.lossless_model import LosslessModel
from gearbx_mlx.routing.acceptance import FixedLength

FORMATS = ["codebook", "codebook-library"]


def test_low_in_a_ladder(command, tmp_path):
    trace = tmp_path / "trace.jsonl"
    done = command(
        *("generate", "--format", "codebook", "--gears", "4,16", "--manage", "attention"),
        *("--thresholds", "1.0", "--max-tokens", "24", "--trace", trace),
    )
    assert done.status == 0, done.err
    gears = [json.loads(line)["gear"] for line in trace.read_text().splitlines()]
    assert set(gears) == {"low", "high"}


@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("format", FORMATS)
def test_drafts_in_lossless_mode(format, kernels):
    model = tiny_model()
    gearbox = Gearbox(model, "4,16", format=format, kernels=kernels)
    theirs = [token for token, _ in generate_step(PROMPT[0], model, max_tokens=24)]
    lossless = LosslessModel(gearbox, FixedLength(3))
    assert [token for token, _ in generate_step(PROMPT[0], lossless, max_tokens=24)] == theirs
    gearbox.shift("low")
    assert not mx.array_equal(gearbox.model(PROMPT), tiny_model()(PROMPT)).item()


def test_compared_in_evaluate(command, tmp_path):
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    save_model(tiny_model(vocab_size=4096), model)
    text.write_text("Tom has 5 apples and buys 7 more. How many apples does he have? " * 4)
    done = command(
        *("evaluate", "--model", model, "--format", "codebook", "--gears", "2,4,16", "--data", text, "--out", out),
        *("--policy", "static", "--context", 16, "--tokens", 32),
    )
    assert done.status == 0, done.err
    rows = {row["name"]: row for row in json.loads((out / "evaluation.json").read_text())["policies"]}
    assert rows["static-2"]["kl_mean"] > rows["static-4"]["kl_mean"] > rows["static-16"]["kl_mean"] == 0
    assert rows["static-2"]["effective_bits"] < rows["static-4"]["effective_bits"] < 16
