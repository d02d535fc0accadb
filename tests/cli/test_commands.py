import io
import json
import os
import re
import sys
from pathlib import Path

import mlx_lm
import numpy as np
import pytest
from conftest import read_trace
from mlx_lm.generate import setup_arg_parser as mlx_lm_flags
from pseudo_terminal import ESCAPES

from gearbx_mlx import GearbxError, GearbxWarning
from gearbx_mlx.calibrate import calibrate
from gearbx_mlx.cli.flags import SamplingSettings
from gearbx_mlx.cli.terminal import TintedText
from gearbx_mlx.generate import DEFAULT_PROMPT
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.gates import ThresholdFile, thresholds_of_file

SUMMARY_FIELDS = {
    *("model", "mode", "ladder", "tokens", "tokens_per_second", "gear_tokens", "shifts", "shift_seconds"),
    *("making_seconds", "mean_entropy_bits", "effective_bits_per_weight", "weight_bytes_per_token"),
    *("weight_bytes_per_token_top", "peak_memory_bytes", "managed_layers", "unmanaged_layers"),
}
TRACE_FIELDS = ["index", "token", "text", "entropy", "mean_entropy", "gear", "shifted"]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


class TestFlags:
    def test_help_shows_common_flags_and_help_all_every(self, command):
        shown = [command("generate", flag) for flag in ("--help", "--help-all")]
        assert [each.status for each in shown] == [0, 0]
        few, every = (flags_in(each.out) for each in shown)
        assert len(few) <= 28  # 25, and those that print
        assert {"--model", "--prompt", "--max-tokens", "--gears", "--mode"} <= few < every
        assert {"--xtc-probability", "--top-k", "--min-p", "--num-draft-tokens"} <= every - few

    def test_default_sampling_matches_mlx_lm(self):
        ours, theirs = vars(SamplingSettings()), vars(mlx_lm_flags().parse_args([]))
        assert ours == {name: theirs[name] for name in ours}


def flags_in(text: str) -> set[str]:
    """The flags that a help text describes."""
    return set(re.findall(r"^  (?:-\w[^-]*, )?(--[\w-]+)", text, re.MULTILINE))


class TestGenerate:
    def test_writes_output_trace_and_summary(self, generated, tmp_path):
        result = generated("--mode", "route", "--max-tokens", 60)
        summary, trace = result.summary, result.trace
        assert summary.keys() >= SUMMARY_FIELDS
        assert (summary["model"], summary["mode"]) == ("demo", "route")
        assert [g["bits"] for g in summary["ladder"]] == [4, 8, 16]
        # Read as stored: 4 + 2 x 16/64; two planes with a scale and a bias each; bfloat16.
        assert [g["bytes_per_weight"] for g in summary["ladder"]] == [4.5 / 8, 9 / 8, 2.0]

        assert all(list(entry) == TRACE_FIELDS for entry in trace)
        assert [entry["index"] for entry in trace] == list(range(summary["tokens"]))
        assert "".join(entry["text"] for entry in trace) + "\n" == result.out
        gears = [entry["gear"] for entry in trace]
        assert summary["gear_tokens"] == {name: gears.count(name) for name in ("low", "mid", "high")}
        assert summary["shifts"] == sum(entry["shifted"] for entry in trace)
        assert summary["mean_entropy_bits"] == pytest.approx(np.mean([entry["entropy"] for entry in trace]))
        bits = {"low": 4.5, "mid": 9.0, "high": 16.0}
        assert summary["effective_bits_per_weight"] == pytest.approx(np.mean([bits[gear] for gear in gears]))
        assert summary["weight_bytes_per_token"] <= summary["weight_bytes_per_token_top"]
        assert summary["managed_layers"] == 43
        for words in ("tokens/s", "ready", "shifts", "weights read", "memory"):
            assert words in result.err
        assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "trace.jsonl"}

    def test_first_command_shows_question_legend_and_drafts(self, command, generated, monkeypatch):
        """Its question, a legend where there are colours, and drafts."""
        monkeypatch.setenv("FORCE_COLOR", "1")
        colored = command("generate", "--gears", "4,16", "-m", 3).err
        question, colors, *_ = ESCAPES.sub("", colored).splitlines()
        monkeypatch.delenv("FORCE_COLOR")
        done = generated("--gears", "4,16", "-m", 60)
        assert question == DEFAULT_PROMPT
        assert "tokens: " not in done.err
        drafted = "drafted in 4 bits, accepted"
        assert colors == f"tokens: {drafted} · prompt lookup, accepted · generated in 16 bits"
        summary = done.summary
        assert summary["accepted"] > 0
        assert summary["accepted"] + summary["lookup_accepted"] + summary["gear_tokens"]["high"] == summary["tokens"]
        assert done.out == command("generate", "--gears", "4,16", "-m", 60, "--mode", "static").out

    def test_not_verbose_prints_output_only(self, command):
        result = command("generate", "-m", 12, "--verbose", "False")
        assert result.err == ""
        assert result.out == command("generate", "-m", 12).out

    def test_prompt_from_standard_input(self, command, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time"))
        piped = command("generate", "-m", 8, "-p", "-").out
        assert piped == command("generate", "-m", 8, "-p", "Once upon a time").out

    @pytest.fixture
    def piped(self, monkeypatch):
        """Put an open file in the place of standard input."""
        before = os.dup(0)

        def put(handle: int) -> None:
            os.dup2(handle, 0)
            monkeypatch.setattr(sys, "stdin", os.fdopen(0, closefd=False))

        yield put
        os.dup2(before, 0)
        os.close(before)

    def test_piped_input_is_default_prompt(self, command, piped, tmp_path):
        expected = command("generate", "-m", 8, "-p", "Once upon a time").out
        read, write = os.pipe()
        os.write(write, b"Once upon a time")
        os.close(write)
        piped(read)
        assert command("generate", "-m", 8).out == expected
        (tmp_path / "prompt.txt").write_text("Once upon a time")
        piped(os.open(tmp_path / "prompt.txt", os.O_RDONLY))
        assert command("generate", "-m", 8).out == expected

    def test_empty_or_open_pipe_keeps_default_prompt(self, command, piped):
        expected = command("generate", "-m", 8).out
        read, write = os.pipe()
        piped(read)
        waiting = command("generate", "-m", 8)
        assert waiting.out == expected
        assert "use --prompt - to wait for it" in waiting.err
        os.close(write)
        assert command("generate", "-m", 8).out == expected

    def test_two_words_are_the_model_and_the_prompt(self, command):
        expected = command("generate", "--model", DEMO_MODEL, "--prompt", "Once upon a time", "-m", 8).out
        assert command("generate", DEMO_MODEL, "Once upon a time", "-m", 8).out == expected
        assert command("generate", "-m", 8, DEMO_MODEL, "Once upon a time").out == expected

    @pytest.mark.parametrize("words", [[DEMO_MODEL, "-5 + 3 is"], ["--", DEMO_MODEL, "Once"]], ids=str)
    def test_words_may_start_with_a_dash(self, command, words):
        assert command("generate", "-m", 2, *words).status == 0

    def test_minus_one_ends_at_the_context(self, generated):
        sampled = "--temp", 1, "--seed", 0, "--ignore-chat-template"
        summary = generated("-p", "KING:\n" * 120, "-m", -1, *sampled).summary
        assert summary["prompt_tokens"] + summary["tokens"] <= 512

    def test_output_follows_links_and_writes_to_pipes(self, command, tmp_path):
        (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
        (tmp_path / "target.json").write_text("before")
        command("generate", "-m", 3, "--summary", tmp_path / "link.json", "--trace", "/dev/null")
        assert (tmp_path / "link.json").is_symlink()
        assert read_json(tmp_path / "target.json")["tokens"] == 3
        assert Path("/dev/null").is_char_device()

    def test_tinted_output_equals_plain_output(self, monkeypatch):
        written = io.StringIO()
        monkeypatch.setattr(sys, "stdout", written)
        monkeypatch.setenv("FORCE_COLOR", "1")
        TintedText(["low", "high"]).write("a\tb\r\n\x0c[bold]c", "low")
        assert "a\tb\r\n\x0c[bold]c" in written.getvalue()


@pytest.mark.slow
def test_analyze_writes_trace_summary_and_pictures(command, tmp_path):
    prompts, four_bit = tmp_path / "prompts.txt", tmp_path / "demo-4bit"
    mlx_lm.convert(str(DEMO_MODEL), str(four_bit), quantize=True, q_bits=4, q_group_size=64)
    prompts.write_text("Once upon a time\n\nTom has 3 apples.\n")
    flags = "--reference", DEMO_MODEL, "--tokens", 100
    result = command("analyze", "--model", four_bit, "--prompts", prompts, "--out", tmp_path / "out", "-m", 20, *flags)
    assert result.status == 0
    out = tmp_path / "out"
    summary, trace = read_json(out / "summary.json"), read_trace(out / "trace.jsonl")
    assert summary.keys() >= SUMMARY_FIELDS
    assert (summary["mode"], summary["prompts"]) == ("telemetry-only", 2)
    assert summary["unmanaged_layers"] == 43  # as generate counts them, the tied output head among them
    assert {entry["prompt"] for entry in trace} == {0, 1}
    assert len(trace) == summary["tokens"]
    agreement = summary["agreement"]
    assert (agreement["source"], agreement["bits"], agreement["tokens"]) == ("measured", [4, 16], 100)
    assert sum(each["tokens"] for each in agreement["entropy"]) == 100
    assert agreement["sentence"] in " ".join(result.err.split())
    for name in ("entropy_trace", "entropy_histogram", "gear_shares", "agreement"):
        picture = (out / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000
        assert str(out / f"{name}.png") in result.out


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"temperature": 1}, "temperature: no such setting"),
        ({"num_prompts": 0}, "--num-prompts: out of range, got 0; use 1 or more"),
        ({"shares": "nan,1"}, "shares: must be parts of 1"),
        ({"shares": "0.5,0.5"}, "--shares: must be 3 parts, got 0.5,0.5"),
        ({"method": "median"}, "method: no such setting"),
        ({"out": ""}, "--out: empty"),
    ],
)
def test_mistakes_of_a_program(keywords, words):
    with pytest.raises(GearbxError, match=re.escape(words)):
        calibrate(**keywords)


class TestThresholds:
    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({}, ""),
            ({"fingerprint": "another"}, "made for a different model (other)"),
            ({"gears": [3, 8, 16]}, "made for gears 3,8,16, not 4,8,16"),
        ],
    )
    def test_other_model_or_ladder_is_used_with_warning(self, command, tmp_path, changes, word):
        content = {"schema": "gearbx-mlx thresholds", "version": 1, "thresholds": [1.0, 2.0], "vocab_size": 4096}
        content |= {"model": "other", "method": "x", "gears": [4, 8, 16], "tokens": 1}
        content |= {"window": 3, "hysteresis": 0.1, "min_gear_duration": 4}
        (tmp_path / "t.json").write_text(json.dumps(content | changes))
        done = command("generate", "-m", 3, "--thresholds", tmp_path / "t.json")
        assert done.status == 0
        assert ("thresholds made for" in done.err) == bool(word)
        assert word in done.err

    def test_calibrate_output_belongs_to_its_model(self, command, tmp_path):
        assert command("calibrate", "-m", 6, "--out", tmp_path / "t.json").status == 0
        written = ThresholdFile(**json.loads((tmp_path / "t.json").read_text()))
        with pytest.warns(GearbxWarning, match="made for a different model"):
            thresholds_of_file(written, written.gears, written.vocab_size, "another")
