"""Real GGUF files: SmolLM2's if its package is installed, and others that real-models has fetched."""

import json
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError
from research.real_models import MODELS, gguf_of

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:.*become float16")]

TEXTS = (
    "The 3 brothers paid $1,234.50.",
    "def f(x):\n    return x\n\n",
    "naïve 漢字 🙂 don't",
    " a  b\tc",
    "<|im_end|>",
)


def real_file(name):
    try:
        return gguf_of(name)
    except (GearbxError, metadata.PackageNotFoundError) as error:
        pytest.skip(str(error))


def test_the_real_file_has_the_tokens_of_its_unpacked_form():
    model, tokenizer = gearbx_mlx.load(real_file("smollm2"))
    _, unpacked = gearbx_mlx.load("smollm2")
    assert [tokenizer.encode(line) for line in TEXTS] == [unpacked.encode(line) for line in TEXTS]
    said = gearbx_mlx.generate(model, tokenizer, "The capital of France is", max_tokens=8, mode="lossless")
    assert "Paris" in said


@pytest.mark.parametrize("name", ["smollm2", *MODELS])
def test_it_has_llama_cpps_tokens_and_predictions(name):
    """llama.cpp rounds activations to 8 bits, so predictions that are almost equally likely may swap places."""
    file = Path(__file__).parents[1] / "data" / f"llama_cpp_{name}.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert len(stored) >= 20
    model, tokenizer = gearbx_mlx.load(real_file(name), lazy=True)
    Gearbox(model, activations="float")
    differences = []
    for read in stored:
        assert tokenizer.encode(read["text"], add_special_tokens=False) == read["tokens"]
        logits = model(mx.array([read["tokens"]]))[0, -1].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits))
        best, theirs = [int(token) for token in read["best"]], [*read["best"].values()]
        differences.append(np.abs(logprobs[best] - theirs).mean())
        if theirs[0] - theirs[1] > 0.2:
            assert logprobs.argmax() == best[0]
    assert np.mean(differences) < 0.1
