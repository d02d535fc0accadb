"""How commands run on a GPU: the weights as mlx-lm has them, a draft of 4 bits beside them, and nothing unproven."""

import mlx.core as mx
import mlx_lm
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import load, stream_generate
from gearbx_mlx.cli import describe
from gearbx_mlx.cli.build import Loaded, decided
from gearbx_mlx.cli.decide import JustGears
from gearbx_mlx.cli.flags import LayoutSettings, ModeFlags, ModelSettings
from gearbx_mlx.decoding.lossless import Lossless
from gearbx_mlx.decoding.policy import MAX_ON_GPU
from gearbx_mlx.gears import kernel_choices
from gearbx_mlx.gears.gearbox import attached
from gearbx_mlx.kernels import dispatch, metal, proven
from gearbx_mlx.kernels.dispatch import GPU

GENERATE = ("-m", 24, "--ignore-chat-template", "--prompt", "one two three")
TYPES = ("bfloat16", "float16", "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory, demo):
    folder = tmp_path_factory.mktemp("models")
    for name in TYPES:
        made = tiny_model("qwen2", vocab_size=demo.tokenizer.vocab_size, dtype=getattr(mx, name))
        save_model(made, folder / name)
    mlx_lm.convert(str(folder / "bfloat16"), str(folder / "8bit"), quantize=True, q_bits=8)
    return folder


@pytest.fixture
def texts(monkeypatch, own_cache):
    """Metal seems to be here, and its compiler takes no text; gives the texts that it was asked to take."""
    asked = []

    def refused(name: str, **text: object):
        asked.append(name)
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", refused)
    monkeypatch.setattr(metal, "ACCEPTED", {})
    metal.build.cache_clear()
    yield asked
    metal.build.cache_clear()


def loaded(model, mode: str | None = None, **flags: object) -> Loaded:
    settings = JustGears(ModelSettings(str(model), **flags), LayoutSettings(), mode=ModeFlags(mode=mode))
    return Loaded.of(decided(settings))


@pytest.mark.parametrize("others", [False, True], ids=["nothing proven", "kernels of another model proven"])
@pytest.mark.parametrize("name", TYPES)
def test_top_gear_is_mlx_lm_bit_for_bit(models, texts, name, others):
    """Computed in the type of the checkpoint, as a GPU does and a CPU here would not."""
    if others:
        key = proven.product_key("weights of 16 bits", (8, 8), mx.bfloat16, 1, "native")
        proven.keep(key, proven.Proof(1.0, 2.0))
    gearbox = loaded(models / name, dtype=name).gearbox()
    assert (str(gearbox.ladder), gearbox.format.name, gearbox.kernels.native) == ("4,16", "affine", others)
    plain, _ = mlx_lm.load(str(models / name))
    for tokens in ([7], [1, 5, 9, 2, 7], list(range(1, 40))):
        wanted = plain(mx.array([tokens]))
        for gear in ("low", "high"):
            gearbox.shift(gear)
            found = gearbox.model(mx.array([tokens]))
        assert found.dtype == wanted.dtype == getattr(mx, name)
        assert mx.array_equal(found, wanted).item()
    assert texts == []


def test_low_gear_is_mlx_lms_4_bit_model(models, texts):
    gearbox = loaded(models / "bfloat16", dtype="bfloat16").gearbox()
    gearbox.shift("low")
    plain, _ = mlx_lm.load(str(models / "bfloat16"))
    layer, original = gearbox.model.layers[0].mlp.up_proj, plain.layers[0].mlp.up_proj
    assert type(layer).__name__ == "QuantizedLinear"
    assert all(map(mx.array_equal, mx.quantize(original.weight, 64, 4), (layer.weight, layer.scales, layer.biases)))


def test_only_prefill_runs_before_first_token(models, texts, monkeypatch):
    monkeypatch.setenv("GEARBX_TUNE", "1")
    started = loaded(models / "bfloat16")
    gearbox, passes = started.gearbox(), []
    kind = type(gearbox.model)
    call = kind.__call__

    def counted(self, inputs, cache=None, **kwargs):
        if cache is not None and inputs.tolist() != [[0]]:  # these show shapes, and nothing is computed
            passes.append(inputs.shape[1])
        return call(self, inputs, cache=cache, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    prompt = list(range(3, 20))
    next(stream_generate(gearbox.model, started.tokenizer, prompt, 8, mode=Lossless(), gearbox=gearbox))
    assert passes[:2] == [len(prompt) - 1, 1]
    assert 1 <= len(passes[2:]) <= MAX_ON_GPU  # the next draft, which is queued before the token is handed out
    assert {*passes[2:]} == {1}
    assert gearbox.kernel_choices.tuner.seconds == 0


def test_a_program_has_the_same_gears(models, texts):
    for name, gears in (("float16", "4,16"), ("8bit", "8")):
        model, tokenizer = load(models / name)
        next(stream_generate(model, tokenizer, [3, 5, 7], 2))
        assert str(attached(model).ladder) == gears
        assert type(model.lm_head).__name__ in ("Linear", "QuantizedLinear")


def test_drafts_have_four_tokens_at_most(models, texts, monkeypatch):
    monkeypatch.setenv("GEARBX_TUNE", "1")
    started = loaded(models / "bfloat16")
    how = {"mode": Lossless(lookup_tokens=0), "gearbox": started.gearbox()}
    run = stream_generate(how["gearbox"].model, started.tokenizer, list(range(3, 20)), 60, **how)
    assert 1 <= max(r.drafted for r in run) <= MAX_ON_GPU


@pytest.mark.parametrize("kernels", ["auto", "native", "measure"])
@pytest.mark.parametrize(
    "flags", [("--mode", "lossless"), ("--format", "exact"), ("--mode", "route"), ("--format", "rowwise")], ids=str
)
def test_refused_kernel_source_ends_no_command(command, models, texts, monkeypatch, flags, kernels):
    monkeypatch.setenv("GEARBX_TUNE", "1")
    common = "generate", "--model", models / "bfloat16", *GENERATE, *flags, "--kernels"
    done = command(*common, kernels)
    assert done.status == 0, done.err
    if kernels == "auto":
        assert texts == []
        assert "metal/" not in done.err
        assert ("benchmark mac --own-kernels tries them" in done.err) == ("exact" in flags)
    said = [line for line in done.err.splitlines() if "does not run here" in line]
    assert len({line.partition(".metal")[0] for line in said}) == len(said)  # one for a text
    if kernels == "auto":  # others round elsewhere, whatever computes
        monkeypatch.setattr(metal, "available", lambda: False)
        gears = () if flags else ("--gears", "4,16")  # which MLX's kernels on a CPU have if they are asked for
        assert done.out == command(*common, "mlx", *gears).out


@pytest.mark.parametrize("format", ["exact", "affine"])
def test_later_refused_proof_prints_single_line(command, models, texts, monkeypatch, format):
    monkeypatch.setattr(proven, "proof", lambda key: proven.Proof(1e-9, 1.0))
    monkeypatch.setattr(proven, "any_won", lambda: True)
    common = "generate", "--model", models / "bfloat16", *GENERATE, "--gears", "4,16", "--format", format
    done = command(*common)
    assert done.status == 0, done.err
    assert texts != []
    said = [line for line in done.err.splitlines() if "does not run here" in line]
    assert len(said) == len({spec.layout.text for spec in metal.ACCEPTED}) > 0
    monkeypatch.setattr(metal, "available", lambda: False)
    assert done.out == command(*common, "--kernels", "mlx").out


def test_other_gpu_has_same_gears_and_format(models, monkeypatch):
    for module in (dispatch, describe, kernel_choices):
        monkeypatch.setattr(module, "device", lambda: GPU)
    gearbox = loaded(models / "float16").gearbox()
    assert (str(gearbox.ladder), gearbox.format.name, gearbox.kernels.native) == ("4,16", "affine", False)


def test_a_quantized_checkpoint_keeps_its_codes_whole(models, texts):
    gearbox = loaded(models / "8bit", dtype="bfloat16").in_gears().gearbox
    plain, _ = mlx_lm.load(str(models / "8bit"))
    assert str(gearbox.ladder) == "8"
    assert mx.array_equal(gearbox.model(mx.array([[3, 5]])), plain(mx.array([[3, 5]]))).item()
