"""Adapters (LoRA, DoRA) on top of gears: in every format, from every source of gears, in every mode."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from adapters import save_adapter
from conftest import PROMPT, every_gear, normal, save_model, tiny_model, weights_of
from mlx_lm.utils import load_tokenizer
from mutations import edit
from refusals import assert_refused

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Route, Static, convert, stream_generate
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.formats.tied import linear_of
from gearbx_mlx.gears.adapters import layers_of
from gearbx_mlx.gears.gearbox import model_fingerprint

LADDERS = dict.fromkeys(("planes", "affine", "rowwise"), "4,8,16")
LADDERS |= {"groupwise": "4,16", "codebook": "3,16", "codebook-library": "3,16"}
MODELS = {
    "llama": {},
    "qwen2": {},  # with biases, which DoRA adds after its norms
    "tied": {"tie_word_embeddings": True},
    "qwen3_moe": {},
}
KEYS = {"tied": ["self_attn.q_proj", "mlp.down_proj", "model.embed_tokens"]}


def adapted_model(architecture: str = "llama", seed: int = 0) -> nn.Module:
    model = tiny_model("llama" if architecture == "tied" else architecture, seed, **MODELS[architecture])
    for i, (_, module) in enumerate(sorted(model.named_modules())):
        if isinstance(module, nn.Linear) and "bias" in module:
            module.bias = normal(*module.bias.shape, seed=i)
    return model


@pytest.fixture
def adapted(tmp_path):
    """A model's directory and an adapter's: (kind, architecture)."""

    def make(kind: str, architecture: str = "llama") -> tuple[Path, Path]:
        source = tmp_path / f"{architecture}"
        save_model(adapted_model(architecture), source)
        return source, save_adapter(adapted_model(architecture), tmp_path / kind, kind, KEYS.get(architecture))

    return make


def loaded(source: Path, adapter: Path | None = None) -> nn.Module:
    return gearbx_mlx.load(source, adapter_path=None if adapter is None else str(adapter))[0]


def mlx_lms(source: Path, adapter: Path) -> nn.Module:
    return mlx_lm.load(str(source), adapter_path=str(adapter))[0]


def over_weights_of(gearbox: Gearbox, reference: nn.Module) -> mx.array:
    """The logits of mlx-lm's own adapters over the weights of the engaged gear."""
    engaged, theirs = layers_of(gearbox.model), layers_of(reference)
    for layer in gearbox.layers:
        theirs[layer.path].weight = dense_weight(linear_of(engaged[layer.path]))
    return reference(PROMPT)


def far(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "tied"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_top_gear_with_mlx_kernels_equals_mlx_lm(adapted, kind, architecture):
    source, adapter = adapted(kind, architecture)
    expected, without = mlx_lms(source, adapter)(PROMPT), loaded(source)(PROMPT)
    model = loaded(source, adapter)
    gearbox = Gearbox(model, "4,16", kernels="mlx")
    gearbox.shift("low")
    gearbox.shift("high")
    assert far(expected, without) > 0.1
    assert far(model(PROMPT), expected) <= (2e-6 if architecture == "qwen2" else 0)  # a bias is added in another place


@pytest.mark.some(2)
@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("format", LADDERS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_every_gear_applies_adapter_like_mlx_lm(adapted, kind, format, kernels):
    source, adapter = adapted(kind)
    reference, model = mlx_lms(source, adapter), loaded(source, adapter)
    gearbox = Gearbox(model, LADDERS[format], format=format, kernels=kernels, activations="float")
    for _ in every_gear(gearbox):
        assert far(model(PROMPT), over_weights_of(gearbox, reference)) < 5e-6


def test_adapter_of_embedding_is_over_exact_gears(tmp_path):
    save_model(tiny_model(dtype=mx.bfloat16), tmp_path / "model")
    keys = ["self_attn.q_proj", "model.embed_tokens"]
    adapter = save_adapter(tiny_model(dtype=mx.bfloat16), tmp_path / "adapter", "lora", keys)
    found = []
    for format in ("exact", "planes"):
        model = loaded(tmp_path / "model", adapter)
        Gearbox(model, "4,16", format=format, kernels="mlx").shift("high")
        found.append(model(PROMPT))
    assert far(*found) < 5e-6


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_is_on_top_of_other_low_gear(adapted, kind):
    source, adapter = adapted(kind)
    low_model, model = loaded(source), loaded(source, adapter)
    low_model.model.norm.weight = low_model.model.norm.weight * 1.5  # as AWQ changes norms
    nn.quantize(low_model, 64, 4)
    gearbox = Gearbox(model, "4,16", low_model=low_model, kernels="mlx")
    gearbox.shift("low")
    reference = mlx_lms(source, adapter)
    reference.model.norm, reference.model.embed_tokens = low_model.model.norm, low_model.model.embed_tokens
    assert far(model(PROMPT), over_weights_of(gearbox, reference)) < 5e-6


@pytest.mark.some(1)
@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    ("architecture", "format", "gears"),
    [
        *(("llama", format, gears) for format, gears in LADDERS.items()),
        ("llama", "rowwise", "4,8"),  # whose base only gearbx-mlx can run
        ("qwen2", "planes", "4,8"),
        ("qwen2", "rowwise", "4,8"),
        ("tied", "planes", "3,16"),
        ("tied", "rowwise", "4,8"),
    ],
)
def test_geared_checkpoint_accepts_adapter_like_original(adapted, tmp_path, kind, architecture, format, gears, kernels):
    source, adapter = adapted(kind, architecture)
    convert(model=str(source), mlx_path=str(tmp_path / "geared"), gears=gears, format=format, embeddings="keep")
    original, model = loaded(source, adapter), loaded(tmp_path / "geared", adapter)
    assert model_fingerprint(model) == model_fingerprint(original) != model_fingerprint(loaded(source))
    expected, gearbox = Gearbox(original, gears, format=format, kernels=kernels), Gearbox(model, kernels=kernels)
    for gear in every_gear(gearbox, expected):
        assert mx.array_equal(model(PROMPT), original(PROMPT))
        assert gearbox.weight_bytes_per_token(gear) == expected.weight_bytes_per_token(gear)


def test_experts_accept_lora_and_refuse_dora(adapted, tmp_path):
    source, adapter = adapted("lora", "qwen3_moe")
    convert(model=str(source), mlx_path=str(tmp_path / "geared"), gears="4,16", embeddings="keep")
    original, model = loaded(source, adapter), loaded(tmp_path / "geared", adapter)
    floors = {layer.path: layer.lowest_bits for layer in Gearbox(original, "4,16").layers}
    gearbox = Gearbox(model)
    assert floors == {layer.path: layer.lowest_bits for layer in gearbox.layers}
    assert floors["model.layers.0.mlp.gate"] == 8  # mlx-lm's class asks for it by its path
    assert mx.array_equal(model(PROMPT), (original.attached_gearbox.shift("low"), original(PROMPT))[1])
    edit(adapter / "adapter_config.json", fine_tune_type="dora")
    with pytest.raises(GearbxError, match=r"cannot be put on this model: .*SwitchLinear doesn't support DoRA"):
        loaded(source, adapter)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("kernels", ["mlx", "native"])
def test_every_mode_runs_and_lossless_equals_top_gear(adapted, kind, kernels):
    source, adapter = adapted(kind)
    model, tokenizer = loaded(source, adapter), load_tokenizer(source)
    gearbox = Gearbox(model, "4,8,16", kernels=kernels)
    texts = {}
    for mode in (Static("high"), Lossless(), Static("low"), Route(thresholds=(1.0, 9.0)), Kickdown()):
        responses = list(stream_generate(model, tokenizer, PROMPT[0].tolist(), 24, mode=mode, gearbox=gearbox))
        texts.setdefault(mode.name, [response.token for response in responses])
    assert texts["lossless"] == texts["static"]
    assert all(len(tokens) == 24 for tokens in texts.values())


def test_norms_follow_second_adapter(adapted, tmp_path):
    source, adapter = adapted("dora")
    other = save_adapter(adapted_model(seed=1), tmp_path / "other", "dora")
    model = loaded(source, adapter)
    gearbox = Gearbox(model, "4,16")
    for _ in every_gear(gearbox, gears=("low", "high")):
        model(PROMPT)
    model.load_weights(str(other / "adapters.safetensors"), strict=False)
    expected = loaded(source, other)
    for gear in ("high", "low"):
        gearbox.shift(gear)
        Gearbox(expected, "4,16") if gear == "high" else expected.attached_gearbox.shift(gear)
        assert mx.array_equal(model(PROMPT), expected(PROMPT))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_keeps_dtype_for_byte_counts(tmp_path, kind, dtype):
    source, model = tmp_path / "source", adapted_model()
    model.set_dtype(mx.bfloat16)
    save_model(model, source)
    adapter = save_adapter(model, tmp_path / "adapter", kind, dtype=dtype)
    arrays = mx.load(str(adapter / "adapters.safetensors"))
    without, gearbox = Gearbox(loaded(source), "4,16"), Gearbox(loaded(source, adapter), "4,16")
    own = weights_of(gearbox.model)
    assert all(own[name].dtype == dtype and mx.array_equal(own[name], array) for name, array in arrays.items())
    for gear in gearbox.ladder:
        more = gearbox.weight_bytes_per_token(gear) - without.weight_bytes_per_token(gear)
        assert more == sum(array.nbytes for array in arrays.values())


def test_embedding_and_experts_count_only_read_rows(tmp_path):
    for architecture, keys in (("llama", ["model.embed_tokens"]), ("qwen3_moe", ["mlp.switch_mlp.up_proj"])):
        source = tmp_path / architecture
        save_model(adapted_model(architecture), source)
        adapter = save_adapter(adapted_model(architecture), tmp_path / f"{architecture}-lora", "lora", keys)
        arrays = mx.load(str(adapter / "adapters.safetensors"))
        without, gearbox = Gearbox(loaded(source), "4,16"), Gearbox(loaded(source, adapter), "4,16")
        more = gearbox.weight_bytes_per_token(gearbox.gear) - without.weight_bytes_per_token(gearbox.gear)
        if architecture == "llama":
            assert more == sum(a.nbytes // (128 if n.endswith("lora_a") else 1) for n, a in arrays.items())
        else:  # two of four
            assert more == sum(array.nbytes for array in arrays.values()) // 2


def test_it_cannot_be_fused_into_gears(adapted):
    model = loaded(*adapted("dora"))
    Gearbox(model, "4,16").shift("low")
    with pytest.raises(GearbxError, match=r"use mlx_lm.fuse on the original"):
        model.model.layers[0].self_attn.q_proj.fuse()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with an original and a geared checkpoint that only gearbx-mlx can run."""
    root = tmp_path_factory.mktemp("models")
    save_model(adapted_model(), root / "original")
    convert(model=str(root / "original"), mlx_path=str(root / "geared"), gears="4,8", format="rowwise")
    return root


class TestRefused:
    """The error is one line with the adapter and the remedy, on an original and on a geared checkpoint."""

    @pytest.fixture(params=["original", "geared"])
    def source(self, models, request):
        return models / request.param

    @pytest.fixture
    def adapter(self, tmp_path):
        return save_adapter(adapted_model(), tmp_path / "adapter", "dora")

    def refused(self, command, source, adapter, *words):
        done = command("generate", "--model", source, "--adapter-path", adapter, "-m", 2)
        assert done.out == ""
        assert_refused(done, adapter, *words)

    @pytest.mark.some(10)
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"fine_tune_type": "qlora"}, 'fine_tune_type is "qlora"'),
            ({"fine_tune_type": "lora"}, "model.layers.0.mlp.down_proj.m, but this model with this"),
            ({"lora_parameters": None}, "lora_parameters is missing"),
            ({"lora_parameters": {"rank": 0, "scale": 1.0}}, "lora_parameters.rank is 0"),
            ({"lora_parameters": {"rank": 4, "alpha": 1.0}}, "lora_parameters has no field 'scale'"),
            (
                {"lora_parameters": {"rank": 5, "scale": 1.0}},
                "wrong shape for this model, got [128, 4] instead of [128, 5]",
            ),
            ({"lora_parameters": {"rank": 4, "scale": 1.0, "keys": ["nothing"]}}, "but this model with this"),
            ({"num_layers": 1}, "model.layers.0."),
            ({"num_layers": "two"}, 'num_layers is "two"'),
        ],
    )
    def test_bad_settings_are_refused(self, command, source, adapter, change, words):
        edit(adapter / "adapter_config.json", **change)
        self.refused(command, source, adapter, words, "trained on this model" if "model" in words else "mlx_lm.lora")

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
    def test_missing_file_is_named(self, command, source, adapter, name):
        (adapter / name).unlink()
        self.refused(command, source, adapter, f"no {name} there", "use a directory that mlx_lm.lora wrote")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda arrays: arrays.popitem(), "required by its settings"),
            (lambda arrays: arrays.clear(), "required by its settings"),
            (lambda arrays: arrays.update({"x.lora_a": mx.zeros(2)}), "has x.lora_a, but this model"),
            (lambda arrays: arrays.update({n: a[1:] for n, a in arrays.items()}), "wrong shape"),
            (lambda arrays: arrays.update({n: a.astype(mx.int32) for n, a in arrays.items()}), "type int32"),
        ],
        ids=["one missing", "all missing", "one more", "shapes", "integers"],
    )
    def test_bad_arrays_are_refused(self, command, source, adapter, change, words):
        file = str(adapter / "adapters.safetensors")
        arrays = dict(mx.load(file))
        mx.eval(arrays)
        change(arrays)
        mx.save_safetensors(file, arrays)
        self.refused(command, source, adapter, words)

    def test_a_full_fine_tune_on_gears(self, command, models, tmp_path):
        model = adapted_model()
        expected = model(PROMPT)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
        arrays = {name: array * 2 for name, array in weights_of(model).items() if "layers.1" in name}
        mx.save_safetensors(str(tmp_path / "full" / "adapters.safetensors"), arrays)
        words = "is a full fine-tune of layers that the gears replace", "fuse it into the original"
        self.refused(command, models / "geared", tmp_path / "full", *words)
        assert far(loaded(models / "original", tmp_path / "full")(PROMPT), expected) > 0.1
