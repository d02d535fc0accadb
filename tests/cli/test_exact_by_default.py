"""Where commands take format exact without being asked, and in which mode they start."""

import json
import re

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx import convert
from gearbx_mlx.cli import decide

GENERATE = ("-m", 4, "--ignore-chat-template")


@pytest.fixture(scope="module")
def places(tmp_path_factory, demo):
    """Directories of tiny models: of two types, and two geared checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    for dtype in (mx.bfloat16, mx.float16):
        model = tiny_model(vocab_size=demo.tokenizer.vocab_size, tie_word_embeddings=True, dtype=dtype)
        save_model(model, folder / str(dtype).rpartition(".")[2])
    common = {"model": str(folder / "bfloat16")}
    for format in ("exact", "planes"):
        convert(**common, mlx_path=str(folder / format), format=format, gears="4,16")
    return folder


@pytest.fixture
def summary(command, places, tmp_path):
    """What `generate` with these flags reports about its run."""

    def run(model: str, *flags: object) -> dict:
        file = tmp_path / "summary.json"
        done = command("generate", "--model", places / model, *GENERATE, *flags, "--summary", file)
        assert done.status == 0, done.err
        return json.loads(file.read_text())

    return run


def bits(summary: dict) -> list[int]:
    return [gear["bits"] for gear in summary["ladder"]]


class TestAGearedCheckpoint:
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
    def test_starts_in_the_mode_that_flags_ask_for(self, summary, flags, mode):
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
        monkeypatch.setattr(decide, "available_memory", lambda: free)
        done = command("generate", "--model", places / "bfloat16", *GENERATE, "--verbose", "all")
        assert said in " ".join(done.err.split())

    def test_says_what_exact_and_one_gear_of_8_bits_cost_where_memory_is_short(
        self, command, places, native, monkeypatch
    ):
        monkeypatch.setattr(decide, "available_memory", lambda: 1000)
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
