"""Every array of a geared checkpoint has a hash: a damaged one is refused when it is first read."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import PROMPT, save_model, tiny_model
from mutations import change_array, edit, flip, sign_files
from refusals import assert_not_loaded, assert_refused

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.gears.manifest import GEARS_FILE, MANIFEST
from gearbx_mlx.loading import DEMO_MODEL

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hashes")
    save_model(tiny_model(dtype=mx.bfloat16), folder / "original")
    return gearbx_mlx.convert(folder / "original", folder / "geared", gears="4,8,16", q_group_size=32)


@pytest.fixture
def geared(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "geared"))


def flip_bit(file: Path, array: str) -> None:
    """Change the first byte of an array, and let the hashes of whole files agree with it."""
    change_array(file, array, flip)
    sign_files(file.parent)


def test_flipped_bit_is_found_when_gear_engages(geared):
    flip_bit(geared / GEARS_FILE, f"{UP}@8.weights.1")
    model, _ = gearbx_mlx.load(geared)
    gearbox = Gearbox(model)
    before = model(PROMPT)
    with pytest.raises(GearbxError, match=f"{GEARS_FILE}: {UP}@8.weights.1 is damaged"):
        gearbox.shift(8)
    assert gearbox.gear.bits == 4
    assert mx.array_equal(model(PROMPT), before)
    gearbox.shift(16)  # whose arrays are whole


@pytest.mark.some(2)
@pytest.mark.parametrize("format", ["planes", "affine", "rowwise", "groupwise", "codebook", "codebook-library"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_array_is_compared(tmp_path, format, tied):
    """In every format, whichever arrays it has."""
    save_model(tiny_model(dtype=mx.bfloat16, tie_word_embeddings=tied), tmp_path / "original")
    gears = {"codebook": "4,5", "groupwise": "4,16"}.get(format, "2,4,16")
    geared = gearbx_mlx.convert(tmp_path / "original", tmp_path / "geared", gears=gears, format=format)
    gearbox = Gearbox(gearbx_mlx.load(geared)[0])
    for gear in gearbox.ladder:
        gearbox.shift(gear)
    assert gearbox.saved.hashes.pending == set()


def test_flipped_base_bit_is_found_at_once(geared):
    flip_bit(geared / "model.safetensors", f"{UP}.weight")
    model, _ = gearbx_mlx.load(geared)
    with pytest.raises(GearbxError, match=f"model.safetensors: {UP}.weight is damaged"):
        Gearbox(model)


def test_verify_names_the_first_and_counts_all(geared, command, succeeds):
    done = succeeds("convert", "--verify", geared)
    assert done.out.endswith("are undamaged\n")
    flip_bit(geared / GEARS_FILE, f"{UP}@8.weights.1")
    flip_bit(geared / GEARS_FILE, f"{UP}@16.weight")
    assert_refused(command("convert", "--verify", geared), "is damaged (2 of ")
    assert_refused(command("convert", "--verify", DEMO_MODEL), "has no gears")


@pytest.mark.parametrize("missing", ["hashes", "gears_hash"])
def test_a_manifest_without_hashes_is_refused(geared, missing):
    edit(geared / MANIFEST, lambda content: content.pop(missing))
    assert_not_loaded(geared, missing)
