"""One function decides format, ladder, kernels, base and mode, from flags, files and the model.

Help texts and docs/generate.md say the same of defaults.
"""

import json
import re
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from conftest import save_model, tiny_model
from gguf_files import F16, Q4_0, Q8_0, tiny_as, write
from refusals import assert_refused

from gearbx_mlx import GearbxError, convert
from gearbx_mlx.chat import ChatSettings
from gearbx_mlx.cli import describe as module
from gearbx_mlx.cli.decide import JustGears, decide
from gearbx_mlx.cli.describe import describe
from gearbx_mlx.cli.flags import GearFlags, LayoutSettings, ModeFlags, ModelSettings
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.decoding.modes import SETTINGS, flags_of_mode
from gearbx_mlx.generate import GenerateSettings, setup_arg_parser
from gearbx_mlx.kernels.dispatch import CPU, GPU
from gearbx_mlx.routing.gates import DEFAULT_WINDOW
from gearbx_mlx.server import setup_arg_parser as server_parser
from gearbx_mlx.server.requests import Options
from gearbx_mlx.settings import flag_of, flags_in

LOSSLESS = ModeFlags(mode="lossless")
PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
HELP = {action.dest: action.help or "" for action in setup_arg_parser()._actions}
ORIGINAL = "bfloat16", "float16", "16 bits.gguf"
CODES = {"8 bits": 8, "6 bits": 6, "4 bits": 4, "8 bits.gguf": 8, "4 bits.gguf": 4}
MODES = "lossless", "route", "static", "kickdown"


@pytest.fixture(scope="module")
def places(tmp_path_factory, demo):
    """A tiny model in one folder: original weights, codes of mlx-lm, GGUF, and checkpoints with gears."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("bfloat16", "float16"):
        save_model(tiny_model(vocab_size=demo.tokenizer.vocab_size, dtype=getattr(mx, name)), folder / name)
    for name in ("8 bits", "6 bits", "4 bits"):
        mlx_lm.convert(str(folder / "float16"), str(folder / name), quantize=True, q_bits=CODES[name])
    for name, kind in (("16 bits", F16), ("8 bits", Q8_0), ("4 bits", Q4_0)):
        write(folder / f"{name}.gguf", tiny_as("llama"), kind)
    convert(str(folder / "float16"), folder / "geared", gears="4,8")
    for format in ("exact", "planes"):
        convert(str(folder / "bfloat16"), folder / format, gears="4,16", format=format)
    return folder


def decided(place, **groups):
    settings = JustGears(ModelSettings(str(place)), **groups)
    return decide(settings, describe(settings))


@pytest.mark.parametrize(
    ("model", "groups", "ladder", "format", "why"),
    [
        ("float16", {}, "4,8,16", "planes", "the defaults"),
        ("float16", {"layout": LayoutSettings(gears="3,16")}, "3,16", "planes", "the gears that were asked for"),
        ("float16", {"layout": LayoutSettings(format="codebook")}, "4,16", "codebook", "the defaults"),
        ("geared", {}, "4,8", "planes", "gears of the checkpoint"),
        ("8 bits", {}, "4,8", "planes", "the checkpoint's own codes"),
    ],
)
def test_decisions_and_reasons(places, model, groups, ladder, format, why):
    found = decided(places / model, **groups)
    assert (str(found.ladder), found.format.name, found.reasons[0]) == (ladder, format, why)


@pytest.mark.parametrize(("free", "note"), [(1e12, "drafts take about"), (1000, "memory is short")])
@pytest.mark.parametrize(("model", "short"), [("float16", "planes"), ("bfloat16", "exact")])
def test_drafts_fit_memory(places, native, monkeypatch, model, short, free, note):
    monkeypatch.setattr(module, "available_memory", lambda: free)
    found = decided(places / model, mode=LOSSLESS)
    assert (str(found.ladder), found.format.name) == ("4,16", short if free < 1e6 else "planes")
    (said,) = found.notes
    assert said.startswith(note)
    assert ("exact" in said) == (model == "bfloat16")  # which alone can have it
    assert found.takes_base


def test_the_first_answer_needs_no_model(places):
    """A server refuses what flags and files show to be wrong before it gives its model up."""
    settings = JustGears(ModelSettings(str(places / "geared")), LayoutSettings(gears="3,8"))
    with pytest.raises(GearbxError, match=r"geared: .* choose from 4, 8"):
        decide(settings, describe(settings))


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("geared", GearFlags(base=""), "has its codes; omit --base"),
        ("8 bits", GearFlags(base=""), "quantized already, .* omit --base"),
        ("8 bits", GearFlags(residency="disk"), "omit --residency disk"),
    ],
)
def test_mismatched_model_is_refused(places, model, flags, says):
    with pytest.raises(GearbxError, match=says):
        decided(places / model, gears=flags)


@pytest.fixture
def by_flags(places, own_cache, monkeypatch):
    """Return the decision for a model on a device, with flags as a user gives them."""

    def found(model: str, device: str = CPU, memory: float = 1e12, **flags: object):
        monkeypatch.setattr(module, "device", lambda: device)
        monkeypatch.setattr(module, "available_memory", lambda: memory)
        settings = command_settings(GenerateSettings, {"model": str(places / model), **flags})
        return decide(settings, describe(settings))

    return found


def stated(flag: str, words: str) -> tuple[str, ...]:
    """Return what a help text says where `words` has groups."""
    said = re.search(words, HELP[flag])
    assert said, f"the help of {flag} says something else now: {HELP[flag]}"
    return said.groups()


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("model", ORIGINAL)
def test_original_weights(by_flags, model, device, mode):
    others, drafting = stated("gears", r"default: ([\d,]+); lossless, .*?: ([\d,]+);")
    usual, on_gpu = stated("format", r"default: (\w+); lossless: (\w+) \(GPU\)")
    found = by_flags(model, device, mode=mode)
    drafts = found.mode.name == "lossless"
    assert str(found.ladder) == (drafting if drafts else others)
    assert found.format.name == (on_gpu if drafts and device == GPU else usual)


@pytest.mark.parametrize("model", ORIGINAL)
def test_original_weights_in_short_memory(by_flags, native, model):
    usual, format, kind = stated("format", r"default: (\w+); .*, (\w+) \((\w+), memory short\)")
    assert by_flags(model, memory=1000).format.name == (format if model == kind else usual)
    assert by_flags(model, memory=1000, gears="4,16").format.name == usual


def test_formats_without_8_bit_gear(by_flags):
    one, other, gears = stated("gears", r"lossless, (\w+) or (\w+): ([\d,]+);")
    for format in (one, other):
        assert str(by_flags("bfloat16", mode="route", format=format).ladder) == gears


def documented_ladder(bits: int, device: str, drafts: bool) -> str:
    """Return the ladder that the page's table has for a model in so many bits."""
    rows = re.findall(r"^\| affine, ([\d or]+) bits.*?\|(.*?)\|(.*)\|$", PAGE, re.MULTILINE)
    ((ladders, lossless),) = (row for codes, *row in rows if str(bits) in codes)
    here, _, on_gpu = lossless.partition("on a GPU")
    only_lookup = "lookup" in (on_gpu if on_gpu and device == GPU else here)
    found = re.findall(rf"\d,{bits}", ladders)
    return str(bits) if not found or (drafts and only_lookup) else found[0]


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("model", CODES)
def test_a_quantized_model(by_flags, model, device, mode):
    found = by_flags(model, device, mode=mode)
    assert str(found.ladder) == documented_ladder(CODES[model], device, found.mode.name == "lossless")


def test_flags_select_their_mode(by_flags):
    otherwise, by_flag = stated("mode", r"default: (\w+); (.*)\]$")
    pairs = re.findall(r"(--.*?): (\w+)", by_flag)
    of_help = {flag: mode for flags, mode in pairs for flag in re.findall("--[a-z-]+", flags)}
    table = PAGE.partition("Without `--mode`")[2].partition("With `--mode`")[0]
    assert of_help == dict(re.findall(r"^\| `(--[a-z-]+).*?\| `([a-z-]+)`", table, re.MULTILINE))
    assert of_help.pop("--small-model") == "pair"  # which runs without a decision
    given = {"thresholds": "1,2", "target_tps": 1.0, "gear": "high", "gears": "16"}
    assert {flag_of(name): by_flags("bfloat16", **{name: given[name]}).mode.name for name in given} == of_help
    assert by_flags("bfloat16").mode.name == otherwise


@pytest.mark.parametrize(("parser", "most"), [(setup_arg_parser, 46), (server_parser, 57)], ids=["generate", "server"])
def test_there_are_so_many_flags_at_most(parser, most):
    made, printing = parser(), {"--help", "-h", "--help-all", "--version"}
    flags = [action for action in made._actions if not printing & {*action.option_strings}]
    assert len(flags) <= most
    assert len([action for action in flags if action not in made.rare]) <= 25


def test_mode_flags_are_settings_fields():
    known = {name for mode in SETTINGS for name in flags_of_mode(mode)}
    assert {*flags_in(ModeFlags)} - {"mode"} == known
    for kind in (GenerateSettings, ChatSettings):
        with pytest.raises(GearbxError, match=f"{flag_of('num_draft_tokens')}: out of range, got 0; use 1 to"):
            command_settings(kind, {"num_draft_tokens": 0})


def test_request_choices_are_mode_fields():
    fields = {name for kind in SETTINGS.values() for name in kind.__dataclass_fields__}
    assert {*Options.model_fields} - {"mode"} <= fields


def test_gate_file_without_thresholds_uses_defaults(generated, tmp_path):
    """Thresholds are the paper's where a file has none, and what it does not have is the default."""
    file = tmp_path / "gate.json"
    file.write_text(json.dumps({"schema": "gearbx-mlx thresholds", "version": 1, "window": DEFAULT_WINDOW + 1}))
    assert generated("-m", 4, "--thresholds", file).summary["mode_chosen_by"] == "--thresholds"


GENERATE = ("-m", 4, "--ignore-chat-template")


class TestModeLossless:
    @pytest.mark.parametrize(
        ("free", "said"),
        [
            (1e12, "planes, native kernels: a draft beside the original weights"),
            (1000, "exact, native kernels: one exact copy of the weights with its draft inside"),
        ],
    )
    def test_describe_gives_reason(self, command, places, native, monkeypatch, free, said):
        monkeypatch.setattr(module, "available_memory", lambda: free)
        done = command("generate", "--model", places / "bfloat16", *GENERATE, "--verbose", "all")
        assert f"gears 4,16 in format {said}" in " ".join(done.err.split())

    def test_reports_other_costs_in_short_memory(self, command, places, native, monkeypatch):
        monkeypatch.setattr(module, "available_memory", lambda: 1000)
        monkeypatch.setenv("GEARBX_TUNE", "1")
        flags = "--model", places / "bfloat16", *GENERATE
        said = [" ".join(command("generate", *flags).err.split()) for _ in range(2)]
        words = r"take (\S+)× the time .* 8-bit gear (\S+)×; use --mode static --gears 8"
        found = [re.search(words, text) for text in said]
        assert all(found), said
        assert found[0].groups() == found[1].groups()  # measured once
        assert all(float(times) > 0 for times in found[0].groups())

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("model", "flags", "ladder"),
        [
            ("float16", [], [4, 16]),
            ("bfloat16", ["--gears", "4,8,16"], [4, 8, 16]),
            ("bfloat16", ["--format", "affine"], [4, 16]),
            ("bfloat16", ["--residency", "disk"], [4, 16]),
            ("bfloat16", ["--kernels", "mlx"], [4, 16]),
            ("planes", [], [4, 16]),
        ],
    )
    def test_stores_other_weights_as_is_asked_for(self, generated, places, model, flags, ladder):
        run = generated("--model", places / model, *GENERATE, "--mode", "lossless", *flags).summary
        assert [gear["bits"] for gear in run["ladder"]] == ladder
        assert "weight_bytes_per_token_original" not in run

    @pytest.mark.parametrize(
        ("model", "gears", "remedy"),
        [
            ("float16", "4,16", "choose format planes or affine, or make the model bfloat16"),
            ("exact", "5,16", "choose from 4, 16"),
            ("bfloat16", "4,8,16", "got 8; use 4,16, or choose format planes"),
        ],
    )
    def test_weights_beyond_format_are_refused(self, command, places, model, gears, remedy):
        flags = "--model", places / model, *GENERATE, "--format", "exact", "--gears", gears
        assert_refused(command("generate", *flags), remedy)
