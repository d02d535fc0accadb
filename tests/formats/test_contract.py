"""What every format promises: its modules compute with the weight that they stand for, over arrays that files hold."""

import ast
import copy
import inspect
import math
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import ARCHITECTURES, PROMPT, every_gear, matrix, on_disk, same_weights, tiny_model, weights_of
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from refusals import assert_refused

from gearbx_mlx import Gearbox, GearbxError, Observer
from gearbx_mlx.formats import FORMATS, RECONSTRUCTED, get_format, with_cache
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.formats.exact import ExactSwitchLinear
from gearbx_mlx.formats.planes import NativePlanesSwitchLinear, PlanesLinear, PlanesSwitchLinear

LIBRARY = "codebook-library"
GEARS = {  # of each format, those that it stores together
    "planes": (2, 4, 5, 6, 8),
    "affine": (2, 3, 4, 5, 6, 8),
    "exact": (4, 16),
    "rowwise": (2, 4, 6, 8),
    "groupwise": (4,),
    "codebook": (2, 3, 4, 5, 6),
    LIBRARY: (2, 3, 4),
}
CASES = [(name, bits) for name, ladder in GEARS.items() for bits in ladder]
OF_ANY_WIDTH = [case for case in CASES if case[0] in RECONSTRUCTED]
MADE_ONE_BY_ONE = [name for name in FORMATS if name != "exact"]
LADDERS = {"groupwise": "4,16", "codebook": "2,4,16", LIBRARY: "2,4,16"}  # of a gearbox; else 4,8,16
GROUP = 64


def layer_of(name: str, weight: mx.array, bias: bool = False) -> nn.Module:
    """A linear layer, or experts, of a type that the format takes."""
    rows, width = weight.shape[-2:]
    kind = nn.Linear(width, rows, bias=bias) if weight.ndim == 2 else SwitchLinear(width, rows, len(weight), bias=bias)
    kind.weight = weight.astype(mx.bfloat16) if name == "exact" else weight
    if bias:
        kind.bias = matrix(*weight.shape[:-1], scale=1.0, seed=1)
    return kind


def gear(name: str, dense: nn.Module, bits: int, cache: bool = False, dtype: mx.Dtype = mx.float32) -> nn.Module:
    format = with_cache(name) if cache else get_format(name)
    return format.modules(dense, bits, GEARS[name], GROUP, dtype)[bits]


def nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


class TestModules:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize(
        ("name", "bits", "shape"),
        [(*case, (48, 256)) for case in CASES]
        + [(*case, shape) for case in OF_ANY_WIDTH for shape in ((1, 64), (16, 1), (1, 1), (7, 37))],
    )
    def test_layer_computes_with_its_dequantized_weight(self, name, bits, shape, bias):
        dense = layer_of(name, matrix(*shape), bias)
        module = gear(name, dense, bits)
        weight = dense_weight(module).astype(mx.float32)
        off = mx.linalg.norm(weight - dense.weight) / mx.linalg.norm(dense.weight)
        assert off.item() < 2.0**-bits * 4
        for leading in ((), (3,), (2, 3)):
            x = matrix(*leading, shape[1], scale=1.0, seed=2)
            expected = x @ weight.T + (dense.bias if bias else 0)
            assert mx.allclose(module(x), expected, atol=1e-5).item()
        assert not bias or module.bias is dense.bias
        assert not tree_flatten(module.trainable_parameters())

    @pytest.mark.some(8)
    @pytest.mark.parametrize(("name", "bits"), [case for case in CASES if case[0] != "exact"])
    def test_experts_agree_with_linears_one_by_one(self, name, bits):
        experts = layer_of(name, matrix(8, 12, 128), bias=True)
        module = gear(name, experts, bits)
        assert (module.input_dims, module.output_dims, module.num_experts) == (128, 12, 8)
        for wanted in ([0, 7, 1, 7, 0], [*range(8), 3, 3]):  # fewer than all experts, and more
            x = matrix(len(wanted), 1, 1, 128, scale=1.0)
            y = module(x, mx.array([[expert] for expert in wanted]))
            for row, expert in enumerate(wanted):
                alone = layer_of(name, experts.weight[expert], bias=True)
                alone.bias = experts.bias[expert]
                assert mx.allclose(y[row, 0], gear(name, alone, bits)(x[row]), atol=1e-5).item()

    @pytest.mark.parametrize(("name", "bits"), CASES)
    def test_arrays_match_file_layout_and_rebuild_module(self, name, bits):
        format, ladder = get_format(name), GEARS[name]
        dense = layer_of(name, matrix(32, 256))
        dense.set_dtype(mx.bfloat16)
        module = format.modules(dense, bits, ladder, GROUP, mx.bfloat16)[bits]
        arrays = dict(tree_flatten(module.parameters()))
        stored = format.stored_arrays((32, 256), bits, ladder, GROUP, mx.bfloat16)
        assert arrays.keys() == stored.keys()
        for array_name, array in arrays.items():
            viewed = array_name.split(".")[0] in format.viewed
            assert array.dtype == (mx.uint16 if viewed else stored[array_name].dtype)
            known = zip(array.shape, stored[array_name].shape, strict=True)
            assert all(told in (None, size) for size, told in known)
        again = format.module(dense, bits, arrays, ladder, GROUP)
        assert type(again) is type(module)
        assert mx.array_equal(dense_weight(again), dense_weight(module)).item()

    @pytest.mark.parametrize("shape", [(4, 256), (9, 37), (3, 5, 21), (1, 1)])
    @pytest.mark.parametrize("name", ["planes", "affine", "rowwise", "groupwise"])  # lists of others differ in length
    def test_bytes_read_match_arrays(self, name, shape):
        if shape[-1] % GROUP and name not in RECONSTRUCTED:
            assert get_format(name).fits(shape[-1], GROUP)
            return
        dense = layer_of(name, matrix(*shape))
        dense.set_dtype(mx.float16)
        for bits in GEARS[name]:
            module = gear(name, dense, bits, dtype=mx.float16)
            again = (len(module.widths) - 1) * module.scales.nbytes if isinstance(module, PlanesLinear) else 0
            assert get_format(name).bytes_read(shape, bits, GEARS[name], GROUP, 2) == nbytes(module) + again

    @pytest.mark.parametrize("name", MADE_ONE_BY_ONE)
    def test_gear_is_same_in_any_compute_dtype(self, name):
        dense = layer_of(name, matrix(16, 128))
        dense.set_dtype(mx.bfloat16)
        half, single = (
            dict(tree_flatten(gear(name, copy.copy(dense), 4, dtype=dtype).parameters()))
            for dtype in (mx.bfloat16, mx.float32)
        )
        assert half.keys() == single.keys()
        assert all(mx.array_equal(half[array], single[array]).item() for array in half)

    @pytest.mark.parametrize("name", FORMATS)
    def test_making_a_gear_draws_no_random_numbers(self, name):
        dense = layer_of(name, matrix(16, 128))
        mx.random.seed(7)
        expected = mx.random.uniform(shape=(4,))
        mx.random.seed(7)
        mx.eval(gear(name, dense, 4).parameters())
        assert mx.array_equal(mx.random.uniform(shape=(4,)), expected).item()


class TestReconstructed:
    """Formats that MLX cannot multiply packed."""

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    @pytest.mark.parametrize("name", RECONSTRUCTED)
    def test_compute_dtype_follows_activations(self, name, dtype):
        module, x = gear(name, layer_of(name, matrix(8, 40)), 4), matrix(40, 3, scale=1.0)
        assert module(x.T.astype(dtype)).dtype == dtype
        assert mx.allclose(module(x.T), module(mx.contiguous(x.T)), atol=1e-6).item()

    @pytest.mark.parametrize("name", RECONSTRUCTED)
    def test_cache_changes_no_bits_or_parameters(self, name):
        dense, x = layer_of(name, matrix(24, 70)), matrix(3, 70, scale=1.0)
        cached, plain = gear(name, dense, 4, cache=True), gear(name, dense, 4)
        before = cached.parameters().keys()
        for dtype in (mx.float32, mx.float32, mx.float16):  # another type is another reconstruction
            assert mx.array_equal(cached(x.astype(dtype)), plain(x.astype(dtype))).item()
            assert cached._kept.dtype == dtype
        assert cached.parameters().keys() == before
        kept = cached._kept
        cached(x.astype(mx.float16))
        assert cached._kept is kept
        cached.forget()
        assert cached._kept is plain._kept is None

    def test_the_cache_changes_no_bit_of_experts(self):
        experts = layer_of("rowwise", matrix(8, 16, 64), bias=True)
        x, chosen = matrix(3, 1, 1, 64, scale=1.0), mx.array([[0, 5], [2, 5], [1, 7]])
        cached, plain = (gear("rowwise", experts, 4, cache=cache) for cache in (True, False))
        assert mx.array_equal(cached(x, chosen), plain(x, chosen)).item()

    @pytest.mark.parametrize("is_dropped", [False, True])
    def test_shift_drops_cache_and_keeps_results(self, tmp_path, is_dropped):
        model, plain = tiny_model(), tiny_model()
        idle = on_disk(model, tmp_path) if is_dropped else {}
        gearbox = Gearbox(model, "2,6,16", format=with_cache("rowwise"), kernels="mlx", **idle)
        other = Gearbox(plain, "2,6,16", format="rowwise", kernels="mlx")
        up = model.model.layers[0].mlp
        for name in ("low", "mid", "low", "high"):
            engaged = up.up_proj
            gearbox.shift(name)
            assert getattr(engaged, "_kept", None) is None
            other.shift(name)
            for _ in range(2):
                assert mx.array_equal(model(PROMPT), plain(PROMPT)).item()
            assert name == "high" or up.up_proj._kept is not None

    def test_cached_bytes_count_multiplied_weights(self):
        cached, packed = (
            Gearbox(tiny_model(), "4,16", format=format, kernels="mlx") for format in (with_cache("rowwise"), "rowwise")
        )
        low, high = cached.ladder
        assert cached.weight_bytes_per_token(low) == cached.weight_bytes_per_token(high)
        assert packed.weight_bytes_per_token(low) < packed.weight_bytes_per_token(high) / 2
        assert packed.weight_bytes_per_token(high) == cached.weight_bytes_per_token(high)

    @pytest.mark.parametrize("format", ["planes", "affine"])
    def test_packed_format_has_no_cache(self, command, format):
        done = command("generate", "--format", format, "--kernels", "dequant-cache", "-m", 1)
        assert_refused(done, f"format {format} is multiplied packed; use --format rowwise")


class TestGearbox:
    @pytest.mark.some(9)
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("name", MADE_ONE_BY_ONE)
    def test_every_architecture_runs_every_gear_and_returns(self, architecture, name):
        model = tiny_model(architecture)
        before, logits = weights_of(model), model(PROMPT)
        gearbox = Gearbox(model, LADDERS.get(name, "4,8,16"), format=name, kernels="mlx")
        errors = []
        for _ in every_gear(gearbox):
            errors.append(mx.abs(model(PROMPT) - logits).max().item())
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > errors[-1] == 0
        assert same_weights(weights_of(model), before)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", MADE_ONE_BY_ONE)
    def test_nonfinite_weights_are_named(self, tiny, name, value):
        layer = tiny.model.layers[1].mlp.up_proj
        layer.weight = mx.concatenate([mx.full((1, 64), value), layer.weight[1:]])
        gearbox = Gearbox(tiny, LADDERS.get(name, "4,8,16"), format=name)
        with pytest.raises(GearbxError, match=r"model.layers.1.mlp.up_proj: weights are not finite"):
            gearbox.shift("low")
        assert gearbox.gear.name == "high"

    @pytest.mark.parametrize(("name", "bits"), [("rowwise", 3), ("groupwise", 8), ("codebook", 8), (LIBRARY, 5)])
    def test_unsupported_bits_are_refused(self, tiny, name, bits):
        choices = ", ".join(map(str, [*GEARS[name], 16]))
        with pytest.raises(GearbxError, match=f"format '{name}' has no {bits}-bit gear; choose from {choices}$"):
            Gearbox(tiny, f"{bits},16", format=name)

    @pytest.mark.parametrize("name", RECONSTRUCTED)
    def test_a_layer_of_any_width_is_managed(self, tiny, name):
        tiny.model.layers[1].mlp.down_proj = nn.Linear(100, 64, bias=False)
        assert Gearbox(tiny, LADDERS.get(name, "4,8,16"), format=name).unmanaged == {}

    @pytest.mark.parametrize("name", ["rowwise", "groupwise"])
    def test_gears_are_seen_as_quantized_and_counted(self, tiny, name):
        gearbox = Gearbox(tiny, "4,16", format=name)
        gearbox.shift("low")
        with pytest.raises(GearbxError, match="quantized already"):
            Gearbox(tiny)
        assert Observer(tiny).bits_per_weight(gearbox.gear) == pytest.approx(gearbox.bits_per_weight(gearbox.gear))


class TestNames:
    def test_every_format_has_its_registered_name(self):
        assert {name: get_format(name).name for name in FORMATS} == {name: name for name in FORMATS}
        assert get_format("planes") is get_format(get_format("planes"))

    def test_they_load_neither_mlx_nor_numpy(self):
        names = "gearbx_mlx.formats, gearbx_mlx.kernels"
        program = f"import sys, {names}; print(sorted({{name.split('.')[0] for name in sys.modules}}))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert {"mlx", "mlx_lm", "numpy"}.isdisjoint(ast.literal_eval(done.stdout))


@pytest.mark.parametrize("kind", [PlanesSwitchLinear, NativePlanesSwitchLinear, ExactSwitchLinear])
def test_experts_take_arguments_like_mlx_lm(kind):
    ours, theirs = (inspect.signature(each.__call__).parameters.values() for each in (kind, SwitchLinear))
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]
