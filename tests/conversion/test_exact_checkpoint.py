"""Checkpoints of format exact: their size, layers that would become larger, and files that are damaged or lie."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PROMPT, normal, save_model, tiny_model, weights_of
from mutations import change_array, edit, flip, sign_arrays, sign_files, value_at
from refusals import assert_not_loaded, assert_refused, refuses

import gearbx_mlx
from gearbx_mlx import Gearbox
from gearbx_mlx.gears.manifest import GEARS_FILE, MANIFEST, ORIGINAL_FILE

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return exact(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def geared(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "geared"))


def exact(folder: Path, model: nn.Module | None = None, **keywords) -> Path:
    """A checkpoint in a folder, of a tiny model whose layers are wide enough for a meaningful size."""
    save_model(model or tiny_model(dtype=mx.bfloat16), folder / "original")
    keywords = {"gears": "4,16", "q_group_size": 32} | keywords
    return gearbx_mlx.convert(folder / "original", folder / "geared", format="exact", **keywords)


def sparse(*shape: int) -> mx.array:
    """Weights most of which are tiny beside the largest of their group, so that they take a byte more."""
    spikes = (mx.arange(shape[-1]) % 32 == 0).astype(mx.float32)
    return (normal(*shape) * 0.001 + spikes).astype(mx.bfloat16)


def test_wide_gaussian_model_takes_at_most_085(tmp_path):
    change = {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 1024, "head_dim": 64}
    change |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 128}
    model = tiny_model(dtype=mx.bfloat16, **change)
    for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
        layer.weight = (normal(*layer.weight.shape) * 0.02).astype(mx.bfloat16)
    geared = exact(tmp_path, model, q_group_size=64)
    size = sum(file.stat().st_size for file in geared.glob("*.safetensors"))
    assert size <= 0.85 * (tmp_path / "original" / "model.safetensors").stat().st_size


def convert(command, folder: Path, model: nn.Module):
    """Convert a model that is written into a folder first, to format exact, and return what the command said."""
    save_model(model, folder / "original")
    flags = "--model", folder / "original", "--mlx-path", folder / "geared", "--q-group-size", 32
    return command("convert", *flags, "--format", "exact", "--gears", "4,16")


class TestLargerLayers:
    def test_one_is_kept_and_named(self, tmp_path, succeeds):
        model = tiny_model(dtype=mx.bfloat16)
        layer = model.model.layers[0].mlp.gate_proj
        layer.weight = sparse(*layer.weight.shape)
        done = convert(succeeds, tmp_path, model)
        assert "model.layers.0.mlp.gate_proj: stays dense, since it would take" in done.err
        manifest = json.loads((tmp_path / "geared" / MANIFEST).read_text())
        path = "model.layers.0.mlp.gate_proj"
        assert list(manifest["unmanaged"]) == [path]
        assert "bits a weight in format exact, instead of 16" in manifest["unmanaged"][path]
        assert path not in manifest["layers"]
        loaded, _ = gearbx_mlx.load(tmp_path / "geared")
        for gear in (4, 16):
            Gearbox(loaded, kernels="mlx").shift(gear)
            assert mx.array_equal(loaded.model.layers[0].mlp.gate_proj.weight, layer.weight)

    def test_all_of_them(self, tmp_path, command):
        model = tiny_model(dtype=mx.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight = sparse(*module.weight.shape)
        done = convert(command, tmp_path, model)
        assert_refused(
            done, "no layer becomes smaller", "in format exact, instead of 16", "use --format planes or affine"
        )
        assert [file.name for file in tmp_path.iterdir()] == ["original"]


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [(mx.float32, "mlx_lm.convert --dtype bfloat16"), (mx.float16, "choose format planes or affine")],
)
def test_other_weight_types_are_refused_with_remedy(dtype, remedy, tmp_path, command):
    done = convert(command, tmp_path, tiny_model(dtype=dtype))
    assert_refused(done, f"weights of {str(dtype).split('.')[-1]}, and format exact is for bfloat16", remedy)
    assert [file.name for file in tmp_path.iterdir()] == ["original"]


def restore(command, geared: Path):
    return command("convert", "--restore", geared, "--mlx-path", geared.with_name("out"))


class TestDamage:
    @pytest.mark.parametrize("array", ["low", "high", "offsets"])
    def test_flipped_bit_is_found_on_read_and_verify(self, geared, command, array):
        change_array(geared / GEARS_FILE, f"{UP}@16.{array}", flip)
        sign_files(geared)
        model, _ = gearbx_mlx.load(geared)
        gearbox = Gearbox(model, kernels="mlx")
        with refuses(f"{GEARS_FILE}: {UP}"):
            gearbox.shift(16)
        assert_refused(command("convert", "--verify", geared), f"{GEARS_FILE}: {UP}@16.{array} is damaged (1 of")
        assert_refused(restore(command, geared), f"{GEARS_FILE}: {UP}")
        assert not geared.with_name("out").exists()

    @pytest.mark.parametrize("file", [GEARS_FILE, ORIGINAL_FILE])
    def test_a_truncated_remainder(self, geared, command, file):
        os.truncate(geared / file, (geared / file).stat().st_size - 1)
        done = restore(command, geared)
        assert_refused(done, f"{geared / file}: damaged or truncated", "download it again")

    @pytest.mark.parametrize("file", [GEARS_FILE, ORIGINAL_FILE])
    def test_remainder_of_other_model_is_refused(self, geared, tmp_path, command, file):
        (tmp_path / "other").mkdir()
        other = exact(tmp_path / "other", tiny_model(dtype=mx.bfloat16, seed=1, rope_theta=5000.0))
        shutil.copy(other / file, geared / file)
        done = restore(command, geared)
        words = "is not the one that" if file == GEARS_FILE else "config.json differs from the original"
        assert_refused(done, f"{geared / file}: ", words, "download it again")
        if file == GEARS_FILE:
            assert_not_loaded(geared, f"{geared / file}: {words}")

    @pytest.mark.parametrize("lie", [[1], [0, 2**31], [0, 7, 3]], ids=["begin", "end", "descend"])
    def test_false_offsets_with_right_hashes(self, geared, lie):
        def change(data: bytes) -> bytes:
            offsets = np.frombuffer(data, np.uint32).copy()
            offsets[: len(lie)] = lie
            return offsets.tobytes()

        change_array(geared / GEARS_FILE, f"{UP}@16.offsets", change)
        sign_arrays(geared)
        model, _ = gearbx_mlx.load(geared)
        gearbox = Gearbox(model, kernels="mlx")
        with refuses(f"{GEARS_FILE}: {UP}: its offsets do not cover the"):
            gearbox.shift(16)
        assert gearbox.gear.bits == 4

    def test_false_low_bytes_with_right_hashes(self, geared, command):
        """Only the hash of the original's tensor shows it."""
        change_array(geared / GEARS_FILE, f"{UP}@16.low", flip)
        sign_arrays(geared)
        assert_refused(command("convert", "--verify", geared), f"{UP}.weight differs from the original")
        done = restore(command, geared)
        assert_refused(done, f"{UP}.weight differs from the original")

    @pytest.mark.parametrize(
        "piece",
        [{"parameter": "no.such"}, {"parameter": f"{UP}.weight", "matrix": 5}, {"parameter": "model.norm.weight"}],
    )
    def test_false_pieces_are_found(self, geared, command, piece):
        place = "original", "shards", "model.safetensors", "tensors", f"{UP}.weight"
        edit(geared / MANIFEST, lambda content: value_at(content, place).update(pieces=[piece]))
        assert_refused(restore(command, geared), MANIFEST, "download it again")

    def test_verify_confirms_restorable_original(self, checkpoint, command):
        done = command("convert", "--verify", checkpoint)
        tensors = len(weights_of(tiny_model()))
        assert (done.status, done.err) == (0, "")
        assert done.out.endswith(f"restored: {tensors} tensors and 3 other files equal the original's\n")


class TestUnrestorable:
    def test_other_format_is_refused(self, tmp_path, command):
        save_model(tiny_model(dtype=mx.bfloat16), tmp_path / "original")
        geared = gearbx_mlx.convert(tmp_path / "original", tmp_path / "geared", gears="4,16", q_group_size=32)
        done = restore(command, geared)
        assert_refused(done, f"{geared}: format planes, gears 4,16, does not have its original", "--format exact")

    def test_without_original_files_only_model_runs(self, geared, command):
        (geared / ORIGINAL_FILE).unlink()
        assert gearbx_mlx.load(geared)[0](PROMPT).shape == (1, 5, 128)
        done = restore(command, geared)
        assert_refused(done, f"{geared / ORIGINAL_FILE}: missing, and {MANIFEST} needs it")


@pytest.mark.parametrize(("gears", "missing"), [([3, 16], 3), ([4, 8, 16], 8)])
def test_checkpoint_of_other_gears_is_refused(geared, command, gears, missing):
    edit(geared / MANIFEST, gears=gears)
    done = command("generate", "--model", geared, "-m", 1)
    assert_refused(done, geared / MANIFEST, f"format exact has 4-bit and 16-bit gears, got {missing}")
