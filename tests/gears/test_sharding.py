"""A rank's part of a weight and of its gears: the numbers of the whole one, cut. No ranks are started here."""

import copy
import itertools
import math
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import CONFIGS, tiny, why_not
from conftest import every_gear, save_model, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from gearbx_mlx import Gearbox, GearbxError, convert, load
from gearbx_mlx.formats.holders import GatheredLinear, RankPart, SummedLinear
from gearbx_mlx.formats.tied import linear_of
from gearbx_mlx.gears.adapters import layers_of
from gearbx_mlx.gears.dividing import Ranks, WholeArray, divide, into_stages
from gearbx_mlx.gears.gearbox import model_fingerprint
from gearbx_mlx.gears.sharding import WeightPart, ranges_of, sharded_parts, sharding_of

LADDERS = {"planes": "4,8,16", "affine": "4,8,16", "rowwise": "4,6,8,16", "groupwise": "4,16", "exact": "4,16"}
SAVED = LADDERS | {"codebook": "3,16", "codebook-library": "2,16"}
HEADS = {"num_key_value_heads", "linear_num_key_heads", "num_attention_groups", "index_n_heads"}
LISTS = {"high": "offsets", "outliers": "outlier_offsets", "outlier_columns": "outlier_offsets"}


def rank(number: int, count: int = 2) -> SimpleNamespace:
    """A stand-in for a group, with what the code asks before anything is computed."""
    return SimpleNamespace(rank=lambda: number, size=lambda: count)


def two_heads(config: dict) -> dict:
    """A configuration that can be divided by two."""
    return {
        key: two_heads(value) if isinstance(value, dict) else 2 if key in HEADS and value == 1 else value
        for key, value in config.items()
    }


def divisible(name: str = "llama", **change: object) -> nn.Module:
    return tiny_model(name, **(two_heads(CONFIGS[name]) | change))


def taken(array: mx.array, part: WeightPart, name: str) -> np.ndarray:
    """A part of an array by the indices of its rows and columns."""
    found = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    lead = len(part.whole) - 2
    for axis, ranges in enumerate((part.matrices, part.rows)[1 - lead :]):
        if ranges is not None and not (name == "library" and axis == lead):
            found = np.concatenate([np.take(found, np.arange(a, b), axis=axis) for a, b in ranges], axis=axis)
    if part.columns is not None and found.ndim == len(part.whole):
        share = found.shape[-1] / part.whole[-1]
        found = np.concatenate([found[..., int(a * share) : int(b * share)] for a, b in part.columns], axis=-1)
    return found


def lists_of(module: nn.Module, name: str) -> list[list]:
    """The lists of an array of lists, one for each row of a matrix."""
    numbers, starts = np.array(module[name].view(mx.uint8)), np.array(module[LISTS[name]]).astype(int)
    size = module[name].dtype.size
    return [numbers[a * size : b * size].tolist() for a, b in itertools.pairwise(starts)]


def check_part(own: nn.Module, whole: nn.Module, part: WeightPart) -> None:
    """Every array of a rank's module is the whole module's array, cut."""
    ours, theirs = (dict(tree_flatten(linear_of(module).parameters())) for module in (own, whole))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if name in LISTS:
            height, matrices = part.whole[-2], part.matrices or ((0, math.prod(part.whole[:-2])),)
            own_rows = part.rows or ((0, height),)
            rows = [m * height + r for c, d in matrices for m in range(c, d) for a, b in own_rows for r in range(a, b)]
            assert lists_of(own, name) == [lists_of(whole, name)[row] for row in rows]
        elif name not in LISTS.values():
            found = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
            assert array.dtype == theirs[name].dtype
            assert np.array_equal(found, taken(theirs[name], part, name.split(".")[0])), name


def boxed(model: nn.Module, format: str) -> Gearbox:
    return Gearbox(model, LADDERS[format], format=format, group_size=32, kernels="mlx")


def check_gears(own: Gearbox, whole: Gearbox) -> int:
    """Check all gears of all divided layers; returns the number of layers."""
    parts = sharding_of(own.model).parts
    managed = parts.keys() & {layer.path for layer in own.layers}
    for _ in every_gear(whole, own):
        ours, theirs = layers_of(own.model), layers_of(whole.model)
        for path in managed:
            check_part(ours[path], theirs[path], parts[path])
    return len(managed)


@given(st.lists(st.integers(0, 12)))
def test_ranges_are_the_indices_in_their_order(indices):
    assert [index for a, b in ranges_of(indices) for index in range(a, b)] == indices


@pytest.mark.parametrize("name", sorted(name for name in CONFIGS if not why_not(name)))
def test_rank_has_model_class_share_of_layers(name):
    model = tiny(name, **two_heads(CONFIGS[name]))
    if not hasattr(model, "shard") or name == "prism_hadamard_qwen35":  # mlx-lm's `shard` fails on its layers
        pytest.skip("mlx-lm cannot shard it")
    before, group = dict(model.named_modules()), rank(1)
    weights = {path: module.weight for path, module in before.items() if "weight" in module}
    parts = sharded_parts(model, group)
    model.shard(group)
    after = {path: module.weight for path, module in model.named_modules() if "weight" in module}
    cut = {path for path, weight in after.items() if weight.shape != weights[path].shape}
    assert {path for path in cut if "Linear" in type(before[path]).__name__} <= parts.keys()
    for path, part in parts.items():
        assert mx.array_equal(part.of(weights[path]), after[path]).item(), path


@pytest.mark.some(2)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("format", LADDERS)
def test_part_of_gear_equals_gear_of_part(format, number):
    model = divisible("qwen3_moe", dtype=mx.bfloat16)
    other = copy.deepcopy(model)
    divide(model, Ranks(rank(number)))
    assert check_gears(*(boxed(each, format) for each in (model, other))) == 14
    assert model_fingerprint(model) == model_fingerprint(other)


@pytest.mark.parametrize("format", ["planes", "affine", "groupwise"])
def test_columns_are_cut_between_groups(format):
    model = divisible()
    other = copy.deepcopy(model)
    divide(model, Ranks(rank(1), gather=False))
    assert check_gears(*(boxed(each, format) for each in (model, other))) == 14
    assert sharding_of(model).parts["model.layers.0.mlp.down_proj"].columns == ((64, 128),)


@pytest.mark.parametrize(
    ("format", "gather", "paths", "reason"),
    [
        ("planes", False, {"o_proj"}, "columns that end inside of a group of 64"),
        ("rowwise", False, {"o_proj", "down_proj"}, "stores whole rows, but ranks have some columns"),
        ("codebook", True, {"q_proj", "o_proj", "down_proj", "up_proj"}, "depend on the whole matrix"),
    ],
)
def test_part_stored_differently_stays_dense(format, gather, paths, reason):
    model = divisible(num_attention_heads=2, head_dim=32)
    divide(model, Ranks(rank(0), gather))
    gearbox = Gearbox(model, SAVED[format], format=format)
    said = {path.rpartition(".")[2] for path, why in gearbox.unmanaged.items() if reason in why}
    assert paths <= said


@pytest.mark.parametrize(("gather", "kind"), [(True, GatheredLinear), (False, SummedLinear)])
def test_ranks_exchange_inputs_or_sums_of_divided_layers(gather, kind):
    model, whole = divisible(), divisible()
    divide(model, Ranks(rank(1), gather))
    around = {path for path, module in model.named_modules() if isinstance(module, RankPart)}
    assert around == {path for path, _ in whole.named_modules() if path.endswith(("o_proj", "down_proj"))}
    assert {type(module) for path, module in model.named_modules() if path in around} == {kind}
    weights = {path: module.weight.shape for path, module in layers_of(model).items() if path in around}
    for path, shape in weights.items():
        rows, columns = dict(whole.named_modules())[path].weight.shape
        assert shape == ((rows // 2, columns) if gather else (rows, columns // 2))


@pytest.mark.some(5)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("format", SAVED)
def test_rank_reads_own_part_of_geared_checkpoint(format, gather, tmp_path):
    source, geared = tmp_path / "original", tmp_path / "geared"
    save_model(divisible(dtype=mx.bfloat16), source)
    convert(source, geared, gears=SAVED[format], format=format, q_group_size=32)
    whole = Gearbox(load(geared)[0], kernels="mlx")
    model = load(geared, group=rank(1), shard_sums="gather" if gather else "sum")[0]
    own = Gearbox(model, kernels="mlx")
    begun = own.saved.bytes_read  # of the base; a gear that is the base may be read again when it is engaged
    assert check_gears(own, whole) == 14
    assert own.fingerprint == whole.fingerprint
    half = sum(nbytes(array) for name, array in stored_of(own, {"library"})) // 2
    # Lists differ in length, and their offsets find them; all of them share the library.
    others = 2 * sum(array.nbytes for array in arrays_of(own, {*LISTS, *LISTS.values()}))
    others += sum(nbytes(array) for name, array in stored_of(own, set()) if name.endswith("library"))
    assert begun <= half + others
    assert own.saved.bytes_read - begun <= half + others


def test_rank_reads_own_matrices_of_geared_checkpoint(tmp_path):
    source, geared = tmp_path / "original", tmp_path / "geared"
    save_model(divisible("deepseek_v3", dtype=mx.bfloat16), source)
    convert(source, geared, gears="4,16", format="exact", q_group_size=32)
    own = Gearbox(load(geared, group=rank(0))[0], kernels="mlx")
    assert any(part.matrices for part in sharding_of(own.model).parts.values())
    check_gears(own, Gearbox(load(geared)[0], kernels="mlx"))


def nbytes(array: WholeArray) -> int:
    return math.prod(array.shape) * array.dtype.size


def stored_of(gearbox: Gearbox, but: set[str]) -> list[tuple[str, WholeArray]]:
    """Names and arrays in the files of the divided layers, except names that end like this."""
    saved = gearbox.saved
    return [(name, saved._stored[name]) for name in saved.partial if name.rpartition(".")[2] not in but]


def arrays_of(gearbox: Gearbox, names: set[str]) -> list[mx.array]:
    """The arrays of all gears of the divided layers, each once."""
    found = {}
    for path in sharding_of(gearbox.model).parts:
        for module in gearbox._modules.made[path].values():
            arrays = dict(tree_flatten(linear_of(module).parameters()))
            found |= {id(array): array for name, array in arrays.items() if name in names}
    return list(found.values())


def quantized(**sizes: int) -> nn.Module:
    """A model whose groups are 64 columns wide."""
    model = divisible(**sizes)
    nn.quantize(model)
    return model


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: divide(divisible(num_key_value_heads=1), Ranks(rank(0))), "self_attn.n_kv_heads is 1"),
        (lambda: divide(tiny_model("gemma3_text"), Ranks(rank(0))), "class 'gemma3_text' cannot be sharded"),
        (lambda: divide(quantized(intermediate_size=192), Ranks(rank(0), False)), "columns end at 96 of 192, inside"),
        (lambda: load(group=rank(0, 4)), "cannot be divided among 4 ranks"),
        (lambda: load(group=rank(0), shard_sums="max"), "shard_sums: unknown, got max; choose from gather, sum"),
        (lambda: load(group=rank(0), adapter_path="here"), "ranks cannot share a model with an adapter"),
    ],
)
def test_indivisible_models_are_refused(act, said):
    with pytest.raises(GearbxError, match=said):
        act()


def test_a_part_is_not_saved_as_a_model(tmp_path):
    model = load(group=rank(0))[0]
    Gearbox(model)
    with pytest.raises(GearbxError, match="this rank has only a part of the model"):
        model.save_weights(str(tmp_path / "model.safetensors"))


def test_pipeline_keeps_layers_of_a_rank():
    model = tiny_model("deepseek_v3")
    into_stages(model, rank(0))
    assert len(model.model.pipeline_layers) == 1


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [("llama", 2, "'llama' has no pipeline; omit pipeline=True"), ("deepseek_v3", 3, "has 2 layers for 3 ranks; use")],
)
def test_model_without_stages_is_refused(name, ranks, words):
    with pytest.raises(GearbxError, match=words):
        into_stages(tiny_model(name), rank(0, ranks))
