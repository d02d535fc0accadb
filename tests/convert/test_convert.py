"""Geared checkpoints: what is written, whether mlx-lm reads it, and whether gears from disk equal those in memory."""

import errno
import json
import math
import os
import shutil
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import PROMPT, active_memory, contents, every_gear, same_weights, save_model, tiny_model, weights_of
from huggingface_hub import HfApi, ModelCard
from mutations import edit
from refusals import assert_not_loaded, assert_refused

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.conversion import converter
from gearbx_mlx.conversion.model_card import Provenance, provenance
from gearbx_mlx.convert import ConvertSettings
from gearbx_mlx.formats import FORMATS as ALL_FORMATS
from gearbx_mlx.formats import get_format
from gearbx_mlx.gears.ladder import Ladder
from gearbx_mlx.gears.manifest import GEARS_VERSION

CALIBRATES = ConvertSettings.calibrates  # both are replaced in conftest.py
MEASURES = ConvertSettings.measures
FORMATS = {"planes": "4,5,8,16", "affine": "3,8,16", "rowwise": "2,6,16", "groupwise": "4,16"}
FORMATS |= {"codebook": "3,16", "codebook-library": "2,16"}
MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3_moe": {},  # whose routers mlx-lm keeps at 8 bits
    "gpt_neox": {},  # with biases
}


@pytest.fixture
def convert(succeeds, tmp_path):
    """A tiny model, converted: (architecture, flags) -> the original's directory and the checkpoint's."""

    def run(architecture="llama", *flags, dtype=mx.bfloat16):
        source, out = tmp_path / "original", tmp_path / "geared"
        name = "llama" if architecture == "tied" else architecture
        save_model(tiny_model(name, dtype=dtype, **MODELS[architecture]), source)
        succeeds("convert", "--model", source, "--mlx-path", out, *flags)
        return source, out

    return run


class TestChosenCodes:
    """By default a text chooses the codes of the lowest gear."""

    @pytest.mark.parametrize(
        ("flags", "chosen", "ladder"),
        [
            ({}, True, "4,16"),
            ({"format": "affine"}, True, "4,16"),
            ({"gears": "4,8,16"}, True, "4,8,16"),
            ({"calibrate": "none"}, False, "4,8,16"),
            ({"format": "codebook"}, False, "4,16"),
            ({"format": "codebook", "auto_bits": ""}, False, "2,16"),
        ],
    )
    def test_default_codes_are_calibrated(self, monkeypatch, flags, chosen, ladder):
        monkeypatch.setattr(ConvertSettings, "calibrates", CALIBRATES)
        settings = command_settings(ConvertSettings, flags)
        assert (settings.calibrates, str(settings.ladder)) == (chosen, ladder)

    @pytest.mark.parametrize("format", ALL_FORMATS)
    def test_every_format_with_free_codes_is_calibrated(self, monkeypatch, format):
        monkeypatch.setattr(ConvertSettings, "calibrates", CALIBRATES)
        settings = command_settings(ConvertSettings, {"format": format, "gears": "4,16"})
        assert settings.calibrates == get_format(format).takes_base

    @pytest.mark.parametrize(
        ("gears", "why"),
        [
            ("4,8,16", "no layer has codes to calibrate: the gears 4,8 share their first codes; use --gears 4,16"),
            ("4,16", "prompts[0]: tokens must be"),  # the demo model's tokenizer knows more of them
        ],
    )
    def test_uncalibratable_layers_use_rtn_unless_requested(
        self, convert, command, succeeds, monkeypatch, tmp_path, gears, why
    ):
        source, _ = convert("llama", "--gears", "4,16")
        monkeypatch.setattr(ConvertSettings, "calibrates", CALIBRATES)
        given = "convert", "--model", source, "--gears", gears, "--mlx-path"
        done = succeeds(*given, tmp_path / "default")
        assert f"base: round-to-nearest, since {why}" in done.err
        done = command(*given, tmp_path / "asked", "--calibrate")
        assert done.status == 2
        assert why in done.err


def same_model(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = weights_of(a), weights_of(b)
    same_classes = [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    return same_classes and same_weights(ours, theirs) and all(ours[n].dtype == theirs[n].dtype for n in ours)


class TestGearsFromDisk:
    @pytest.mark.slow
    @pytest.mark.parametrize("kernels", ["mlx", "native"])
    @pytest.mark.parametrize("architecture", MODELS)
    @pytest.mark.parametrize("format", FORMATS)
    def test_equal_in_memory_gears_bit_for_bit(self, convert, format, architecture, kernels):
        source, out = convert(architecture, "--format", format, "--gears", FORMATS[format], "--embeddings", "keep")
        model, original = gearbx_mlx.load(out)[0], gearbx_mlx.load(source)[0]
        saved = Gearbox(model, kernels=kernels)
        made = Gearbox(original, FORMATS[format], format=format, kernels=kernels)
        assert saved.gear == saved.ladder[0]
        assert str(saved.ladder) == FORMATS[format]
        for gear in every_gear(saved, made, gears=(*saved.ladder, saved.ladder[0])):
            assert same_model(model, original)
            assert mx.array_equal(model(PROMPT), original(PROMPT)).item()
            assert saved.weight_bytes_per_token(gear) == made.weight_bytes_per_token(gear)
            assert saved.bits_per_weight(gear) == made.bits_per_weight(gear)
        assert saved.fingerprint == made.fingerprint
        assert saved.unmanaged == made.unmanaged

    @pytest.mark.parametrize("residency", ["resident", "disk"])
    def test_come_back_after_they_were_given_up(self, convert, residency):
        source, out = convert("tied", "--embeddings", "keep")
        model, original = gearbx_mlx.load(out)[0], gearbx_mlx.load(source)[0]
        saved, made = Gearbox(model, residency=residency), Gearbox(original, "4,8,16")
        for _ in every_gear(saved, made, gears=("high", "low", "mid", "high", "mid", "low")):
            assert same_model(model, original)

    def test_some_of_them_may_be_chosen(self, convert):
        source, out = convert("llama", "--gears", "4,5,6,8,16")
        model = gearbx_mlx.load(out)[0]
        gearbox = Gearbox(model, "4,6")
        assert [gear.name for gear in gearbox.ladder] == ["low", "high"]
        gearbox.shift(6)
        made = Gearbox(gearbx_mlx.load(source)[0], "4,5,6,8,16")
        made.shift(6)
        assert same_model(model, made.model)
        with pytest.raises(GearbxError, match="no 3-bit gear; choose from 4, 5, 6, 8, 16"):
            Gearbox(gearbx_mlx.load(out)[0], "3,16")

    @pytest.mark.parametrize(("format", "manage"), [("planes", "mlp"), ("rowwise", "all")])
    def test_without_a_dense_gear(self, convert, format, manage):
        flags = "--gears", "4,8", "--format", format, "--manage", manage, "--embeddings", "keep"
        source, out = convert("tied" if format == "planes" else "llama", *flags)
        saved = Gearbox(gearbx_mlx.load(out)[0])
        made = Gearbox(gearbx_mlx.load(source)[0], "4,8", format=format, manage=manage)
        for _ in every_gear(made, saved):
            assert same_model(saved.model, made.model)

    def test_of_other_layers_than_asked_for_are_refused(self, convert):
        _, out = convert("llama", "--manage", "mlp")
        with pytest.raises(GearbxError, match="manage mlp, not all"):
            Gearbox(gearbx_mlx.load(out)[0], manage="all")

    def test_low_gear_memory_is_the_low_gears(self, command, tmp_path):
        out = tmp_path / "geared"
        command("convert", "--mlx-path", out)
        mx.clear_cache()
        before = active_memory()
        model, _ = gearbx_mlx.load(out)
        gearbox = Gearbox(model, residency="disk", kernels="native")
        mx.eval(model.parameters())
        low = active_memory() - before
        held = sum(array.nbytes for array in {id(a): a for a in weights_of(model).values()}.values())
        assert low <= 1.05 * held  # and nothing of the other models
        gearbox.shift("high")
        assert active_memory() - before > 1.5 * low
        gearbox.shift("low")
        assert active_memory() - before <= 1.05 * held


class TestBase:
    def test_names_every_layer_in_its_configuration(self, convert):
        _, out = convert("qwen3_moe")
        quantization = json.loads((out / "config.json").read_text())["quantization"]
        assert quantization["bits"] == 4
        assert quantization["model.layers.0.mlp.gate"] == {"group_size": 64, "bits": 8, "mode": "affine"}
        assert quantization["model.layers.1.self_attn.q_proj"] == {"group_size": 64, "bits": 4, "mode": "affine"}
        assert quantization["model.embed_tokens"] == {"group_size": 64, "bits": 4, "mode": "affine"}
        model = tiny_model("qwen3_moe")
        assert {path for path, m in model.named_modules() if hasattr(m, "to_quantized")} <= quantization.keys()


def rows_of(card: str) -> dict[str, list[str]]:
    """First cell -> other cells, for all rows of a model card's tables."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def measured_cards(monkeypatch):
    """Model cards with the KL of the gears, as outside of tests."""
    monkeypatch.setattr(ConvertSettings, "measures", MEASURES)


class TestModelCard:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("format", FORMATS)
    def test_has_the_sizes_of_every_gear(self, convert, format):
        _, out = convert("llama", "--format", format, "--gears", FORMATS[format])
        card = ModelCard.load(out / "README.md")
        rows, gears = rows_of(card.text), json.loads((out / "gears.json").read_text())
        arrays = mx.load(str(out / "model.safetensors")) | mx.load(str(out / "gears.safetensors"))
        weights = sum(math.prod(layer["shape"]) for layer in gears["layers"].values())
        for gear in Ladder(gears["gears"]):
            stored = [layer["gears"][str(gear.bits)].values() for layer in gears["layers"].values()]
            size = sum(arrays[name].nbytes for names in stored for name in names)
            assert rows[gear.name] == [str(gear.bits), f"{8 * size / weights:.2f}", f"{size / 1e6:.2f} MB"]
        for name in ("model.safetensors", "gears.safetensors"):
            assert rows[f"`{name}`"] == [f"{(out / name).stat().st_size / 1e6:,.2f} MB"]
        assert (card.data.library_name, card.data.tags) == ("mlx", ["mlx", "gearbx-mlx"])
        assert f"gearbx_mlx generate --model {out.name}" in card.text
        assert f"mlx_lm.generate --model {out.name}" in card.text

    def test_distance_shrinks_with_bits(self, succeeds, measured_cards, tmp_path):
        succeeds("convert", "--gears", "4,8,16", "--manage", "attention", "--mlx-path", tmp_path / "out")
        text = (tmp_path / "out" / "README.md").read_text()
        low, high = ([float(cell.split()[0]) for cell in rows_of(text)[bits]] for bits in ("4", "8"))
        mean, median, p99, largest, same, ratio = range(6)
        assert 0 < low[median] < low[p99] < low[largest] < 1
        assert 0 < high[mean] < low[mean] / 10
        assert low[same] < high[same] <= 100
        assert high[ratio] == pytest.approx(1, abs=0.01)
        assert "1,000 tokens of a text that no calibration reads" in text

    def test_card_has_no_kl_if_omitted(self, succeeds, measured_cards, tmp_path):
        flags = "--gears", "4,16", "--manage", "attention", "--no-card-kl"
        succeeds("convert", *flags, "--mlx-path", tmp_path / "out")
        assert "KL mean" not in (tmp_path / "out" / "README.md").read_text()

    def test_unreadable_text_leaves_card_without_kl(self, succeeds, measured_cards, tmp_path):
        save_model(tiny_model(dtype=mx.bfloat16), tmp_path / "tiny")  # the tokenizer knows more tokens
        done = succeeds("convert", "--model", tmp_path / "tiny", "--mlx-path", tmp_path / "out")
        assert "model card: without KL, since held_out.jsonl: tokens must be" in done.err
        assert "KL mean" not in (tmp_path / "out" / "README.md").read_text()

    @pytest.mark.parametrize("given", ["smollm2", "tales.gguf"])
    def test_absent_metadata_needs_no_hub_request(self, given, tmp_path, monkeypatch):
        monkeypatch.setattr(ModelCard, "load", lambda *_, **__: pytest.fail("looked up"))
        monkeypatch.chdir(tmp_path)
        Path("tales.gguf").touch()
        assert provenance("geared", given, tmp_path) == Provenance("geared", None, given, {})

    def test_card_matches_upload(self, succeeds, tmp_path, monkeypatch):
        uploaded = {}
        monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, exist_ok: uploaded.update(repo=repo_id))

        def upload(self, repo_id, folder_path, repo_type):
            uploaded["card"] = (folder_path / "README.md").read_text()

        monkeypatch.setattr(HfApi, "upload_folder", upload)
        source = tmp_path / "original"
        save_model(tiny_model(dtype=mx.bfloat16), source)
        monkeypatch.setattr(import_module("gearbx_mlx.convert.run"), "find", lambda name, revision: source)
        monkeypatch.setattr("gearbx_mlx.conversion.model_card.read_metadata", lambda name: {"license": "mit"})
        flags = ["--model", "somebody/tales", "--mlx-path", tmp_path / "geared", "--upload-repo", "me/tales-geared"]
        succeeds("convert", *flags)
        assert uploaded["repo"] == "me/tales-geared"
        card = ModelCard(uploaded["card"])
        assert (card.data.base_model, card.data.license) == ("somebody/tales", "mit")
        assert "--model me/tales-geared" in card.text
        assert rows_of(card.text)["low"][:2] == ["4", "4.50"]


@pytest.mark.slow
def test_a_budget_finds_the_floors(succeeds, tmp_path):
    (tmp_path / "prompts.txt").write_text("Once upon a time there was a king\n")
    flags = ["--format", "codebook", "--manage", "attention", "--target-bpw", "7", "--mlx-path", tmp_path / "out"]
    done = succeeds("convert", *flags, "--prompts", tmp_path / "prompts.txt")
    assert "Points tried" in done.err
    gearbox = Gearbox(gearbx_mlx.load(tmp_path / "out")[0])
    assert gearbox.bits_per_weight(gearbox.ladder[0]) < 7
    points = json.loads((tmp_path / "out" / "selection.json").read_text())["points"]
    assert points[0]["strict"] <= points[-1]["strict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A broken checkpoint of the demo model."""
    return gearbx_mlx.convert(mlx_path=tmp_path_factory.mktemp("whole") / "broken", calibrate="none")


@pytest.fixture
def broken(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "broken")


class TestLoading:
    @pytest.mark.parametrize("part", [0.5, 0.001, 0])
    def test_truncated_gears_are_not_loaded(self, broken, part):
        file = broken / "gears.safetensors"
        os.truncate(file, int(file.stat().st_size * part))
        assert_not_loaded(broken, "gears.safetensors: damaged or truncated")

    @pytest.mark.parametrize(("gone", "left"), [("safetensors", "json"), ("json", "safetensors")])
    def test_half_of_the_gears(self, broken, gone, left):
        (broken / f"gears.{gone}").unlink()
        assert_not_loaded(broken, f"gears.{gone}: missing beside gears.{left}; download it again, or make it again")

    @pytest.mark.parametrize(("away", "remedy"), [(1, "upgrade gearbx-mlx"), (-1, "convert the original again")])
    def test_other_version_is_refused(self, broken, away, remedy):
        edit(broken / "gears.json", version=GEARS_VERSION + away)
        words = f"gears.json: unsupported version, got {GEARS_VERSION + away} instead of {GEARS_VERSION}; {remedy}"
        assert_not_loaded(broken, words)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 4}', '{"version": "1"}', "\x00"])
    def test_a_damaged_manifest(self, broken, text):
        (broken / "gears.json").write_text(text)
        assert_not_loaded(broken, "gears.json: cannot be read as a manifest of gears")

    def test_gears_removed_after_loading(self, broken):
        model, _ = gearbx_mlx.load(broken)
        gearbox = gearbx_mlx.Gearbox(model, residency="disk")
        gearbox.shift("mid")
        gearbox.shift("low")
        (broken / "gears.safetensors").unlink()
        with pytest.raises(GearbxError, match="cannot be read"):
            gearbox.shift("mid")
        assert gearbox.gear.name == "low"
        assert model(mx.array([[1, 2]])).shape == (1, 2, 4096)


class TestConverting:
    @pytest.mark.some(1)
    @pytest.mark.parametrize("after", [0, 1, 30])
    def test_full_disk_is_reported(self, whole, tmp_path, command, monkeypatch, after):
        appends, append = iter(range(after)), converter.TensorFile.append

        def full(self, arrays):
            if next(appends, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return append(self, arrays)

        out = tmp_path / "broken"
        with monkeypatch.context() as patch:
            patch.setattr(converter.TensorFile, "append", full)
            done = command("convert", "--mlx-path", out)
        assert done.status == 2
        assert [line for line in done.err.splitlines() if not line.startswith("converting: ")][1:] == []
        assert f"{out}: cannot be written (No space left on device); make room or choose another place" in done.err
        assert [*out.parent.iterdir()] == []
        assert command("convert", "--mlx-path", out).status == 0
        assert contents(out) == contents(whole)

    def test_invalid_requests_are_refused(self, whole, tmp_path, command):
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "a.txt").touch()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        quantized = tmp_path / "quantized"
        shutil.copytree(whole, quantized)
        for name in ("gears.json", "gears.safetensors"):
            (quantized / name).unlink()
        for flags, words in (
            (["--mlx-path", tmp_path / "there"], "already exists; remove it or choose a different path"),
            (["--mlx-path", tmp_path / "link"], "already exists; remove it or choose a different path"),
            (["--mlx-path", tmp_path / "no" / "where"], "there is no directory"),
            (["--mlx-path", tmp_path / "a", "--gears", "16"], "nothing to convert; use a gear of fewer bits"),
            (["--mlx-path", tmp_path / "a", "--model", whole], "already has gears; use the original"),
            (
                ["--mlx-path", tmp_path / "a", "--model", quantized],
                "there is no lower gear to write; without conversion 4-bit weights",
            ),
            (["--mlx-path", tmp_path / "a", "--model", "b/" + "c" * 300], "b/ccc"),
            (["--mlx-path", tmp_path / "a", "--upload-repo", "b" * 300], "--upload-repo bbb"),
            (["--mlx-path", "."], "already exists"),
            (["--mlx-path", "~no-such-user/a"], "invalid name"),
            (["--mlx-path", tmp_path / ("a" * 300)], "invalid name (File name too long)"),
        ):
            assert_refused(command("convert", *flags), words)
            assert {path.name for path in tmp_path.iterdir()} == {"there", "link", "quantized"}
