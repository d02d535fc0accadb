"""Format exact: every bit of bfloat16 weights, in one copy that contains its low gears."""

from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import GROUP, tiny
from conftest import PROMPT, active_memory, every_gear, layer_with, normal, same_weights, weights_of
from exact_reference import as_bf16, bits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.gears import sources
from gearbx_mlx.kernels import exact as kernels_exact

LINEAR = "model.layers.0.mlp.up_proj"


def gears(dense: nn.Module, group_size: int = 64) -> dict[int, nn.Module]:
    """Both gears of one layer, by bits."""
    return get_format("exact").modules(dense, 4, (4, 16), group_size, mx.bfloat16)


def comes_back(weight: mx.array, group_size: int) -> bool:
    made = gears(layer_with(weight), group_size)[16]
    return np.array_equal(bits_of(made.dense_weight()), bits_of(weight))


def model_of(architecture: str = "llama", **change: object) -> nn.Module:
    """A tiny model of bfloat16 that computes in float32, as behind a gearbox."""
    return tiny(architecture, mx.bfloat16, **change)


def boxed(ladder: str = "4,16", architecture: str = "llama", model: nn.Module | None = None, **keywords) -> Gearbox:
    keywords = {"format": "exact", "group_size": GROUP, "kernels": "mlx"} | keywords
    return Gearbox(model or model_of(architecture), ladder, **keywords)


def logits(gearbox: Gearbox, gear: str) -> np.ndarray:
    gearbox.shift(gear)
    return np.array(gearbox.model(PROMPT).astype(mx.float32))


def linear_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """The bits of every matrix, by name."""
    return {name: bits_of(array) for name, array in weights_of(model).items() if array.ndim > 1}


class TestBitExactRoundTrip:
    @settings(max_examples=40)
    @given(
        seed=st.integers(0, 2**32 - 1),
        rows=st.integers(1, 5),
        groups=st.integers(1, 3),
        group_size=st.sampled_from([32, 64, 128]),
        exponent=st.integers(-140, 126),
        heavy=st.booleans(),
        special=st.lists(st.integers(0, 65535), max_size=6),
    )
    def test_weights_of_any_size_and_values(self, seed, rows, groups, group_size, exponent, heavy, special):
        random = np.random.default_rng(seed)
        shape = rows, groups * group_size
        values = random.standard_t(2, shape) if heavy else random.standard_normal(shape)
        values = np.clip(np.ldexp(values, exponent), -3e38, 3e38).astype(np.float32)
        bits = bits_of(mx.array(values).astype(mx.bfloat16)).copy()
        bits[random.integers(0, shape[0], len(special)), random.integers(0, shape[1], len(special))] = special
        assert comes_back(as_bf16(bits), group_size)

    @pytest.mark.parametrize("pattern", [0x0000, 0x8000, 0x0001, 0x807F, 0x3F80, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
    def test_of_groups_of_one_value(self, pattern):
        """Zeros of both signs, subnormals, one, infinities, NaN with any payload; alone and beside ordinary groups."""
        bits = bits_of((normal(3, 128) * 0.02).astype(mx.bfloat16)).copy()
        bits[1], bits[2, :64] = pattern, pattern
        assert comes_back(as_bf16(bits), 64)

    @pytest.mark.parametrize("kind", ["experts", "heads"])
    def test_of_stacked_matrices(self, kind):
        layer = SwitchLinear(64, 32, 5, bias=False) if kind == "experts" else MultiLinear(64, 32, 5)
        layer.weight = (normal(5, 32, 64) * 0.02).astype(mx.bfloat16)
        made = gears(layer)[16]
        assert made.weight_shape == (5, 32, 64)
        np.testing.assert_array_equal(bits_of(made.dense_weight()), bits_of(layer.weight))

    def test_of_any_rows_by_themselves(self):
        weight = (normal(40, 128) * 0.02).astype(mx.bfloat16)
        chosen = mx.array([[39, 0, 7], [7, 12, 39]])
        rows = gears(layer_with(weight))[16].rows(chosen)
        np.testing.assert_array_equal(bits_of(rows), bits_of(weight[chosen]))


class TestLowGear:
    def test_has_the_codes_of_mlx(self):
        dense = layer_with((normal(64, 128) * 0.02).astype(mx.bfloat16))
        theirs = get_format("affine").modules(dense, 4, (4,), 64, mx.bfloat16)[4]
        assert same_weights(weights_of(gears(dense)[4]), weights_of(theirs))

    def test_size_is_slightly_below_original_weights(self):
        """Gaussian rows 4096 wide; the figure is that of docs/exact.md."""
        made = gears(layer_with((normal(64, 4096) * 0.02).astype(mx.bfloat16)))[16]
        arrays = sum(array.nbytes for _, array in tree_flatten(made.parameters()))
        assert made.bytes_read == arrays
        assert 8 * arrays / (64 * 4096) <= 13.55
        assert get_format("exact").bytes_read((64, 4096), 16, (4, 16), 64, 2) == pytest.approx(arrays, rel=0.01)


@pytest.mark.some(1)
def test_many_vectors_never_decode_whole_matrix(monkeypatch):
    """MLX's own operations need some twenty times a weight's memory on the way; the number of tiles must not matter."""
    monkeypatch.setattr(kernels_exact, "WEIGHTS_DECODED_AT_ONCE", 2**14)

    def peak(rows: int) -> int:
        module = gears(layer_with((normal(rows, 256) * 0.02).astype(mx.bfloat16)))[16]
        x = normal(32, 256)
        mx.eval(x, module.parameters())
        before = active_memory()
        mx.reset_peak_memory()
        mx.eval(module(x))
        return mx.get_peak_memory() - before - 2 * 32 * rows * 4  # without the result and its parts

    assert peak(16384) < 2 * peak(512)


TIED = {"tie_word_embeddings": True}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("architecture", "change"),
    [("llama", {}), ("llama", TIED), ("qwen3_moe", {}), ("deepseek_v3", {}), ("gpt_neox", {})],
    ids=["untied", "tied", "experts", "heads", "biases"],
)
@pytest.mark.parametrize("kernels", ["mlx", "native"])
def test_model_has_every_weight_and_affine_low_gear(architecture, change, kernels):
    before = linear_weights(model_of(architecture, **change))
    ours = boxed(model=model_of(architecture, **change), kernels=kernels)
    theirs = boxed(model=model_of(architecture, **change), format="affine", kernels=kernels)
    assert ours.layers
    floors = {path for path, reason in ours.unmanaged.items() if "has a floor of 8 bits" in reason}
    assert {layer.path for layer in ours.layers} | floors == {layer.path for layer in theirs.layers}
    np.testing.assert_array_equal(logits(ours, "high"), logits(theirs, "high"))
    for layer in ours.layers:
        weight = dense_weight(layer_in(ours, layer.path)).astype(mx.bfloat16)
        np.testing.assert_array_equal(bits_of(weight), before[f"{layer.path}.weight"], err_msg=layer.path)
    assert np.isfinite(logits(ours, "low")).all()
    theirs.shift("low")
    for layer in ours.layers:
        low, expected = (weights_of(layer_in(box, layer.path)) for box in (ours, theirs))
        assert same_weights(low, expected), layer.path


def layer_in(gearbox: Gearbox, path: str) -> nn.Module:
    """The linear layer that is engaged; of a tied embedding, its head."""
    module = dict(gearbox.model.named_modules())[path]
    return getattr(module, "projection", module)


class TestMemory:
    def test_growing_layers_are_left_unchanged(self):
        model = model_of()
        noise = np.random.default_rng(0).integers(0, 65536, (128, 64))
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = as_bf16(np.where((noise & 0x7F80) == 0x7F80, 0, noise))
        before = bits_of(layer.weight)
        gearbox = boxed(model=model)
        assert "would take" in gearbox.unmanaged[LINEAR]
        assert LINEAR not in [layer.path for layer in gearbox.layers]
        for _ in every_gear(gearbox):
            np.testing.assert_array_equal(bits_of(layer_in(gearbox, LINEAR).weight.astype(mx.bfloat16)), before)

    def test_byte_counts_match_arrays(self):
        gearbox = boxed("4,16")
        layer = next(layer for layer in gearbox.layers if layer.path == LINEAR)
        for _ in every_gear(gearbox):
            arrays = [a for _, a in tree_flatten(layer_in(gearbox, LINEAR).parameters())]
            sizes = [a.size * (2 if a.dtype == mx.float32 else a.dtype.size) for a in arrays]
            assert gearbox.layer_bytes(layer, gearbox.gear) == sum(sizes)
        dense = boxed("16", format="planes")
        assert gearbox.original_bytes_per_token() == dense.weight_bytes_per_token(dense.ladder.top)


class TestLayer:
    def test_only_layer_with_floor_above_gears_is_refused(self):
        model = model_of()
        before = linear_weights(model)
        with pytest.raises(GearbxError, match="no layer can change gear: has a floor of 8 bits"):
            boxed(model=model, manage=lambda path, module: {"bits": 8})
        np.testing.assert_equal(linear_weights(model), before)

    def test_in_two_places_is_refused(self):
        model = model_of()
        model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
        with pytest.raises(GearbxError, match="is a module in two places"):
            boxed(model=model)

    def test_with_a_floor_stays_dense_in_every_gear(self):
        gearbox = boxed(manage=lambda path, module: {"bits": 8} if path == LINEAR else True)
        assert gearbox.unmanaged == {LINEAR: "has a floor of 8 bits, which format exact does not have"}
        gearbox.shift("low")
        assert type(layer_in(gearbox, LINEAR)) is nn.Linear

    def test_other_dtype_stays_dense_and_is_reported(self):
        model = model_of()
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = layer.weight.astype(mx.float16)
        assert boxed(model=model).unmanaged == {LINEAR: "weights of float16, and format exact is for bfloat16"}


def test_shifts_and_other_types_change_no_weight():
    gearbox = boxed()
    before = linear_weights(model_of())
    for gear in ("low", "high", "low", "high"):
        gearbox.shift(gear)
    gearbox.model.set_dtype(mx.float16)
    assert gearbox.model(PROMPT).dtype == mx.float16
    for gear in ("low", "high"):
        gearbox.shift(gear)
    for layer in gearbox.layers:
        weight = layer_in(gearbox, layer.path).dense_weight()
        np.testing.assert_array_equal(bits_of(weight), before[f"{layer.path}.weight"], err_msg=layer.path)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_stopped_encoding_restores_model_weights(stop, monkeypatch):
    model = model_of(tie_word_embeddings=True)
    before = linear_weights(model)
    done = []

    @contextmanager
    def stopping(total):
        def advance(count):
            done.append(count)
            if len(done) == 5:
                raise stop

        yield advance

    monkeypatch.setattr(sources, "while_encoding", stopping)
    with pytest.raises(stop):
        boxed(model=model, dtype="bfloat16")
    assert len(done) == 5
    np.testing.assert_equal(linear_weights(model), before)


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("dtype", "keywords", "complaint"),
    [
        (mx.bfloat16, {"ladder": "4"}, "format exact has gears 4,16, got 4"),
        (mx.bfloat16, {"ladder": "8,16"}, "got 8"),
        (mx.bfloat16, {"ladder": "3,16"}, "got 3; use 4,16, or choose format planes"),
        (mx.bfloat16, {"ladder": "4,8,16"}, "got 8; use 4,16, or choose format planes"),
        (mx.bfloat16, {"widths": [5]}, "got 5"),
        (mx.bfloat16, {"widths": [4]}, "with other bits for some layers"),
        (mx.bfloat16, {"tables": {"low": {LINEAR: 16}}}, "omit tables"),
        (mx.bfloat16, {"low_model": nn.Linear(1, 1)}, "got a separate low model"),
        (mx.bfloat16, {"residency": "disk"}, "omit residency 'disk'"),
        (mx.float32, {}, "weights of float32, and format exact is for bfloat16; .*or make the model bfloat16"),
        (mx.float16, {}, "weights of float16, and format exact is for bfloat16; .*or make the model bfloat16"),
    ],
)
def test_unsupported_options_are_refused(dtype, keywords, complaint):
    model = tiny("llama", dtype)
    before = weights_of(model)
    with pytest.raises(GearbxError, match=rf"^.*{complaint}.*$"):  # one line
        boxed(**({"ladder": "4,16", "model": model} | keywords))
    assert {name: array.dtype for name, array in weights_of(model).items()} == {n: a.dtype for n, a in before.items()}


@pytest.mark.parametrize("gear", ["low", "high"])
def test_weights_unloadable_by_mlx_lm_are_not_saved(gear, tmp_path):
    gearbox = boxed()
    gearbox.shift(gear)
    with pytest.raises(GearbxError, match=r"write the gears with gearbx_mlx convert"):
        gearbox.model.save_weights(str(tmp_path / "model.safetensors"))
    assert not list(tmp_path.iterdir())
