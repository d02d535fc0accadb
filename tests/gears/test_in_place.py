"""Quantized checkpoints: their own codes are the top gear, and the upper bits of the codes are lower gears."""

import itertools
import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from conftest import PROMPT, active_memory, every_gear, save_model, tiny_model
from mlx_lm.quant import awq, dwq, dynamic_quant, gptq
from mlx_lm.utils import quantize_model
from mutations import edit
from refusals import assert_refused, refuses

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, Lossless, Static
from gearbx_mlx.formats.base import dense_weight
from gearbx_mlx.formats.tied import linear_of
from gearbx_mlx.gears.activations import compute_in
from gearbx_mlx.gears.in_place import codes_in
from gearbx_mlx.gears.tensor_files import TensorEntry
from gearbx_mlx.kernels.bit_planes import Planes, split_affine
from gearbx_mlx.loading import DEMO_MODEL

TYPES = (mx.float16, mx.bfloat16, mx.float32)


def quantized(bits=8, group_size=64, dtype=mx.bfloat16, architecture="llama", predicate=None, **change):
    model = tiny_model(architecture, dtype=dtype, **change)
    return quantize_model(model, {}, group_size, bits, quant_predicate=predicate)[0]


def codes_of(model):
    return {
        path: [module[name] for name in ("weight", "scales", "biases")]
        for path, module in model.named_modules()
        if "scales" in module
    }


@pytest.mark.parametrize("widths", [(4, 4), (5, 3), (3, 5), (4, 2, 2), (4, 2), (3, 3), (4, 1), (2, 3)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_planes_represent_same_numbers(widths, dtype):
    bits = sum(widths)
    codes, scales, biases = mx.quantize(mx.random.normal((48, 256), key=mx.random.key(1)).astype(dtype), 64, bits)
    planes = split_affine(Planes([codes], scales, [biases], (bits,), 64), widths)
    (joined,), own_scales, (own_biases,), *_ = planes.joined()
    assert mx.array_equal(joined, codes)
    assert mx.array_equal(own_scales, scales)
    assert mx.array_equal(own_biases, biases)
    wide = scales.astype(mx.float32), biases.astype(mx.float32)
    assert mx.array_equal(planes.dequantize(), mx.dequantize(codes, *wide, 64, bits))


@pytest.mark.parametrize("own", [True, {"group_size": None, "bits": None}, {"group_size": 64}], ids=str)
def test_layer_with_usual_codes_is_described(own):
    config = {"quantization": {"group_size": 64, "bits": 8, "model.up": own}}
    weight, scales = TensorEntry("U32", (4, 32), (0, 512)), TensorEntry("F16", (4, 2), (512, 528))
    assert codes_in(config, {"model.up.weight": weight, "model.up.scales": scales}).widths == (8,)


def test_unhashable_method_of_codes_is_none():
    assert codes_in({"quantization_config": {"quant_method": ["awq"]}}, {}) is None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_prefix_is_midpoint_of_its_range(dtype):
    codes, scales, biases = mx.quantize(mx.random.normal((48, 256), key=mx.random.key(1)).astype(dtype), 64, 8)
    planes = split_affine(Planes([codes], scales, [biases], (8,), 64), (4, 4))
    error = (planes.prefix(4).dequantize() - planes.dequantize()).reshape(48, 4, 64)
    steps = mx.abs(error / scales.astype(mx.float32)[..., None])
    assert 7 < steps.max().item() < 9  # 7.5, and the rounding of the bias
    assert abs(error.mean().item()) < 0.1 * mx.abs(scales.astype(mx.float32)).mean().item()


@pytest.mark.some(6)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral", "phi3"])
@pytest.mark.parametrize(("bits", "ladder"), [(8, "4,8"), (6, "4,6"), (5, "4,5"), (8, "3,5,8")])
def test_the_top_gear_is_mlx_lms_model(architecture, bits, ladder):
    """With MLX's kernels our weights give the same logits, bit for bit, after any number of shifts."""
    dtype = mx.float32 if architecture == "mixtral" else mx.bfloat16  # experts on a CPU
    model = quantized(bits, 32, dtype, architecture)
    stock, before = model(PROMPT), codes_of(model)
    mx.eval(stock, before)
    gearbox = Gearbox(model, ladder, kernels="mlx")
    assert str(gearbox.ladder) == ladder
    low = gearbox.ladder[0]
    assert mx.array_equal(model(PROMPT), stock)
    gearbox.shift(low)
    assert not mx.array_equal(model(PROMPT), stock)
    gearbox.shift(gearbox.ladder.top)
    assert mx.array_equal(model(PROMPT), stock)
    assert_codes_stand_for_the_weights(gearbox, before, 32, bits)
    assert gearbox.weight_bytes_per_token(low) < gearbox.weight_bytes_per_token(gearbox.ladder.top)


LADDERS = ["2,8", "3,8", "5,8", "6,8", "3,5,8", "4,5,6,8", "2,6", "3,6", "4,6", "5,6", "2,5", "4,5"]


@pytest.mark.some(13)
@pytest.mark.parametrize(
    ("ladder", "group_size", "dtype"),
    [*itertools.product(["4,8"], [32, 64, 128], TYPES), *itertools.product(LADDERS, [64], [mx.bfloat16])],
    ids=str,
)
def test_native_kernels_compute_the_same_weights(ladder, group_size, dtype, native):
    """The top gear has the weights of the checkpoint bit for bit, and computes what they say."""
    bits, shape = int(ladder[-1]), {"hidden_size": 256, "intermediate_size": 512}
    model = quantized(bits, group_size, dtype, **shape)
    before = codes_of(model)
    gearbox = Gearbox(model, ladder, kernels="native", activations="float")
    exact = quantized(bits, group_size, dtype, **shape)
    exact.set_dtype(mx.float32)
    expected = exact(PROMPT)
    assert mx.abs(model(PROMPT) - expected).max().item() < 1e-3 * mx.abs(expected).max().item()
    assert_codes_stand_for_the_weights(gearbox, before, group_size, bits)


def assert_codes_stand_for_the_weights(gearbox, codes, group_size, bits):
    modules = dict(gearbox.model.named_modules())
    for layer in gearbox.layers:
        words, *numbers = codes[layer.path]
        expected = mx.dequantize(words, *(each.astype(mx.float32) for each in numbers), group_size, bits)
        assert mx.array_equal(dense_weight(linear_of(modules[layer.path])), expected)


def test_no_kernel_is_refused_for_a_lower_gear(native, own_cache, monkeypatch):
    """Its product is compared with MLX's, which must not round the bias in the middle to the scales' type."""
    monkeypatch.setenv("GEARBX_TUNE", "1")
    shape = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    gearbox = Gearbox(quantized(8, 64, **shape), "4,8")
    for _ in every_gear(gearbox):
        mx.eval(gearbox.model(PROMPT[:, :1]))
    compared = json.loads((own_cache / "tuning.json").read_text())["differences"].values()
    assert {name.split(",")[0] for products in compared for name in products} == {"affine 4", "planes 4+4"}
    assert gearbox.kernel_choices.tuner.wrong == {}


@pytest.mark.some(2)
@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_lossless_output_equals_static_output(kernels, architecture, request):
    if kernels == "native":
        request.getfixturevalue("native")
    texts = {}
    _, tokenizer = gearbx_mlx.load()
    for mode in (Static(), Lossless(draft_length=3), Lossless()):
        model = quantized(8, 32, architecture=architecture, vocab_size=4096)
        box = Gearbox(model, kernels=kernels)
        responses = [*gearbx_mlx.stream_generate(model, tokenizer, [1, 2, 3], 24, gearbox=box, mode=mode)]
        texts[str(mode)] = [response.token for response in responses]
    assert len({tuple(text) for text in texts.values()}) == 1
    if kernels == "mlx":
        stock = quantized(8, 32, architecture=architecture, vocab_size=4096)
        expected = [response.token for response in mlx_lm.stream_generate(stock, tokenizer, [1, 2, 3], 24)]
        assert expected in texts.values()


def test_low_bit_layer_is_same_in_every_gear():
    def choose(path, module):
        return {"bits": 4, "group_size": 32} if "v_proj" in path else "gate_proj" not in path

    model = quantized(8, 64, predicate=choose)
    stock = model(PROMPT)
    gearbox = Gearbox(model, kernels="mlx")
    assert mx.array_equal(model(PROMPT), stock)
    bits = {layer.path.split(".")[-1]: layer.bits for layer in gearbox.layer_paths()}
    assert (bits["v_proj"], bits["q_proj"], bits["gate_proj"]) == ((4, 4), (4, 8), (16, 16))


def test_mixed_recipe_has_gears_of_widest_codes():
    def choose(path, module):
        return {"bits": 6, "group_size": 32} if "v_proj" in path else True

    model = quantized(4, 64, predicate=choose)
    stock = model(PROMPT)
    with pytest.raises(GearbxError, match=r"quantized to 4 and 6 bits.*4,6"):
        Gearbox(model, "5,8")
    gearbox = Gearbox(model, "4,6", kernels="mlx")
    assert mx.array_equal(model(PROMPT), stock)
    bits = {layer.path.split(".")[-1]: layer.bits for layer in gearbox.layer_paths()}
    assert (bits["v_proj"], bits["q_proj"]) == ((4, 6), (4, 4))
    gearbox.shift("low")
    assert not mx.array_equal(model(PROMPT), stock)


def test_unread_codes_take_no_double_memory(tmp_path, native):
    folder = tmp_path / "model"
    save_model(quantized(8, 64, hidden_size=512, intermediate_size=1024, num_hidden_layers=6), folder)
    edit(folder / "config.json", quantization={"group_size": 64, "bits": 8})
    size = (folder / "model.safetensors").stat().st_size
    model, _ = gearbx_mlx.load(folder, lazy=True)
    before = active_memory()
    mx.reset_peak_memory()
    lazily = Gearbox(model, "4,8", kernels="native").fingerprint
    assert mx.get_peak_memory() - before < 1.06 * size
    assert Gearbox(gearbx_mlx.load(folder)[0], "4,8").fingerprint == lazily


@pytest.mark.parametrize(("bits", "ladder"), [(6, "5,8"), (8, "4,16"), (8, "4,6"), (4, "4,8")])
def test_ladder_missing_from_codes(bits, ladder):
    with pytest.raises(GearbxError, match=f"gears {ladder}: the model is quantized to {bits} bits") as caught:
        Gearbox(quantized(bits), ladder)
    assert f"only {bits}" in str(caught.value)


@pytest.mark.parametrize("change", [{"residency": "disk"}, {"tables": {"low": {"lm_head": 5}}}])
def test_options_needing_original_are_refused(change):
    with pytest.raises(GearbxError, match="quantized already"):
        Gearbox(quantized(8), **change)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_codes_stay_mlx_lms(mode):
    model = tiny_model(dtype=mx.bfloat16)
    sizes = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
    model = quantize_model(model, {}, *sizes[mode], mode=mode)[0]
    stock = model(PROMPT)
    gearbox = Gearbox(model, kernels="mlx")
    assert str(gearbox.ladder) == str(sizes[mode][1])
    assert mx.array_equal(model(PROMPT), stock)


def test_command_uses_gears_in_place(command, tmp_path):
    save_model(tiny_model(vocab_size=4096, dtype=mx.bfloat16), tmp_path / "original")
    for bits in (8, 4):
        mlx_lm.convert(str(tmp_path / "original"), str(tmp_path / str(bits)), quantize=True, q_bits=bits)
    flags = "-p", "Once", "--ignore-chat-template", "-m", 8, "--summary", tmp_path / "s.json"
    done = command("generate", "--model", tmp_path / "8", *flags, "--mode", "lossless")
    assert "gears 4,8 in place" in done.err
    assert [gear["bits"] for gear in json.loads((tmp_path / "s.json").read_text())["ladder"]] == [4, 8]
    done = command("generate", "--model", tmp_path / "4", *flags)
    assert "--base" in done.err
    for bits, instead in (
        (8, "8-bit weights: gears 4,8 in place\n"),
        (4, "4-bit weights: drafts by prompt lookup; for gears, "),
    ):
        done = command("generate", "--model", tmp_path / str(bits), *flags, "--mode", "telemetry-only")
        assert done.err.count(f"no gear changes in mode telemetry-only; other modes use its {instead}") == 1
    assert_refused(command("generate", "--model", tmp_path / "8", *flags, "--gears", "4,16"), "4,8")
    assert_refused(command("generate", "--model", tmp_path / "8", *flags, "--format", "exact"), "--format")


@pytest.fixture(scope="module")
def eight_bits(tmp_path_factory):
    """The demo model in 8 bits of mlx-lm, and a text."""
    folder = tmp_path_factory.mktemp("owned")
    packing = {"quantize": True, "q_bits": 8, "q_group_size": 32}
    mlx_lm.convert(str(DEMO_MODEL), str(folder / "model"), **packing)
    (folder / "text.txt").write_text("Once upon a time a little fox lived in a wood.\n" * 12)
    return folder


QUIET = "--ignore-chat-template", "-m", 6


def test_thresholds_and_gears_follow_codes(command, eight_bits):
    """This works although the number of gears is unknown until the weights are read."""
    model = "--model", eight_bits / "model", "-p", "Once", *QUIET
    assert command("generate", *model, "--mode", "route", "--thresholds", "2").status == 0
    assert command("generate", *model, "--mode", "telemetry-only", "--thresholds", "2").status == 0
    for flags, words in (
        (("--mode", "route", "--thresholds", "2,3"), "2 gears need 1 thresholds"),
        (("--mode", "static", "--gear", "16"), "choose from 4 (low), 8 (high)"),
        (("--mode", "telemetry-only", "--gears", "4,8,16", "--thresholds", "2"), "3 gears need 2 thresholds"),
    ):
        assert_refused(command("generate", *model, *flags), words)


def test_a_converted_model_keeps_its_biases(native):
    """The biases of layers, in a model that computes in another type before it has gears."""
    model, as_loaded = (quantized(dtype=mx.float16, architecture="qwen2") for _ in range(2))
    compute_in(model, "float32", quantized=True)
    for each in (model, as_loaded):
        Gearbox(each, "4,8", dtype="float32", kernels="native")
    assert mx.array_equal(model(PROMPT), as_loaded(PROMPT))


def test_without_lower_gear_lookup_drafts():
    """The text of a tiny model soon repeats itself; the single gear verifies what the text proposes."""
    _, tokenizer = gearbx_mlx.load()
    told = {}
    for mode in (Static(), Lossless()):
        model = quantized(4, 32, vocab_size=4096)
        made = [*gearbx_mlx.stream_generate(model, tokenizer, [1, 2, 3], 60, gearbox=Gearbox(model), mode=mode)]
        told[mode.name] = [response.token for response in made], sum(response.lookup_drafted or 0 for response in made)
    assert told["lossless"][0] == told["static"][0]
    assert told["lossless"][1] > 0
    assert not any(response.drafted for response in made)


DATA = mx.random.randint(0, 128, (4, 24), key=mx.random.key(1))


def original_model():
    return tiny_model(vocab_size=4096)  # that of the tokenizer


def by_gptq(model):
    model, quantization = gptq.gptq_quantize(model, DATA, 4, 64, 6, 64)
    return model, {"quantization": quantization}


def by_awq(model):
    awq.awq_quantize(model, DATA, awq.llama_awq, n_grid=2)
    return model, awq.update_config(model, {})


def by_dynamic_quant(model):
    sensitivities = dict(dynamic_quant.estimate_sensitivities(model, DATA, 4, 64, 6, 64))
    threshold = sorted(sensitivities.values())[len(sensitivities) // 2]

    def choose(path, module):
        return {"bits": 6, "group_size": 64} if sensitivities.get(path, 0) > threshold else True

    return quantize_model(model, {}, 64, 4, quant_predicate=choose)


def by_dwq(model):
    original = original_model()
    model, config = quantize_model(model, {}, 64, 4)
    texts = [(row, 0) for row in DATA.tolist()]
    train = {"batch_size": 2, "max_seq_length": 32, "seed": 0, "dtype": mx.float32}
    dwq.dwq_quantize(model, lambda batch, *_, **__: original(batch), optim.Adam(1e-4), texts, texts, **train)
    return model, config


MAKERS = {"gptq": by_gptq, "awq": by_awq, "dynamic": by_dynamic_quant, "dwq": by_dwq}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directories of the original and of each quantizer's checkpoint."""
    folder = tmp_path_factory.mktemp("quantized")
    save_model(original_model(), folder / "original")
    for name, maker in MAKERS.items():
        model, config = maker(original_model())
        model.args = original_model().args
        save_model(model, folder / name)
        edit(folder / name / "config.json", **config)
    return folder


def run(model):
    return model(DATA[:1, :6])


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MAKERS)
def test_it_is_the_low_gear(made, name):
    quantized, _ = gearbx_mlx.load(made / name)
    original, tokenizer = gearbx_mlx.load(made / "original")
    alone, above = run(quantized), run(original)
    gearbox = gearbx_mlx.Gearbox(original, "4,8,16", low_model=gearbx_mlx.load(made / name)[0], kernels="mlx")
    for gear in every_gear(gearbox, gears=("low", "high", "low", "mid", "high")):
        assert mx.array_equal(run(original), alone).item() == (gear == "low")
        assert mx.array_equal(run(original), above).item() == (gear == "high")
    stored = sum(array.nbytes for layer in gearbox.layers for array in layer_of(quantized, layer.path).values())
    weights = sum(layer.module.weight.size for layer in gearbox.layers)
    assert gearbox.bits_per_weight(gearbox.ladder[0]) == pytest.approx(8 * stored / weights)
    text = original, tokenizer, [1, 2, 3], 12
    responses = list(gearbx_mlx.stream_generate(*text, gearbox=gearbox, mode=gearbx_mlx.Lossless(draft_length=3)))
    assert any(response.drafted for response in responses)
    gearbox.shift("high")
    assert [r.token for r in responses] == [r.token for r in mlx_lm.stream_generate(*text)]


@pytest.mark.parametrize("kernels", ["mlx", "native"])
def test_low_gear_with_dense_layers_and_tied_table(kernels, native):
    original, partly = (tiny_model(tie_word_embeddings=True) for _ in range(2))
    nn.quantize(partly, bits=4, class_predicate=lambda path, _: path.endswith(("q_proj", "o_proj", "tokens")))
    alone = run(partly)
    gearbox = gearbx_mlx.Gearbox(original, "4,16", low_model=partly, kernels=kernels, activations="float")
    gearbox.shift("low")
    assert mx.abs(run(original) - alone).max().item() < 1e-4 * mx.abs(alone).max().item()


def layer_of(model, path):
    return dict(model.named_modules())[path]


@pytest.mark.parametrize("name", MAKERS)
def test_the_low_gear_runs_natively(made, name, native):
    original, _ = gearbx_mlx.load(made / "original")
    quantized = gearbx_mlx.load(made / name)[0]
    alone = run(quantized)
    gearbox = gearbx_mlx.Gearbox(original, "4,16", low_model=quantized, kernels="native", activations="float")
    gearbox.shift("low")
    assert mx.abs(run(original) - alone).max().item() < 1e-4 * mx.abs(alone).max().item()
    assert {type(layer_of(original, layer.path)).__name__ for layer in gearbox.layers} >= {"NativeQuantizedLinear"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [5, 6, 8])
def test_low_gear_of_more_bits_runs_natively(bits, tied, native):
    original, alone, below = (tiny_model(hidden_size=256, tie_word_embeddings=tied) for _ in range(3))
    for model in (alone, below):
        nn.quantize(model, bits=bits)
    Gearbox(alone, str(bits), kernels="native")
    Gearbox(original, f"{bits},16", low_model=below, kernels="native").shift("low")
    assert mx.array_equal(run(original), run(alone))


@pytest.mark.parametrize(
    ("gears", "low_model", "words"),
    [
        ("4,16", lambda: quantized(4, vocab_size=2048), "does not fit: (2048, 64) instead of (4096, 64) at lm_head"),
        ("4,16", original_model, "not quantized"),
        ("4", lambda: quantized(4, vocab_size=4096), "gears 4 have none above"),
    ],
)
def test_model_other_than_low_gear_is_refused(gears, low_model, words):
    with refuses(words):
        gearbx_mlx.Gearbox(original_model(), gears, low_model=low_model())
