"""Help texts and docs/generate.md say of defaults what `decide` decides."""

import re
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from conftest import save_model, tiny_model
from gguf_files import F16, Q4_0, Q8_0, tiny_as, write

from gearbx_mlx.cli import decide as module
from gearbx_mlx.cli.decide import decide
from gearbx_mlx.cli.loaded import load_model
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.generate import GenerateSettings, setup_arg_parser
from gearbx_mlx.kernels.dispatch import CPU, GPU

PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
HELP = {action.dest: action.help or "" for action in setup_arg_parser()._actions}
ORIGINAL = "bfloat16", "float16", "gguf of 16 bits"
CODES = {"8 bits": 8, "6 bits": 6, "4 bits": 4, "gguf of 8 bits": 8, "gguf of 4 bits": 4}
MODES = "lossless", "route", "static", "kickdown"


@pytest.fixture(scope="module")
def places(tmp_path_factory, demo):
    """The directories and files of a tiny model, by name: original weights, codes of mlx-lm, and GGUF."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name in ("bfloat16", "float16"):
        found[name] = folder / name
        save_model(tiny_model(vocab_size=demo.tokenizer.vocab_size, dtype=getattr(mx, name)), found[name])
    for name in ("8 bits", "6 bits", "4 bits"):
        found[name] = folder / name
        mlx_lm.convert(str(found["float16"]), str(found[name]), quantize=True, q_bits=CODES[name])
    for name, kind in (("gguf of 16 bits", F16), ("gguf of 8 bits", Q8_0), ("gguf of 4 bits", Q4_0)):
        found[name] = folder / f"{name}.gguf"
        write(found[name], tiny_as("llama"), kind)
    return found


@pytest.fixture
def decided(places, own_cache, monkeypatch):
    """Return the decision for a model on a device, with flags as a user gives them."""

    def found(model: str, device: str = CPU, memory: float = 1e12, **flags: object):
        monkeypatch.setattr(module, "device", lambda: device)
        monkeypatch.setattr(module, "available_memory", lambda: memory)
        settings = command_settings(GenerateSettings, {"model": str(places[model]), **flags})
        return decide(settings, load_model(settings.model, lazy=True)[0])

    return found


def stated(flag: str, words: str) -> tuple[str, ...]:
    """Return what a help text says where `words` has groups."""
    said = re.search(words, HELP[flag])
    assert said, f"the help of {flag} says something else now: {HELP[flag]}"
    return said.groups()


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("model", ORIGINAL)
def test_original_weights(decided, model, device, mode):
    others, drafting = stated("gears", r"of original weights ([\d,]+), and in mode lossless or .* ([\d,]+)$")
    usual, on_gpu = stated(
        "format", r"Default: (\w+); of original weights whose gears mode lossless .* on a GPU (\w+),"
    )
    found = decided(model, device, mode=mode)
    drafts = found.mode.name == "lossless"
    assert str(found.ladder) == (drafting if drafts else others)
    assert found.format.name == (on_gpu if drafts and device == GPU else usual)


@pytest.mark.parametrize("model", ORIGINAL)
def test_original_weights_where_memory_is_short(decided, native, model):
    (usual,), (format, kind) = stated("format", r"Default: (\w+)"), stated("format", r"CPU (\w+) where they are (\w+)")
    assert decided(model, memory=1000).format.name == (format if model == kind else usual)
    assert decided(model, memory=1000, gears="4,16").format.name == usual


def test_formats_without_a_gear_of_8_bits(decided):
    one, other, gears = stated("gears", r"with format (\w+) or (\w+) ([\d,]+)$")
    for format in (one, other):
        assert str(decided("bfloat16", mode="route", format=format).ladder) == gears


def looks_up_alone(bits: int, device: str) -> bool:
    """Return whether the page's table says that mode lossless takes no gear of a model in so many bits."""
    rows = re.findall(r"^\| affine, ([\d or]+) bits.*?\|.*?\|(.*)\|$", PAGE, re.MULTILINE)
    (said,) = (row for codes, row in rows if str(bits) in codes)
    here, _, on_gpu = said.partition("on a GPU")
    return "lookup" in (on_gpu if on_gpu and device == GPU else here)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("model", CODES)
def test_a_quantized_model(decided, model, device, mode):
    low, least = map(int, stated("gears", r"a quantized model's own bits, with (\d) below (\d) or more"))
    bits, found = CODES[model], decided(model, device, mode=mode)
    alone = bits < least or (found.mode.name == "lossless" and looks_up_alone(bits, device))
    assert str(found.ladder) == (str(bits) if alone else f"{low},{bits}")


def test_the_mode_that_other_flags_belong_to(decided):
    said, otherwise = stated("mode", r"the other flags belong to \((.*)\), else (\w+)$")
    pairs = re.findall(r"(--.*?): (\w+)", said)
    of_help = {flag: mode for flags, mode in pairs for flag in re.findall("--[a-z-]+", flags)}
    table = PAGE.partition("Without `--mode`")[2].partition("With `--mode`")[0]
    assert of_help == dict(re.findall(r"^\| `(--[a-z-]+).*?\| `([a-z-]+)`", table, re.MULTILINE))
    assert of_help.pop("--small-model") == "pair"  # which runs without a decision
    given = {"--thresholds": "1,2", "--target-tps": 1.0, "--gear": "high", "--gears": "16"}
    found = {
        flag: decided("bfloat16", **{flag[2:].replace("-", "_"): value}).mode.name for flag, value in given.items()
    }
    assert found == of_help
    assert decided("bfloat16").mode.name == otherwise
