"""A calibrated base: codes of the lowest gear, chosen for the inputs of its layers; the original keeps every bit."""

import os

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import every_gear, normal, tiny_model, weights_of

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, convert
from gearbx_mlx.cli.bases import ANSWER_TOKENS, BaseText, answered, make_base, text_of
from gearbx_mlx.cli.terminal import progress_bar
from gearbx_mlx.conversion.calibrated_base import Inputs, SharedInputs, blocks_of, calibrate_base, steps
from gearbx_mlx.conversion.gptq import Factored, Grid, factored, gptq_codes, refitted, with_codes
from gearbx_mlx.conversion.kept_bases import key_of
from gearbx_mlx.formats import get_format
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.gears.discovery import discover
from gearbx_mlx.loading import load

GROUP = 32
TEXTS = [[(7 * i + 3 * n) % 60 for i in range(40 + n)] for n in range(6)]
TEXT = BaseText(TEXTS, [])


def base_of(model: nn.Module, format: str = "exact", ladder: tuple[int, ...] = (4, 16), texts=TEXTS):
    made = get_format(format)
    layers, _ = discover(model, "all", GROUP, made)
    return calibrate_base(model, layers, made, ladder, GROUP, texts)


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(dtype=mx.bfloat16)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEARBX_BASES", str(tmp_path / "cache"))
    return tmp_path / "cache"


def correlated(scale: float = 1.0) -> tuple[np.ndarray, Factored]:
    """Correlated inputs, and their Hessian."""
    inputs = np.array(normal(400, 24, seed=1) @ normal(24, 128, seed=2)) + 0.1 * np.array(normal(400, 128, seed=3))
    hessian = factored(scale * inputs.astype(np.float32))
    assert hessian is not None
    return inputs, hessian


def output_errors(format: str) -> tuple[float, float]:
    """Squared errors of outputs with the nearest and with calibrated codes, for correlated inputs."""
    weight, made = normal(48, 128).astype(mx.bfloat16), get_format(format)
    inputs, hessian = correlated()
    dense = np.array(weight.astype(mx.float32))
    nearest = made.nearest(weight, (4, 16) if made.ladders else (4,), GROUP)
    errors = []
    for planes in (nearest, with_codes(dense, nearest, hessian, made.window)):
        errors.append(float((((np.array(planes.dequantize()) - dense) @ inputs.T) ** 2).sum()))
    return errors[0], errors[1]


def fitted_grid() -> tuple[Grid, np.ndarray, np.ndarray, Factored]:
    """A grid fitted to codes, with a weight (G, g, O), the codes, and the Hessian."""
    _, hessian = correlated(scale=1 / 20)
    weight = np.array(normal(4, 32, 48, seed=4))
    low, high = weight.min(1), weight.max(1)
    grid = Grid((high - low) / 15, low, 4, lambda numbers: numbers)
    codes = gptq_codes(weight, weight, grid, hessian, None)
    return refitted(weight, weight, codes, grid, hessian, None), weight, codes, hessian


class TestCodes:
    @pytest.mark.parametrize(("format", "most"), [("planes", 0.3), ("affine", 0.3), ("exact", 0.6)])
    def test_calibrated_outputs_are_nearer_than_rtn(self, format, most):
        nearest, found = output_errors(format)
        assert found < most * nearest

    def test_scales_are_the_least_squares_for_the_codes(self):
        """Moving a single scale or bias never lowers the error of the outputs."""
        grid, weight, codes, hessian = fitted_grid()

        def error(grid: Grid) -> float:
            left = (weight - grid.values(codes)).reshape(-1, weight.shape[-1]).astype(np.float64)
            return float((left * (hessian.damped.astype(np.float64) @ left)).sum())

        least = error(grid)
        for step in (1e-3, -1e-3):
            for name in ("scales", "biases"):
                moved = getattr(grid, name).copy()
                moved[1, 3] += step
                assert error(grid._replace(**{name: moved})) > least

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
    def test_uninformative_inputs_are_not_factored(self, value):
        rows = np.full((4, 8), value, np.float32)
        assert factored(rows) is None
        assert SharedInputs([], [Inputs(rows)], [Inputs(rows)]).factored(None, [np.ones(4, bool)]) is None


class TestExactWeights:
    @pytest.mark.parametrize("kind", ["llama", "mixtral"])
    def test_every_bit_of_every_weight_comes_back(self, kind):
        model = tiny_model(kind, dtype=mx.bfloat16)
        before = weights_of(model)
        base = base_of(model)
        gearbox = Gearbox(model, format="exact", group_size=GROUP, base=base.layers)
        gearbox.shift(gearbox.ladder.top)
        for layer in gearbox.layers:
            module = dict(model.named_modules())[layer.path]
            linear = getattr(module, "projection", module)
            assert mx.array_equal(dense_weight(linear), before[f"{layer.path}.weight"]), layer.path

    def test_the_low_gear_has_the_chosen_codes(self, model):
        base = base_of(model)
        Gearbox(model, "4,16", format="exact", group_size=GROUP, base=base.layers, kernels="mlx").shift("low")
        path = next(path for path in base.layers if "mlp" in path)
        assert np.allclose(dense_weight(dict(model.named_modules())[path]), base.layers[path].dequantize(), atol=1e-2)


def test_codes_correct_errors_of_earlier_layers():
    """For drifted inputs, outputs come nearer to the original's than with codes that know only these inputs."""
    original = np.array(normal(600, 16, seed=1) @ normal(16, 64, seed=2)) + 0.1 * np.array(normal(600, 64, seed=3))
    inputs = (original + original @ np.array(normal(64, 64, seed=4)) * 0.03).astype(np.float32)
    weight = normal(48, 64, seed=5).astype(mx.bfloat16)
    dense, nearest = np.array(weight.astype(mx.float32)), get_format("planes").nearest(weight, (4,), GROUP)
    errors = []
    for seen in (inputs, original.astype(np.float32)):
        found = with_codes(dense, nearest, factored(inputs, seen - inputs), None)
        errors.append(((inputs @ np.array(found.dequantize()).T - original @ dense.T) ** 2).sum())
    assert errors[1] < 0.5 * errors[0]


class TestWalk:
    def test_every_block_and_the_head_advance_once(self, model):
        made, blocks = get_format("planes"), []
        layers, _ = discover(model, "all", GROUP, made)
        calibrate_base(model, layers, made, (4, 16), GROUP, TEXTS, lambda: blocks.append(1))
        assert len(blocks) == steps(model) == len(blocks_of(model)) + 1

    def test_layers_with_nonfinite_inputs_use_rtn(self, model):
        block = model.layers[1]
        block.input_layernorm.weight = mx.full(block.input_layernorm.weight.shape, mx.nan, mx.bfloat16)
        base = base_of(model)
        assert "model.layers.1.self_attn.q_proj" in base.rounded
        assert "model.layers.0.self_attn.q_proj" in base.layers

    def test_text_needs_two_tokens(self, model):
        assert base_of(model, texts=[[5], [5, 6]]).layers
        with pytest.raises(GearbxError, match="no text of two tokens"):
            base_of(model, texts=[[5], []])

    @pytest.mark.parametrize("format", ["planes", "exact"])
    def test_experts_have_codes_for_their_own_tokens(self, format):
        model = tiny_model("mixtral", dtype=mx.bfloat16)
        base = base_of(model, format)
        experts = [path for path in base.layers if "switch_mlp" in path]
        assert {path.rpartition(".")[2] for path in experts} == {"gate_proj", "up_proj", "down_proj"}

        def distance(layers) -> float:
            """Of the draft's logits from the original's."""
            geared = tiny_model("mixtral", dtype=mx.bfloat16)
            gearbox, found = Gearbox(geared, "4,16", format=format, group_size=GROUP, base=layers), []
            for _ in every_gear(gearbox):
                found.append(np.concatenate([np.array(geared(mx.array([text])))[0] for text in TEXTS]))
            return float(np.abs(found[0] - found[1]).mean())

        others = {path: planes for path, planes in base.layers.items() if path not in experts}
        assert distance(base.layers) < distance(others) < distance({})

    @pytest.mark.parametrize(("format", "ladder"), [("planes", (4, 8, 16)), ("rowwise", (4, 8))])
    def test_gears_sharing_codes_are_refused(self, model, format, ladder):
        with pytest.raises(GearbxError):
            base_of(model, format, ladder)


class TestCache:
    def test_cached_base_is_found_with_and_without_text(self, model, cache):
        format = get_format("exact")
        key = key_of(model, format, (4, 16), "all", GROUP, TEXT)
        assert key.find() is None
        with progress_bar() as progress:
            made = make_base(model, key, TEXTS, progress)
        for found in (key.find(), key_of(model, format, (4, 16), "all", GROUP).find()):
            assert found is not None
            assert found.layers.keys() == made.layers.keys()
            assert all(mx.array_equal(found.layers[p].weights[0], made.layers[p].weights[0]) for p in made.layers)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("change", [{"format": "planes"}, {"ladder": (3, 16)}, {"group_size": 64}, {"seed": 1}])
    def test_other_keys_find_no_base(self, model, cache, change):
        own = {"format": "exact", "ladder": (4, 16), "group_size": GROUP, "seed": 0}
        key_of(model, get_format("exact"), (4, 16), "all", GROUP, TEXT).keep(base_of(model))
        other = own | change
        asked = tiny_model(seed=other["seed"], dtype=mx.bfloat16)
        format = get_format(other["format"])
        assert key_of(asked, format, other["ladder"], "all", other["group_size"]).find() is None

    def test_truncated_file_is_replaced(self, model, cache):
        key = key_of(model, get_format("exact"), (4, 16), "all", GROUP, TEXT)
        key.keep(base_of(model))
        for size in (key.file().stat().st_size // 2, 0):
            os.truncate(key.file(), size)
            assert key.find() is None

    @pytest.mark.parametrize("place", ["file", "folder"])
    def test_file_writable_by_others_is_ignored(self, model, cache, place):
        key = key_of(model, get_format("exact"), (4, 16), "all", GROUP, TEXT)
        key.keep(base_of(model))
        path = key.file() if place == "file" else key.file().parent
        path.chmod(path.stat().st_mode | 0o020)
        with pytest.warns(GearbxWarning, match=f"^others may write to {path}; run chmod go-w on it; until then"):
            assert key.find() is None

    def test_uncacheable_base_is_used(self, model, cache):
        cache.write_text("in the way")
        key = key_of(model, get_format("exact"), (4, 16), "all", GROUP, TEXT)
        with progress_bar() as progress, pytest.warns(GearbxWarning, match="set XDG_CACHE_HOME to another directory"):
            base = make_base(model, key, TEXTS, progress)
        assert base.layers
        assert base.file is None


class TestText:
    def test_empty_text_is_refused_by_name(self, demo, tmp_path):
        file = tmp_path / "empty.txt"
        file.write_text(" \n")
        with pytest.raises(GearbxError, match=r"empty\.txt"):
            text_of(demo.tokenizer, str(file))

    def test_requests_are_in_the_chat_template(self, demo):
        requests = text_of(demo.tokenizer, None).requests
        assert len(requests) > 60
        assert all(demo.tokenizer.decode(request).endswith("Answer:") for request in requests)

    def test_answers_are_the_same_at_every_run(self):
        requests = [[5, 6, 7], [5, 6, 7], [8, 9]]
        runs = []
        for _ in range(2):
            model, tokenizer = load(None)
            with progress_bar() as progress:
                runs.append(answered(model, tokenizer, requests, progress))
        assert runs[0] == runs[1]
        for request, text in zip(requests, runs[0]):
            assert text[: len(request)] == request
            assert len(request) < len(text) <= len(request) + ANSWER_TOKENS
        assert runs[0][0] != runs[0][1]  # each answer has a seed of its own


@pytest.mark.slow
def test_a_converted_base_agrees_more_often_and_restores(cache, tmp_path):
    """The demo model: fewer of the draft's tokens differ, and the original comes back byte for byte."""
    common = {"format": "exact", "device": "cpu"}
    convert(mlx_path=tmp_path / "nearest", **common)
    convert(mlx_path=tmp_path / "base", calibrate="", **common)
    convert(mlx_path=tmp_path / "original", restore=str(tmp_path / "base"))
    shipped = load(None)[0]
    again = load(tmp_path / "original")[0]
    assert all(mx.array_equal(a, weights_of(again)[name]) for name, a in weights_of(shipped).items())
    _, tokenizer = load(None)
    texts = [mx.array([text]) for text in text_of(tokenizer, None).sequences[:8]]
    wanted = [mx.argmax(shipped(text), axis=-1) for text in texts]
    differing = []
    for name in ("nearest", "base"):
        model, _ = load(tmp_path / name)
        Gearbox(model).shift("low")
        favourites = (mx.argmax(model(text), axis=-1) for text in texts)
        differing.append(sum((own != best).sum().item() for own, best in zip(favourites, wanted)))
    assert differing[1] < differing[0]
