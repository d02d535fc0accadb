"""What Python, MLX and mlx-lm do to any model, done to a model with gears: it works, or one line says what to do."""

import copy
import dataclasses
import pickle
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import pytest
from conftest import PROMPT, every_gear, on_disk, same_weights, save_model, tiny_model, weights_of
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from refusals import refuses

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Route, Static, TelemetryOnly, convert
from gearbx_mlx.formats import FORMATS, get_format
from gearbx_mlx.gears.gearbox import attached
from gearbx_mlx.gears.ladder import Gear
from gearbx_mlx.routing.gates import ThresholdGate

KINDS = ("original", "checkpoint")
PATH = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An original, a geared checkpoint of it whose base mlx-lm runs, and one that gearbx-mlx alone runs."""
    root = tmp_path_factory.mktemp("models")
    save_model(tiny_model(), root / "original")
    convert(model=str(root / "original"), mlx_path=str(root / "checkpoint"), gears="4,8,16")
    convert(model=str(root / "original"), mlx_path=str(root / "alone"), gears="4,8", format="rowwise")
    return root


@pytest.fixture(params=["mlx", "native"])
def make(directory, request):
    """A model with gears, of one of KINDS, and its gearbox."""

    def made(kind: str) -> tuple[nn.Module, Gearbox]:
        model, _ = gearbx_mlx.load(directory / ("checkpoint" if kind == "checkpoint" else "original"))
        gearbox = Gearbox(model, "4,8,16", kernels=request.param)
        return model, gearbox

    made.kernels = request.param
    return made


def in_the_first_layer(q_proj) -> dict:
    return {"model": {"layers": [{"self_attn": {"q_proj": q_proj}}]}}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryGear:
    @pytest.mark.some(2)
    def test_model_is_read_in_every_gear(self, make, kind):
        model, gearbox = make(kind)
        for gear in every_gear(gearbox):
            found = dict(tree_flatten(model.parameters()))
            assert same_weights(found, weights_of(gearbox.model))
            assert (f"{PATH}.weight" in found) == (gear.bits in (4, 16))
            assert "q_proj" in str(model)
            assert model.train().training
            assert not model.eval().training
            assert not tree_flatten(model.freeze().trainable_parameters())

    @pytest.mark.some(2)
    def test_change_to_single_gear_is_refused(self, make, kind):
        model, gearbox = make(kind)
        changes = [
            lambda: model.update(in_the_first_layer({"weight": mx.zeros((64, 64))})),
            lambda: model.apply(lambda array: array + 1),
            lambda: model.load_weights(list(weights_of(tiny_model(seed=1)).items())),
            lambda: model.update_modules(in_the_first_layer(nn.Linear(64, 64, bias=False))),
        ]
        for gear in reversed(list(gearbox.ladder)):
            gearbox.shift(gear)
            before = gearbox.model(PROMPT)
            for change in changes:
                with refuses():
                    change()
            assert mx.array_equal(gearbox.model(PROMPT), before)

    def test_block_around_shifting_layers_is_not_replaced(self, make, kind):
        model, _ = make(kind)
        with pytest.raises(GearbxError, match="the next shift would undo this"):
            model.update_modules({"model": {"layers": [nn.Linear(64, 64)]}})

    @pytest.mark.some(2)
    def test_save_model_writes_loadable_weights_or_none(self, make, kind, directory, tmp_path):
        model, gearbox = make(kind)
        source = directory / ("checkpoint" if kind == "checkpoint" else "original")
        stock = kind == "checkpoint" and make.kernels == "mlx"  # a CPU's own kernels may have rows side by side
        for gear in every_gear(gearbox):
            out = tmp_path / gear.name
            if gear.name == "mid" or (gear.name == "low" and not stock):
                with pytest.raises(GearbxError, match="shift to a 16-bit gear first"):
                    mlx_lm.utils.save_model(out, model)
                assert not any(out.iterdir())
                continue
            mlx_lm.utils.save_model(out, model)
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                shutil.copy((directory / "original" if gear.dense else source) / name, out)
            theirs, _ = mlx_lm.load(str(out))
            assert mx.allclose(theirs(PROMPT), gearbox.model(PROMPT), atol=2e-4)
            model.save_weights(str(out / "weights.safetensors"))
            assert same_weights(dict(mx.load(str(out / "weights.safetensors"))), weights_of(theirs))

    def test_quantizing_is_refused(self, make, kind):
        model, gearbox = make(kind)
        gearbox.shift("high")
        with pytest.raises(GearbxError, match="do that before the model gets a gearbox"):
            nn.quantize(model)
        gearbox.shift("mid")
        with pytest.raises(GearbxError, match="shift to a 16-bit gear first"):
            nn.quantize(model)


class TestCheckpointWithoutGearbox:
    def test_base_is_saved_readable_by_mlx_lm(self, directory, tmp_path):
        model, tokenizer, config = gearbx_mlx.load(directory / "checkpoint", return_config=True)
        mlx_lm.utils.save(tmp_path / "saved", directory / "checkpoint", model, tokenizer, config, donate_model=False)
        assert mx.array_equal(mlx_lm.load(str(tmp_path / "saved"))[0](PROMPT), model(PROMPT))

    def test_base_unsupported_by_mlx_lm_is_not_saved(self, directory, tmp_path):
        model, _ = gearbx_mlx.load(directory / "alone")
        with pytest.raises(GearbxError, match="runs only with gearbx-mlx; save the original instead"):
            mlx_lm.utils.save_model(tmp_path / "saved", model)
        with pytest.raises(GearbxError, match="cannot be pickled; use load"):
            pickle.dumps(model)

    def test_giving_its_arrays_away_is_refused(self, directory, tmp_path):
        model, _ = gearbx_mlx.load(directory / "checkpoint")
        before = model(PROMPT)
        with pytest.raises(GearbxError, match="save it with donate_model=False"):
            mlx_lm.utils.save_model(tmp_path / "saved", model, donate_model=True)
        assert mx.array_equal(model(PROMPT), before)


def test_adapter_precedes_gearbox_and_is_never_saved(tmp_path):
    model, rank = tiny_model(), {"rank": 2, "scale": 1.0, "dropout": 0.0}
    Gearbox(model, "4,16")
    before = model(PROMPT)
    with pytest.raises(GearbxError, match="do that before the model gets a gearbox"):
        linear_to_lora_layers(model, 2, rank)
    assert mx.array_equal(model(PROMPT), before)
    model = tiny_model()
    linear_to_lora_layers(model, 2, rank)
    Gearbox(model, "4,16")
    with pytest.raises(GearbxError, match=r"fuse them \(mlx_lm.fuse\)"):
        mlx_lm.utils.save_model(tmp_path / "saved", model)


@pytest.mark.parametrize(
    "settings",
    [
        *(mode() for mode in (Route, Kickdown, Lossless, Static, TelemetryOnly)),
        Route(thresholds=(1.0, 2.0), initial_gear="high"),
        ThresholdGate((1.0, 2.0), 0.1, 3),
        Gear(0, "low", 4),
        *map(get_format, FORMATS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_are_pickled_and_copied(settings):
    for made in (pickle.loads(pickle.dumps(settings)), copy.deepcopy(settings)):
        assert type(made) is type(settings)
        if dataclasses.is_dataclass(settings):
            assert made == settings
        else:
            assert vars(made) == vars(settings)


@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_copy_has_separate_gearbox_with_same_gears(tmp_path, kernels, is_dropped):
    model = tiny_model(dtype=mx.bfloat16)
    gearbox = Gearbox(model, "4,8,16", kernels=kernels, **(on_disk(model, tmp_path) if is_dropped else {}))
    gearbox.shift("low")
    low = model(PROMPT)
    copied = copy.deepcopy(model)
    gearbox.shift("high")
    other = attached(copied)
    assert other.model is copied
    assert other.gear.name == "low"
    assert mx.array_equal(copied(PROMPT), low)
    other.shift("high")
    assert mx.array_equal(copied(PROMPT), model(PROMPT))
    other.shift("low")
    assert mx.array_equal(copied(PROMPT), low)


@pytest.mark.some(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["mlx", "native"])
def test_logits_and_cache_follow_later_dtype(kernels, tied):
    model = tiny_model("gemma3_text", tie_word_embeddings=tied)
    gearbox = Gearbox(model, "4,8,16", kernels=kernels)
    for gear in ("low", "mid", "high"):  # made in float32
        gearbox.shift(gear)
    for dtype in (mx.float16, mx.float32):
        model.set_dtype(dtype)
        cache = make_prompt_cache(model)
        assert model(PROMPT, cache=cache).dtype == dtype
        assert model(mx.array([[3]]), cache=cache).dtype == dtype
        assert {part.keys.dtype for part in cache} == {dtype}
        for _ in every_gear(gearbox, gears=("low", "mid", "high")):
            assert model(PROMPT).dtype == dtype
