"""One function decides format, ladder, kernels, base and mode, from flags, files and the model."""

import json
import re

import mlx.core as mx
import mlx_lm
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import GearbxError, convert
from gearbx_mlx.chat import ChatSettings
from gearbx_mlx.cli import decide as module
from gearbx_mlx.cli.decide import JustGears, decide
from gearbx_mlx.cli.flags import GearFlags, LayoutSettings, ModeFlags, ModelSettings
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.decoding.modes import SETTINGS, flags_of_mode
from gearbx_mlx.generate import GenerateSettings, setup_arg_parser
from gearbx_mlx.loading import load
from gearbx_mlx.routing.gates import DEFAULT_WINDOW
from gearbx_mlx.server import setup_arg_parser as server_parser
from gearbx_mlx.serving.requests import Options
from gearbx_mlx.settings import flag_of, flags_in

LOSSLESS = ModeFlags(mode="lossless")


@pytest.fixture(scope="module")
def places(tmp_path_factory, demo):
    """Directories of a tiny model: in bfloat16 and float16, quantized by mlx-lm, and with gears in planes and exact."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("bfloat16", "float16"):
        save_model(tiny_model(vocab_size=demo.tokenizer.vocab_size, dtype=getattr(mx, name)), folder / name)
    mlx_lm.convert(str(folder / "float16"), str(folder / "codes"), quantize=True, q_bits=8)
    convert(str(folder / "float16"), folder / "geared", gears="4,8")
    for format in ("exact", "planes"):
        convert(str(folder / "bfloat16"), folder / format, gears="4,16", format=format)
    return folder


def decided(place, **groups):
    settings = JustGears(ModelSettings(str(place)), **groups)
    return decide(settings, load(place, lazy=True)[0])


@pytest.mark.parametrize(
    ("model", "groups", "ladder", "format", "why"),
    [
        ("float16", {}, "4,8,16", "planes", "the defaults"),
        ("float16", {"layout": LayoutSettings(gears="3,16")}, "3,16", "planes", "the gears that were asked for"),
        ("float16", {"layout": LayoutSettings(format="codebook")}, "4,16", "codebook", "the defaults"),
        ("geared", {}, "4,8", "planes", "gears of the checkpoint"),
        ("codes", {}, "4,8", "planes", "the checkpoint's own codes"),
    ],
)
def test_what_runs_and_why(places, model, groups, ladder, format, why):
    found = decided(places / model, **groups)
    assert (str(found.ladder), found.format.name, found.why) == (ladder, format, why)


@pytest.mark.parametrize(("free", "note"), [(1e12, "drafts take about"), (1000, "memory is short")])
@pytest.mark.parametrize(("model", "short"), [("float16", "planes"), ("bfloat16", "exact")])
def test_drafts_take_what_memory_has_room_for(places, native, monkeypatch, model, short, free, note):
    monkeypatch.setattr(module, "available_memory", lambda: free)
    found = decided(places / model, mode=LOSSLESS)
    assert (str(found.ladder), found.format.name) == ("4,16", short if free < 1e6 else "planes")
    assert found.note.startswith(note)
    assert ("exact" in found.note) == (model == "bfloat16")  # which alone can have it
    assert found.takes_base


def test_the_first_answer_needs_no_model(places):
    """A server refuses what flags and files show to be wrong before it gives its model up."""
    settings = JustGears(ModelSettings(str(places / "geared")), LayoutSettings(gears="3,8"))
    with pytest.raises(GearbxError, match=r"geared: .* choose from 4, 8"):
        decide(settings)


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("geared", GearFlags(base=""), "has its codes; leave out --base"),
        ("codes", GearFlags(base=""), "is quantized already, .* leave out --base"),
        ("codes", GearFlags(residency="disk"), "leave out --residency disk"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(places, model, flags, says):
    with pytest.raises(GearbxError, match=says):
        decided(places / model, gears=flags)


def test_both_flags_that_choose_codes():
    with pytest.raises(GearbxError, match="--base and --manifest both choose codes"):
        GearFlags(base="", manifest="m.json")


@pytest.mark.parametrize(("parser", "most"), [(setup_arg_parser, 45), (server_parser, 55)], ids=["generate", "server"])
def test_there_are_so_many_flags_at_most(parser, most):
    made = parser()
    printing = {"--help", "-h", "--help-all", "--version"}
    flags = [action for action in made._actions if not printing & {*action.option_strings}]
    assert len(flags) <= most
    assert len([action for action in flags if action not in made.rare]) <= 25


def test_the_flags_of_modes_are_fields_of_their_settings():
    known = {name for mode in SETTINGS for name in flags_of_mode(mode)}
    assert {*flags_in(ModeFlags)} - {"mode"} == known
    for kind in (GenerateSettings, ChatSettings):
        with pytest.raises(GearbxError, match=f"{flag_of('draft_length')} is 0; give 1 to"):
            command_settings(kind, {"draft_length": 0})


def test_what_a_request_may_choose_are_fields_of_modes():
    fields = {name for kind in SETTINGS.values() for name in kind.__dataclass_fields__}
    assert {*Options.model_fields} - {"mode"} <= fields


def test_a_file_of_a_gate_alone(command, tmp_path):
    """Thresholds are the paper's where a file has none, and what it does not have is the default."""
    file, summary = tmp_path / "gate.json", tmp_path / "s.json"
    file.write_text(json.dumps({"schema": "gearbx-mlx thresholds", "version": 1, "window": DEFAULT_WINDOW + 1}))
    done = command("generate", "-m", 4, "--thresholds", file, "--summary", summary)
    assert done.status == 0, done.err
    assert json.loads(summary.read_text())["mode_chosen_by"] == "--thresholds"


GENERATE = ("-m", 4, "--ignore-chat-template")


@pytest.fixture
def summary(command, places, tmp_path):
    """Return what `generate` with these flags reports about its run."""

    def run(model: str, *flags: object) -> dict:
        file = tmp_path / "summary.json"
        done = command("generate", "--model", places / model, *GENERATE, *flags, "--summary", file)
        assert done.status == 0, done.err
        return json.loads(file.read_text())

    return run


def bits(summary: dict) -> list[int]:
    return [gear["bits"] for gear in summary["ladder"]]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (["--mode", "route"], "route"),
        (["--mode", "static", "--gear", "low"], "static"),
        (["--mode", "telemetry-only"], "telemetry-only"),
        (["--draft-length", "2"], "lossless"),
        (["--thresholds", "1.5"], "route"),
        (["--gear", "low"], "static"),
        (["--gears", "4"], "lossless"),
        (["--target-tps", "1"], "route"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_geared_checkpoint_starts_in_the_mode_that_flags_ask_for(summary, flags, mode):
    assert summary("exact", *flags)["mode"] == mode


class TestModeLossless:
    @pytest.mark.parametrize(
        ("free", "said"),
        [
            (1e12, "gears 4,16 in format planes, native kernels: a draft beside the weights as they are"),
            (1000, "gears 4,16 in format exact, native kernels: one exact copy of the weights with its draft inside"),
        ],
    )
    def test_describe_says_why(self, command, places, native, monkeypatch, free, said):
        monkeypatch.setattr(module, "available_memory", lambda: free)
        done = command("generate", "--model", places / "bfloat16", *GENERATE, "--verbose", "all")
        assert said in " ".join(done.err.split())

    def test_says_what_exact_and_one_gear_of_8_bits_cost_where_memory_is_short(
        self, command, places, native, monkeypatch
    ):
        monkeypatch.setattr(module, "available_memory", lambda: 1000)
        monkeypatch.setenv("GEARBX_TUNE", "1")
        flags = "--model", places / "bfloat16", *GENERATE
        said = [" ".join(command("generate", *flags).err.split()) for _ in range(2)]
        found = [
            re.search(r"take (\S+) times as long .* 8 bits (\S+) times, .*--mode static --gears 8", text)
            for text in said
        ]
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
        ids=["another type", "gears", "format", "residency", "kernels", "a checkpoint that has gears"],
    )
    def test_stores_other_weights_as_is_asked_for(self, summary, model, flags, ladder):
        run = summary(model, "--mode", "lossless", *flags)
        assert bits(run) == ladder
        assert "weight_bytes_per_token_original" not in run

    @pytest.mark.parametrize(("model", "gears"), [("float16", "4,16"), ("exact", "5,16"), ("bfloat16", "4,8,16")])
    def test_what_the_format_cannot_store_is_refused_in_one_line(self, command, places, model, gears):
        flags = "--format", "exact", "--gears", gears
        done = command("generate", "--model", places / model, *GENERATE, *flags)
        assert done.status == 2
        assert len(done.err.strip().splitlines()) == 1
        remedies = {
            "float16": "choose format planes or affine, or make the model bfloat16",
            "exact": "choose from 4, 16",
            "bfloat16": "make gears 4,16 of the original, or give --format planes",
        }
        assert remedies[model] in done.err
