"""Geared checkpoints of quantized models: the top gear has their codes, and mlx-lm runs the lowest."""

import mlx.core as mx
import mlx_lm
import pytest
from conftest import PROMPT, every_gear, save_model, tiny_model
from gguf_files import Q8_0, tiny_as, write
from mlx_lm.utils import quantize_model, save_config
from refusals import assert_refused

import gearbx_mlx
from gearbx_mlx import Gearbox

MODELS = {"llama": {}, "tied": {"tie_word_embeddings": True}, "mixtral": {}, "gpt_neox": {}, "mistral4": {}}


def save_quantized(path, architecture="llama", bits=8, group_size=32, predicate=None, **change):
    """A tiny model as mlx_lm.convert writes it."""
    name = "llama" if architecture == "tied" else architecture
    experts = architecture in ("mixtral", "qwen3_moe", "mistral4")  # MLX has no products in half precision on a CPU
    change = {"dtype": mx.float32 if experts else mx.bfloat16, **MODELS.get(architecture, {}), **change}
    model = tiny_model(name, **change)
    config = vars(model.args)
    model, config = quantize_model(model, dict(config), group_size, bits, quant_predicate=predicate)
    save_model(model, path)
    save_config(config, path / "config.json")
    return path


@pytest.fixture
def convert(succeeds, tmp_path):
    """A quantized model, converted: (source, flags) -> the checkpoint's directory."""

    def run(source, *flags):
        out = tmp_path / "geared"
        succeeds("convert", "--model", source, "--mlx-path", out, *flags)
        return out

    return run


def loaded(path, ladder=None, **keywords):
    return Gearbox(gearbx_mlx.load(path)[0], ladder, **keywords)


@pytest.mark.some(5)
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(("bits", "ladder"), [(8, "4,8"), (6, "4,6"), (8, "3,5,8")])
def test_gears_equal_in_place_gears(convert, tmp_path, architecture, bits, ladder):
    source = save_quantized(tmp_path / "quantized", architecture, bits)
    out = convert(source, "--gears", ladder)
    stock, expected = mlx_lm.load(str(source))[0], loaded(source, ladder, kernels="mlx")
    gearbox = loaded(out, kernels="mlx")
    assert str(gearbox.ladder) == ladder
    assert gearbox.gear == gearbox.ladder[0]
    assert gearbox.fingerprint == expected.fingerprint
    for _ in every_gear(gearbox, expected, gears=(*gearbox.ladder, *reversed(gearbox.ladder))):
        assert mx.array_equal(gearbox.model(PROMPT), expected.model(PROMPT))
    gearbox.shift(gearbox.ladder.top)
    assert mx.array_equal(gearbox.model(PROMPT), stock(PROMPT))
    assert gearbox.original_bytes_per_token() == gearbox.weight_bytes_per_token(gearbox.ladder.top)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_mlx_lm_runs_the_lowest_gear(convert, tmp_path, architecture):
    out = convert(save_quantized(tmp_path / "quantized", architecture))
    base, _ = mlx_lm.load(str(out))
    assert mx.array_equal(base(PROMPT), loaded(out, kernels="mlx").model(PROMPT))


def test_layers_of_other_bits_are_unchanged(convert, tmp_path):
    def choose(path, module):
        return {"bits": 4, "group_size": 64} if "v_proj" in path else "gate_proj" not in path

    source = save_quantized(tmp_path / "quantized", predicate=choose, hidden_size=128)
    out = convert(source)
    stock, gearbox = mlx_lm.load(str(source))[0], loaded(out, kernels="mlx")
    layers = {layer.path.split(".")[-1]: (layer.bits, layer.fixed) for layer in gearbox.layer_paths()}
    assert layers["q_proj"] == ((4, 8), None)
    assert layers["v_proj"][1] == "is quantized to 4 bits in groups of 64"
    assert layers["gate_proj"][1] == "not quantized"
    gearbox.shift(8)
    assert mx.array_equal(gearbox.model(PROMPT), stock(PROMPT))
    assert mlx_lm.load(str(out))[0](PROMPT).shape == stock(PROMPT).shape


def test_gguf_codes_become_gears(convert, tmp_path, own_cache):
    source = write(tmp_path / "model.gguf", tiny_as("llama"), Q8_0)
    stock, _ = gearbx_mlx.load(source)
    expected = stock(PROMPT)
    gearbox = loaded(convert(source), kernels="mlx")
    gearbox.shift(8)
    assert mx.array_equal(gearbox.model(PROMPT), expected)


@pytest.mark.parametrize(
    ("bits", "flags", "words"),
    [
        (4, (), "4-bit weights: drafts by prompt lookup"),
        (8, ("--gears", "8"), "8-bit weights: gears 4,8 in place"),
        (8, ("--gears", "4,16"), "choose from 6,8, 5,8, 4,8, 3,8, 2,8, or only 8"),
        (8, ("--format", "exact"), "omit --format"),
        (8, ("--dtype", "float16"), "omit --dtype"),
        (8, ("--calibrate",), "omit --calibrate"),
        (8, ("--embeddings", "keep"), "omit --embeddings"),
        (8, ("--q-group-size", "64"), "omit --q-group-size"),
    ],
)
def test_unsupported_models_are_refused(command, tmp_path, bits, flags, words):
    source = save_quantized(tmp_path / "quantized", bits=bits)
    assert_refused(command("convert", "--model", source, "--mlx-path", tmp_path / "out", *flags), words)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("out")]
