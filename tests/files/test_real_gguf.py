"""Real GGUF files: SmolLM2's if its package is installed, and others that real-models has fetched."""

import json
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import F16, tiny_as, write
from mlx_lm.utils import load_tokenizer

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.files.gguf import Gguf
from gearbx_mlx.files.gguf_model import ARCHITECTURES
from gearbx_mlx.loading import find
from research.real_models import gguf_of

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


def test_real_file_has_tokens_of_unpacked_form():
    model, tokenizer = gearbx_mlx.load(real_file("smollm2"))
    _, unpacked = gearbx_mlx.load("smollm2")
    assert [tokenizer.encode(line) for line in TEXTS] == [unpacked.encode(line) for line in TEXTS]
    said = gearbx_mlx.generate(model, tokenizer, "The capital of France is", max_tokens=8, mode="lossless")
    assert "Paris" in said


def test_qwen_sizes_share_a_tokenizer():
    """So what the next test finds of tokens holds for both."""
    small, large = (Gguf(real_file(name)).metadata for name in ("qwen-0.5b", "qwen-1.5b"))
    keys = [key for key in small if key.startswith("tokenizer.ggml.")]
    assert len(keys) >= 9
    for key in keys:
        assert np.array_equal(small[key], large[key]), key


def read_in_llama_cpp(name):
    file = Path(__file__).parents[1] / "data" / f"llama_cpp_{name}.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert len(stored) >= 20
    return stored


@pytest.mark.parametrize("name", ["smollm2", "qwen-0.5b", "gemma-270m"])
def test_it_has_llama_cpps_tokens(name):
    tokenizer = load_tokenizer(find(real_file(name)))
    for read in read_in_llama_cpp(name):
        assert tokenizer.encode(read["text"], add_special_tokens=False) == read["tokens"]


@pytest.mark.parametrize("name", ["smollm2", "qwen-0.5b"])
def test_it_has_llama_cpps_predictions(name):
    """llama.cpp rounds activations to 8 bits, so predictions that are almost equally likely may swap places.

    Gemma's move by nats with that; those of the same file in float16 are ours.
    """
    model, _ = gearbx_mlx.load(real_file(name), lazy=True)
    Gearbox(model, activations="float")
    differences = []
    for read in read_in_llama_cpp(name):
        logits = model(mx.array([read["tokens"]]))[0, -1].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits))
        best, theirs = [int(token) for token in read["best"]], [*read["best"].values()]
        differences.append(np.abs(logprobs[best] - theirs).mean())
        if theirs[0] - theirs[1] > 0.2:
            assert logprobs.argmax() == best[0]
    assert np.mean(differences) < 0.1


def best_in_llama_cpp(file, tokens):
    """The likeliest tokens after some, with their log-probabilities."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(file), 256, 1, -1
    asked = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 8, "cache_prompt": False}
    (choice,) = xllamacpp.Server(params).handle_completions(asked)["choices"]
    return {each["id"]: each["logprob"] for each in choice["logprobs"]["content"][0]["top_logprobs"]}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_model_of_every_architecture_matches_llama_cpp(tmp_path, own_cache, architecture):
    model = tiny_as(architecture, dtype=mx.float16)
    file, tokens = write(tmp_path / "model.gguf", model, F16, architecture), [5, 6, 7, 8, 9, 30]
    loaded, _ = gearbx_mlx.load(file)
    logits = loaded(mx.array([tokens]))[0, -1].astype(mx.float32)
    logprobs, theirs = logits - mx.logsumexp(logits), best_in_llama_cpp(file, tokens)
    assert [logprobs[token].item() for token in theirs] == pytest.approx([*theirs.values()], abs=0.01)
