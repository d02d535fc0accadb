"""Weights in a GGUF file: read at each start, by native kernels or numpy, and of a file that nobody changed."""

import os

import mlx.core as mx
import pytest
from conftest import weights_of
from gguf_files import BF16, F16, KINDS, Q4_0, Q8_0, tiny_as, write
from refusals import refuses
from test_kept import PROMPT, entries, logits, started

import gearbx_mlx
from gearbx_mlx import Gearbox
from gearbx_mlx.gears import kept, weight_files
from gearbx_mlx.loading import find

pytestmark = pytest.mark.filterwarnings("ignore:.*become float16")

OF_KERNELS = [kind for kind in KINDS if kind.name in (*weight_files.NATIVE, *weight_files.STORED)]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture
def file(tmp_path, own_cache):
    return write(tmp_path / "model.gguf", tiny_as("llama"), F16)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("kind", OF_KERNELS, ids=lambda kind: kind.name)
def test_arrays_of_native_kernels_are_those_of_numpy(tmp_path, own_cache, native, monkeypatch, kind, dtype):
    directory = weight_files.gguf_directory(write(tmp_path / "model.gguf", tiny_as("llama", **WIDE), kind), dtype=dtype)
    found = weight_files.arrays_in(directory)
    monkeypatch.setattr(weight_files, "mapping_kernels", lambda: None)
    expected = weight_files.arrays_in(directory)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert array.dtype == found[name].dtype
        assert mx.array_equal(array, found[name]), name


@pytest.mark.parametrize(("kind", "dtype"), [(F16, mx.float16), (BF16, mx.bfloat16)])
def test_half_precision_file_has_one_type(tmp_path, own_cache, kind, dtype):
    model, _ = gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("llama", **WIDE), kind))
    assert {array.dtype for array in weights_of(model).values()} == {dtype}
    assert model(mx.array([[1, 2]])).dtype == dtype


@pytest.mark.parametrize("kind", [F16, BF16])
def test_half_precision_weights_are_mapped(tmp_path, own_cache, native, kind):
    before = mx.get_active_memory()
    model, _ = gearbx_mlx.load(write(tmp_path / "model.gguf", tiny_as("qwen2", **WIDE), kind), keep_mapped=True)
    mapped = weights_of(model)["model.layers.0.mlp.up_proj.weight"]
    assert mx.get_active_memory() - before < sum(array.nbytes for array in weights_of(model).values()) / 2
    assert mx.all(mx.isfinite(mapped)).item()


@pytest.mark.parametrize(
    "change",
    [
        lambda file: write(file, tiny_as("llama", seed=1)),
        lambda file: os.truncate(file, 3000),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids=["another file", "its end cut off", "removed", "a pipe"],
)
def test_file_changed_before_weights_is_refused(file, change):
    directory = find(file)
    change(file)
    with refuses("was replaced while it was unpacked", "start again"):
        gearbx_mlx.load(directory)


def test_file_changed_during_reading_is_refused(file, monkeypatch):
    read = weight_files.read_weights

    def read_and_change(weights):
        arrays = read(weights)
        write(file, tiny_as("llama", seed=1))
        return arrays

    monkeypatch.setattr(weight_files, "read_weights", read_and_change)
    with refuses("was replaced while it was unpacked", "start again"):
        gearbx_mlx.load(file)


def test_file_truncated_before_use_is_an_error(tmp_path, own_cache, native):
    file = write(tmp_path / "model.gguf", tiny_as("llama"), Q8_0)
    model, _ = gearbx_mlx.load(file, lazy=True)
    os.truncate(file, 3000)
    with pytest.raises(RuntimeError, match="the GGUF file was cut off while it was in use; start again"):
        mx.eval(model.parameters())


@pytest.mark.parametrize("kind", [F16, Q8_0])
def test_file_replaced_after_loading_changes_nothing(tmp_path, own_cache, native, kind):
    """The weights are mapped, or unread; the open file is still the one that was hashed."""
    expected = gearbx_mlx.load(write(tmp_path / "same.gguf", tiny_as("llama"), kind))[0](PROMPT)
    file = write(tmp_path / "model.gguf", tiny_as("llama"), kind)
    model, _ = gearbx_mlx.load(file, lazy=True)
    os.replace(write(tmp_path / "other.gguf", tiny_as("llama", seed=1), kind), file)
    assert mx.array_equal(model(PROMPT), expected)


@pytest.mark.parametrize("kind", [F16, Q4_0, Q8_0])
def test_the_headers_have_the_size_of_the_weights(tmp_path, own_cache, kind):
    directory = find(write(tmp_path / "model.gguf", tiny_as("llama"), kind))
    arrays = weight_files.arrays_in(directory)
    assert weight_files.weights_size(directory) == sum(array.nbytes for array in arrays.values())


def test_gears_are_kept_by_file_contents(file, own_cache, monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "MIN_KEPT_BYTES", 0)
    made = logits(started(file))
    assert len(entries(own_cache)) == 1
    copy = tmp_path / "sha256-0123"
    copy.write_bytes(file.read_bytes())
    assert all(mx.array_equal(one, other) for one, other in zip(made, logits(started(copy)), strict=True))
    assert len(entries(own_cache)) == 1
    started(write(file, tiny_as("llama", seed=1), F16))
    assert len(entries(own_cache)) == 2


def test_originals_are_read_back_from_the_file(file):
    model, _ = gearbx_mlx.load(file)
    box, prompt = Gearbox(model, "4,16", residency="disk", checkpoint=find(file)), mx.array([[1, 2, 3]])
    box.shift(box.ladder.top)
    expected = model(prompt)
    mx.eval(expected)
    box.shift(box.ladder[0])
    assert not mx.array_equal(model(prompt), expected)
    box.shift(box.ladder.top)
    assert mx.array_equal(model(prompt), expected)


def test_converted_gguf_has_gears_of_its_safetensors(tmp_path, file):
    plain = tmp_path / "plain"
    plain.mkdir()
    weight_files.write_safetensors(find(file), plain)
    assert all(mx.array_equal(array, weights_of(gearbx_mlx.load(plain)[0])[name]) for name, array in loaded(file))
    for model, out in ((file, "of_file"), (plain, "of_plain")):
        gearbx_mlx.convert(model, tmp_path / out, gears="4,16", format="planes")
    ours, theirs = ((tmp_path / out / "gears.safetensors").read_bytes() for out in ("of_file", "of_plain"))
    assert ours == theirs
    assert not [*tmp_path.glob(".*.part")]


def loaded(file):
    return weights_of(gearbx_mlx.load(file)[0]).items()
