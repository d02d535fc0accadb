"""GGUF files as models: every architecture that opens, and what is refused by name."""

import json
import math
import re
import struct
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model, weights_of
from gguf_files import (
    ARRAY,
    BF16,
    F16,
    F32,
    FLOAT,
    KINDS,
    Q5_0,
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
from mlx_lm.utils import load_model
from refusals import refuses

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless
from gearbx_mlx.files import gguf_model
from gearbx_mlx.files.gguf import CODED, Gguf

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("architecture", gguf_model.ARCHITECTURES)
def test_logits_of_codes_match_model(tmp_path, architecture):
    model, prompt = tiny_as(architecture), mx.array([[1, 2, 3, 4]])
    loaded, _ = gearbx_mlx.load(write(tmp_path / "model.gguf", model, Q8_0, architecture))
    expected = model(prompt)
    error = mx.abs(loaded(prompt).astype(mx.float32) - expected).max() / mx.abs(expected).max()
    assert error.item() < 0.05


def test_a_file_is_known_by_its_first_bytes(tmp_path, command):
    blob = write(tmp_path / "sha256-2af3b81862c6be03", tiny_as("llama"), Q8_0)
    flags = "-p", "Once", "-m", 2, "--ignore-chat-template"
    done = command("generate", "--model", blob, *flags)
    assert (done.status, "gears 4,8 in place" in done.err) == (0, True)
    assert command("convert", "--model", blob, "--gears", "4,8", "--mlx-path", tmp_path / "out").status == 0
    assert command("generate", "--model", tmp_path / "out", *flags).status == 0
    (tmp_path / "zip").write_bytes(b"PK\3\4")
    assert command("generate", "--model", tmp_path / "zip").err == (
        f"error: {tmp_path / 'zip'}: is a file; use the directory of a model, or a GGUF file\n"
    )


@pytest.mark.parametrize(("kind", "ladder"), [(Q8_0, "4,8"), (Q5_0, "4,5")])
def test_codes_of_5_and_8_bits_get_gears(tmp_path, native, kind, ladder):
    model, tokenizer = gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama"), kind))
    box = Gearbox(model, kernels="native")
    assert str(box.ladder) == ladder
    texts = [
        [r.token for r in gearbx_mlx.stream_generate(model, tokenizer, [1, 2, 3], 20, gearbox=box, mode=mode)]
        for mode in ("static", Lossless())
    ]
    assert texts[0] == texts[1]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != F32], ids=lambda kind: kind.name)
def test_a_file_of_any_type_opens(tmp_path, kind, recwarn):
    file = Gguf(write(tmp_path / "model.gguf", tiny_as("llama", **WIDE), kind))
    model, _ = gearbx_mlx.load(file.path)
    layer, stored = model.layers[1].mlp.down_proj, file.tensors["blk.1.ffn_down.weight"]
    expected = mx.array(file.weights(stored))
    told = [str(warning.message) for warning in recwarn if "become float16" in str(warning.message)]
    if kind.name in CODED:
        assert (layer.bits, layer.group_size) == (CODED[kind.name], 32)
        wide = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
        found = mx.dequantize(layer.weight, *wide, 32, layer.bits)
        assert mx.abs(found - expected).max() < 2**-10 * mx.abs(expected).max()  # scales of float16
        assert not told
    else:
        assert mx.array_equal(layer.weight, expected.astype(layer.weight.dtype))
        assert len(told) == (kind not in (F16, BF16))


def test_memory_above_file_size_is_announced(tmp_path):
    file = Gguf(write(tmp_path / "model.gguf", tiny_as("llama", **WIDE), Q6_K))
    stored = [tensor for tensor in file.tensors.values() if tensor.kind == Q6_K]
    before, after = sum(each.nbytes for each in stored) / 1e6, sum(2 * math.prod(each.shape) for each in stored) / 1e6
    words = f"{file.path}: weights of Q6_K become float16, {after:.0f} MB in place of {before:.0f} MB"
    for _ in range(2):  # the second time from the cache, as in another process
        gguf_model.warn_of_widened.cache_clear()
        with pytest.warns(GearbxWarning, match=re.escape(words)):
            gearbx_mlx.load(file.path)


@pytest.mark.filterwarnings("ignore:.*become float16")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_add_nothing_to_the_cache(tmp_path, own_cache, kind):
    small, large = (write(tmp_path / f"{n}.gguf", tiny_as("llama", **WIDE, num_hidden_layers=n), kind) for n in (1, 4))
    gearbx_mlx.load(small)
    first = {file: file.stat().st_size for file in own_cache.rglob("*") if file.suffix != ".gguf"}
    gearbx_mlx.load(large)
    added = [file for file in own_cache.rglob("*") if file.suffix != ".gguf" and file not in first and file.is_file()]
    table = 3 * 9 * 200  # bytes that places of three more layers take
    assert sum(file.stat().st_size for file in added) < sum(first.values()) + table


@pytest.mark.parametrize("architecture", gguf_model.ARCHITECTURES)
def test_float16_logits_equal_safetensors(tmp_path, architecture):
    model = tiny_as(architecture, dtype=mx.float16)
    loaded, _ = gearbx_mlx.load(write(tmp_path / "model.gguf", model, F16, architecture))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(asdict(model.args)))
    mx.save_safetensors(str(tmp_path / "model" / "model.safetensors"), weights_of(model), {"format": "mlx"})
    plain, _ = load_model(tmp_path / "model")
    prompt = mx.array([[1, 2, 3, 4]])
    assert mx.array_equal(loaded(prompt), plain(prompt))


def test_stretched_positions_of_llama_3(tmp_path):
    """llama.cpp's converter writes by how much each frequency is divided."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    model = tiny_as("llama", head_dim=32, rope_theta=500000.0, rope_scaling=scaling)
    stretched = np.array(model.layers[0].self_attn.rope._freqs) / 500000.0 ** (np.arange(0, 32, 2) / 32)
    assert stretched.max() == pytest.approx(32)
    file = write(tmp_path / "model.gguf", model, F16, more=[("rope_freqs.weight", stretched)])
    loaded, _ = gearbx_mlx.load(file)
    frequencies = (np.array(each.layers[0].self_attn.rope._freqs) for each in (loaded, model))
    assert np.allclose(*frequencies)
    other = write(tmp_path / "other.gguf", model, F16, more=[("rope_freqs.weight", stretched**0.9)])
    with pytest.raises(GearbxError, match=r"other\.gguf: has RoPE scaling that cannot be read"):
        gearbx_mlx.load(other)


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


def test_output_ends_at_end_of_turn(tmp_path):
    names = ["<eos>", *WORDS, *"éèáà", "<|im_end|>"]
    rows = struct.pack("<IQ", STRING, 256) + b"".join(map(text, names))
    kinds = struct.pack("<IQ256i", 5, 256, 3, *[1] * 254, 3)
    changes = {"tokenizer.ggml.tokens": (ARRAY, rows), "tokenizer.ggml.token_type": (ARRAY, kinds)}
    _, tokenizer = gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama"), **changes))
    assert tokenizer.eos_token_ids == {0, 255}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, 'general.architecture is "mamba"'),
        ({"tokenizer.ggml.model": "bert"}, 'tokenizer.ggml.model is "bert"'),
        ({"tokenizer.ggml.model": "llama"}, "do not fit"),
        ({"llama.rope.scaling.type": "yarn"}, "has RoPE scaling that cannot be read"),
        ({"tokenizer.ggml.pre": "viking"}, 'tokenizer.ggml.pre is "viking"'),
        ({"llama.attention.head_count": (UNSIGNED, struct.pack("<I", 2**32 - 1))}, "do not fit"),
        ({"llama.attention.head_count": (ARRAY, struct.pack("<IQII", 4, 2, 4, 4))}, "is missing, or a list"),
        ({"general.architecture": (ARRAY, struct.pack("<IQ", STRING, 0))}, "is a list; known are llama and"),
        ({"split.count": (UNSIGNED, struct.pack("<I", 3))}, "is one of 3 files of a model; use llama-gguf-split"),
        ({"llama.attention.head_count": (UNSIGNED, struct.pack("<I", 0))}, "do not fit"),
        ({"llama.attention.head_count": (UNSIGNED, struct.pack("<I", 7))}, "model.gguf"),
        ({"llama.block_count": (UNSIGNED, struct.pack("<I", 2**31))}, "llama.block_count is 2147483648"),
        ({"llama.block_count": (UNSIGNED, struct.pack("<I", 3))}, "tensors of 2 blocks"),
        ({"llama.feed_forward_length": (UNSIGNED, struct.pack("<I", 100))}, "model.gguf: its metadata do not fit"),
        ({"tokenizer.ggml.tokens": (ARRAY, struct.pack("<IQ", STRING, 1) + text("a"))}, "do not fit"),
    ],
)
def test_unknown_or_false_metadata(tmp_path, changes, words):
    with refuses(words):
        gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama"), **changes))


def test_nonfinite_weights_are_named(tmp_path):
    for name, array in (("infinite", np.full(64, 1e30)), ("nan", np.full(64, np.nan))):
        model = tiny_as("llama")
        model.model.norm.weight = mx.array(array)
        words = f'{name}.gguf: "output_norm.weight" (model.norm.weight) has values that float16 cannot hold'
        with refuses(words):
            gearbx_mlx.load(write(tmp_path / f"{name}.gguf", model))


def test_tensors_of_other_architecture(tmp_path):
    content = gguf([("blk.0.ssm_a", (2, 32), F16, bytes(128))], [("general.architecture", STRING, text("llama"))])
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(GearbxError, match="tokenizer"):
        gearbx_mlx.load(tmp_path / "model.gguf")
