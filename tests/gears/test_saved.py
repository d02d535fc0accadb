"""A changed gears.json beside unchanged arrays: no gear is made from what does not fit."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import PROMPT, every_gear, save_model, tiny_model, weights_of
from msgspec import structs
from mutations import edit, sign_arrays
from refusals import assert_not_loaded, refuses

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.gears.manifest import MANIFEST
from gearbx_mlx.gears.saved import SavedGears, open_gears
from gearbx_mlx.loading import load_model

FORMATS = {"planes": "4,5,6,8,16", "affine": "3,8", "rowwise": "2,8", "groupwise": "4,16"}
FORMATS |= {"codebook": "3,5", "codebook-library": "2,16", "exact": "4,16"}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A directory with a tiny model, converted to a format at first use."""
    made: dict[str, Path] = {}

    def checkpoint(format: str) -> Path:
        if format not in made:
            folder = tmp_path_factory.mktemp(format)
            tied = {"tie_word_embeddings": True} if format in ("planes", "rowwise") else {}
            save_model(tiny_model(dtype=mx.bfloat16, num_hidden_layers=2, **tied), folder / "original")
            how = {"format": format, "gears": FORMATS[format], "q_group_size": 32}
            made[format] = gearbx_mlx.convert(folder / "original", folder / "geared", **how)
        return made[format]

    return checkpoint


@pytest.fixture
def geared(checkpoints, tmp_path) -> Path:
    """A copy of a model in planes."""
    return Path(shutil.copytree(checkpoints("planes"), tmp_path / "geared"))


def arrays_of(directory: Path) -> list[dict[str, mx.array]]:
    """Every array of every gear."""
    model = load_model(directory, lazy=True, strict=False)[0]
    open_gears(directory).attach(model)
    gearbox = Gearbox(model)
    found = []
    for _ in every_gear(gearbox):
        mx.eval(model(PROMPT))
        found.append(weights_of(model))
    return found


@pytest.mark.parametrize("format", FORMATS)
class TestEveryFormat:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("other", FORMATS)
    def test_other_format_is_refused(self, checkpoints, tmp_path, format, other):
        directory = Path(shutil.copytree(checkpoints(format), tmp_path / "geared"))
        if other != format:
            edit(directory / MANIFEST, format=other)
            assert_not_loaded(directory, "gears.json")

    @pytest.mark.parametrize("size", [64, 128, None, 0, "32"])
    def test_other_group_size(self, checkpoints, tmp_path, format, size):
        directory = Path(shutil.copytree(checkpoints(format), tmp_path / "geared"))
        edit(directory / MANIFEST, group_size=size)
        if size not in (64, 128) or format in ("planes", "affine"):
            assert_not_loaded(directory, "gears.json")


def swap(content: dict, bits: str, one: str, other: str, path: str = UP) -> None:
    names = content["layers"][path]["gears"][bits]
    names[one], names[other] = names[other], names[one]


def swap_layers(content: dict) -> None:
    content["layers"][UP], content["layers"][DOWN] = content["layers"][DOWN], content["layers"][UP]


def move(content: dict, path: str) -> None:
    content["layers"][path] = content["layers"].pop(UP)


class TestArrayMetadata:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda c: swap(c, "4", "scales", "biases"), f'gears["4"].scales is "{UP}.biases", not "{UP}@4.scales"'),
            (lambda c: swap(c, "6", "weights.1", "weights.2"), 'gears["6"].weights.1 is'),
            (lambda c: swap(c, "8", "plane_biases.1", "plane_biases.3"), 'gears["8"].plane_biases.1 is'),
            (swap_layers, f'layers["{UP}"].gears["4"].weight is "{DOWN}.weight"'),
            (lambda c: c["layers"].pop(UP), "does not name"),
            (lambda c: c["layers"][UP]["gears"].pop("8"), f'layers["{UP}"].gears has no key 8'),
            (lambda c: c["layers"][UP]["gears"]["8"].pop("scales"), "has "),
            (lambda c: c["layers"][UP].update(shape=[-1, 64]), f'"{UP}"].shape[0] is -1, not a whole number >= 1'),
            (lambda c: c["layers"][UP].update(shape=[64, 128]), f'"{UP}.weight" is U32 of [128, 8]'),
            (lambda c: c["layers"][UP].update(dtype="float16"), "is BF16 of"),
            (lambda c: c["layers"][UP].update(kind="embedding"), "and the model has a QuantizedLinear there"),
            (lambda c: c["layers"][UP].update(lowest_bits=5), "has the key 4, which no gear uses"),
            (lambda c: c.update(stock=False), "stock is false, which the files of the base contradict"),
            (lambda c: c.update(gears=[4, 8, 16]), "has the key 5, which no gear uses"),
            (lambda c: c.update(gears=[16, 8]), "gears must ascend"),
            (lambda c: c.update(extra=1), "extra is not known"),
            (lambda c: c.update(base={"../model.safetensors": "0" * 64}), 'base has the key "../model.safetensors"'),
            (lambda c: c.update(base={}), "base is {}, not an object of length >= 1"),
            (lambda c: move(c, "__class__"), '"__class__'),
            (lambda c: move(c, ""), 'gears["4"].weight is'),
        ],
    )
    def test_is_compared_with_them(self, geared, change, words):
        edit(geared / MANIFEST, change)
        assert_not_loaded(geared, words)

    @pytest.mark.parametrize("path", ["", "__class__", "model.layers", "model.layers.0.mlp.__class__", "model.norm"])
    def test_layers_are_modules_of_the_model(self, geared, path):
        """No matter what an attribute of this name is."""
        saved, model = open_gears(geared), load_model(geared, lazy=True)[0]
        manifest = saved.manifest
        moved = {path: manifest.layers[UP]} | {key: value for key, value in manifest.layers.items() if key != UP}
        with pytest.raises(GearbxError, match=f'layers has the key "{path}", and the model has'):
            SavedGears(geared, structs.replace(manifest, layers=moved), saved.hashes).check(model)


@pytest.mark.parametrize(
    ("format", "name", "value"),
    [
        ("codebook", "outlier_columns", 64),
        ("codebook", "outlier_offsets", 2**31),
        ("codebook-library", "outlier_columns", 65535),
        ("codebook-library", "entries", 32),
    ],
)
def test_index_arrays_stay_within_other_arrays(checkpoints, tmp_path, format, name, value):
    directory = Path(shutil.copytree(checkpoints(format), tmp_path / "geared"))
    arrays = mx.load(str(directory / "gears.safetensors"))
    bits = FORMATS[format][0]
    damaged_name = f"{UP}@{bits}.{name}"
    arrays[damaged_name] = mx.full(arrays[damaged_name].shape, value, arrays[damaged_name].dtype)
    mx.save_safetensors(str(directory / "gears.safetensors"), arrays)
    sign_arrays(directory)
    with refuses(f"gears.safetensors: {UP}: ", "download it again"):
        arrays_of(directory)
