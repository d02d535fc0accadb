"""A codebook gear works like any other: low in a ladder, as a draft, compared, converted."""

import json

import mlx.core as mx
import pytest
from conftest import PROMPT, save_model, tiny_model
from mlx_lm.generate import generate_step

from gearbx_mlx import Gearbox, load
from gearbx_mlx.decoding.lossless import LosslessModel
from gearbx_mlx.routing.acceptance import FixedLength

FORMATS = ["codebook", "codebook-library"]


def test_low_in_a_ladder(command, tmp_path):
    trace = tmp_path / "trace.jsonl"
    save_model(tiny_model(vocab_size=4096), tmp_path / "model")
    done = command(
        *("generate", "--format", "codebook", "--gears", "4,16", "--model", tmp_path / "model"),
        *("--thresholds", "1.0", "--max-tokens", "24", "--trace", trace),
    )
    assert done.status == 0, done.err
    gears = [json.loads(line)["gear"] for line in trace.read_text().splitlines()]
    assert set(gears) == {"low", "high"}


@pytest.mark.some(1)
@pytest.mark.parametrize("kernels", ["mlx", "native"])
@pytest.mark.parametrize("format", FORMATS)
def test_drafts_in_lossless_mode(format, kernels):
    model = tiny_model()
    gearbox = Gearbox(model, "4,16", format=format, kernels=kernels)
    theirs = [token for token, _ in generate_step(PROMPT[0], model, max_tokens=24)]
    lossless = LosslessModel(gearbox, FixedLength(3))
    assert [token for token, _ in generate_step(PROMPT[0], lossless, max_tokens=24)] == theirs
    gearbox.shift("low")
    assert not mx.array_equal(gearbox.model(PROMPT), tiny_model()(PROMPT)).item()


@pytest.mark.slow
def test_compared_in_evaluate(command, tmp_path):
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    save_model(tiny_model(vocab_size=4096), model)
    text.write_text("Tom has 5 apples and buys 7 more. How many apples does he have? " * 4)
    done = command(
        *("evaluate", "--model", model, "--format", "codebook", "--gears", "2,4,16", "--data", text, "--out", out),
        *("--modes", "none", "--context", 16, "--tokens", 32),
    )
    assert done.status == 0, done.err
    rows = {row["name"]: row for row in json.loads((out / "evaluation.json").read_text())["rows"]}
    assert rows["2 bits"]["kl_mean"] > rows["4 bits"]["kl_mean"] > rows["16 bits"]["kl_mean"] == 0
    assert rows["2 bits"]["effective_bits"] < rows["4 bits"]["effective_bits"] < 16


class TestChoices:
    NAME = "codebook-library:group=32,library=8,rounds=3,sigma=2.5"

    @pytest.mark.slow
    def test_a_checkpoint_records_them_and_reads_them_back(self, command, tmp_path):
        model, out = tmp_path / "model", tmp_path / "out"
        save_model(tiny_model(vocab_size=4096), model)
        layout = ("--format", self.NAME, "--gears", "4,16")
        done = command("convert", "--model", model, "--mlx-path", out, *layout)
        assert done.status == 0, done.err
        assert json.loads((out / "gears.json").read_text())["format"] == self.NAME
        assert f"Format `{self.NAME}`" in (out / "README.md").read_text()
        loaded, _ = load(out)
        saved, made = Gearbox(loaded), Gearbox(tiny_model(vocab_size=4096), "4,16", format=self.NAME)
        assert saved.format.name == self.NAME
        for gearbox in (saved, made):
            gearbox.shift("low")
        assert mx.allclose(saved.model(PROMPT), made.model(PROMPT), atol=1e-5).item()
        done = command("generate", "--model", out, "--max-tokens", "2", "--format", self.NAME)
        assert done.status == 0, done.err
        done = command(
            "generate", "--model", out, "--max-tokens", "2", "--format", self.NAME.replace("rounds=3", "rounds=4")
        )
        assert done.status == 2
        assert "rounds=4,sigma=2.5, and the gears of" in done.err
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("format", "words"),
        [
            ("codebook:sigma=0.5", "--format: sigma of codebooks is 0.5; give 1 to 100"),
            ("codebook:cap=0.9", "--format: cap of codebooks is 0.9; give 0 to 0.5"),
            ("codebook:rounds=0", "--format: rounds of codebooks is 0; give 1 to 1000"),
            ("codebook-library:library=300", "--format: library of codebooks is 300; give 1 to 256"),
            ("codebook-library:group=48", "--format: group of codebooks is 48; choose from 32, 64, 128, 256"),
            ("codebook:library=16", "--format is codebook:library=16, and library belongs to format codebook-library"),
            ("planes:rounds=9", "--format is planes:rounds=9, and only codebooks have choices; give --format planes"),
            ("nested", "--format is nested; choose from planes, affine"),
        ],
    )
    def test_choices_that_there_are_not(self, command, tmp_path, format, words):
        done = command("convert", "--format", format, "--mlx-path", tmp_path / "out")
        assert done.status == 2
        assert words in done.err
        assert done.err.count("\n") == 1
        assert not (tmp_path / "out").exists()
