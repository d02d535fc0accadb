import io
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import save_model, tiny_model
from mlx_lm.generate import setup_arg_parser as mlx_lm_flags

from gearbx_mlx import GearbxError
from gearbx_mlx.analyze import analyze
from gearbx_mlx.calibrate import calibrate
from gearbx_mlx.cli import terminal
from gearbx_mlx.cli.flags import SamplingSettings
from gearbx_mlx.loading import DEMO_MODEL

SUMMARY_FIELDS = {
    "model",
    "mode",
    "ladder",
    "tokens",
    "tokens_per_second",
    "gear_tokens",
    "shifts",
    "shift_seconds",
    "making_seconds",
    "mean_entropy_bits",
    "effective_bits_per_weight",
    "weight_bytes_per_token",
    "weight_bytes_per_token_top",
    "peak_memory_bytes",
    "managed_layers",
    "unmanaged_layers",
}
TRACE_FIELDS = ["index", "token", "text", "entropy", "mean_entropy", "gear", "shifted"]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_trace(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory) -> Path:
    """The demo model as `mlx_lm.convert -q` makes it."""
    path = tmp_path_factory.mktemp("converted") / "demo-4bit"
    mlx_lm.convert(str(DEMO_MODEL), str(path), quantize=True, q_bits=4, q_group_size=64)
    return path


class TestFlags:
    def test_a_mistyped_one_gets_one_line_with_the_nearest(self, command):
        for name, typed, meant in (("generate", "--max-tokns", "--max-tokens"), ("server", "--prot=80", "--port")):
            done = command(name, typed)
            assert done.status == 2
            assert done.err.count("\n") == 1
            assert typed in done.err
            assert meant in done.err

    def test_help_shows_what_most_need_and_help_all_every_flag(self, command):
        few, every = (flags_in(command("generate", flag).out) for flag in ("--help", "--help-all"))
        assert len(few) <= 28  # 25, and those that print
        assert {"--model", "--prompt", "--max-tokens", "--gears", "--mode"} <= few < every
        assert {"--xtc-probability", "--draft-length"} <= every - few

    def test_sampling_is_mlx_lms_if_nothing_is_said(self):
        ours, theirs = vars(SamplingSettings()), vars(mlx_lm_flags().parse_args([]))
        assert ours == {name: theirs[name] for name in ours}

    def test_the_versions(self, command):
        done = command("generate", "--version")
        assert done.status == 0
        assert all(version(name) in done.out for name in ("gearbx-mlx", "mlx-lm", "mlx"))


def flags_in(text: str) -> set[str]:
    """The flags that a help text describes."""
    return set(re.findall(r"^  (?:-\w[^-]*, )?(--[\w-]+)", text, re.MULTILINE))


class TestGenerate:
    def test_writes_a_worked_text_trace_and_summary(self, command, tmp_path):
        result = command(
            "generate",
            "--mode",
            "route",
            "--max-tokens",
            60,
            "--summary",
            tmp_path / "s.json",
            "--trace",
            tmp_path / "t.jsonl",
        )
        assert result.status == 0
        summary, trace = read_json(tmp_path / "s.json"), read_trace(tmp_path / "t.jsonl")
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
        for words in ("tokens/s", "shifts", "effective bits", "weights read", "memory", "computed in"):
            assert words in result.err
        assert {path.name for path in tmp_path.iterdir()} == {"s.json", "t.jsonl"}

    @pytest.mark.slow
    def test_held_in_one_gear_writes_mlx_lms_text(self, command, demo):
        prompt = "Once upon a time"
        result = command("generate", "--gears", 16, "--ignore-chat-template", "-p", prompt, "-m", 30)
        assert result.out == mlx_lm.generate(demo.model, demo.tokenizer, prompt, max_tokens=30) + "\n"

    @pytest.mark.slow
    def test_the_chat_template_is_used_as_in_mlx_lm(self, command, demo):
        question = "Ann has 3 cats. How many legs do they have?"
        text = demo.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        result = command("generate", "--gears", 16, "-p", question, "-m", 30)
        assert result.out == mlx_lm.generate(demo.model, demo.tokenizer, text, max_tokens=30) + "\n"

    @pytest.mark.slow
    def test_plain_when_piped_and_tinted_on_demand(self, command, monkeypatch):
        plain = command("generate", "-m", 12)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLORTERM", "truecolor")
        tinted = command("generate", "-m", 12)
        assert "\x1b" not in plain.out
        assert "\x1b[38;2;" in tinted.out

    @pytest.mark.slow
    def test_a_quantized_checkpoint_can_be_watched_alone(self, command, four_bit, tmp_path):
        command("generate", "--model", four_bit, "-m", 30, "--summary", tmp_path / "s.json", "--mode", "telemetry-only")
        summary = read_json(tmp_path / "s.json")
        assert (summary["mode"], summary["managed_layers"], summary["shift_seconds"]) == ("telemetry-only", 0, 0.0)
        assert summary["effective_bits_per_weight"] == pytest.approx(4.5)
        assert summary["weight_bytes_per_token"] == summary["weight_bytes_per_token_top"]

    @pytest.mark.slow
    def test_telemetry_only_by_flag_changes_no_token(self, command, tmp_path):
        arguments = ("-m", 30, "--dtype", "bfloat16")
        plain = command("generate", "--gears", 16, *arguments)
        watched = command("generate", "--mode", "telemetry-only", "--summary", tmp_path / "s.json", *arguments)
        assert watched.out == plain.out
        assert read_json(tmp_path / "s.json")["mode"] == "telemetry-only"

    def test_not_verbose_is_the_text_alone(self, command):
        result = command("generate", "-m", 12, "--verbose", "False")
        assert result.err == ""
        assert result.out == command("generate", "-m", 12).out

    def test_prompt_from_standard_input(self, command, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time"))
        piped = command("generate", "-m", 8, "-p", "-").out
        assert piped == command("generate", "-m", 8, "-p", "Once upon a time").out

    def test_minus_one_ends_at_the_context(self, command, tmp_path):
        command(
            "generate",
            "--ignore-chat-template",
            "-p",
            "KING:\n" * 120,
            "-m",
            -1,
            "--temp",
            1,
            "--seed",
            0,
            "--summary",
            tmp_path / "s.json",
        )
        summary = read_json(tmp_path / "s.json")
        assert summary["prompt_tokens"] + summary["tokens"] <= 512

    @pytest.mark.slow
    def test_thresholds_from_numbers(self, command, tmp_path):
        command("generate", "-m", 20, "--thresholds", "0.001,0.002", "--gear", "high", "--summary", tmp_path / "a")
        command("generate", "-m", 20, "--thresholds", "11,11.5", "--gear", "low", "--summary", tmp_path / "b")
        assert read_json(tmp_path / "a")["gear_tokens"]["low"] <= 4
        assert read_json(tmp_path / "b")["gear_tokens"] == {"low": 20, "mid": 0, "high": 0}

    @pytest.mark.some(2)
    @pytest.mark.parametrize("residency", ["resident", "disk"])
    @pytest.mark.parametrize("format", ["planes", "affine", "rowwise"])
    def test_every_format_and_residency_runs(self, command, format, residency, tmp_path):
        result = command(
            "generate",
            "-m",
            25,
            "--format",
            format,
            "--residency",
            residency,
            "--thresholds",
            "1,2",
            "--summary",
            tmp_path / "s.json",
        )
        assert result.status == 0
        summary = read_json(tmp_path / "s.json")
        assert (summary["managed_layers"], summary["unmanaged_layers"]) == (43, 0)

    def test_layers_of_an_odd_width_are_named_in_the_summary(self, command, tmp_path):
        model = tiny_model("llama", intermediate_size=172)
        save_model(model, tmp_path / "odd")
        result = command(
            "generate",
            "--model",
            tmp_path / "odd",
            "--ignore-chat-template",
            "-p",
            "1",
            "-m",
            12,
            "--summary",
            tmp_path / "s",
        )
        summary = read_json(tmp_path / "s")
        assert (summary["managed_layers"], summary["unmanaged_layers"]) == (13, 2)
        assert "2: input width 172 is not a multiple of the group size 64" in result.err

    @pytest.mark.slow
    def test_a_prompt_cache_goes_on_where_it_ended_as_in_mlx_lm(self, command, demo, tmp_path):
        from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

        begun = demo.tokenizer.encode("Question: Tom has 5 apples. ")
        cache = make_prompt_cache(demo.model)
        demo.model(mx.array([begun]), cache=cache)
        save_prompt_cache(str(tmp_path / "c.safetensors"), cache, {"model": str(DEMO_MODEL), "tokenizer_config": "{}"})
        asked = "How many apples does he have?"
        result = command(
            "generate", "--prompt-cache-file", tmp_path / "c.safetensors", "--gears", 16, "-p", asked, "-m", 20
        )
        tokens = demo.tokenizer.encode(f"{asked}\nAnswer:", add_special_tokens=False)
        expected = mlx_lm.generate(demo.model, demo.tokenizer, tokens, max_tokens=20, prompt_cache=cache)
        assert result.out == expected + "\n"

    @pytest.mark.slow
    def test_settings_of_a_thresholds_file_are_used(self, command, tmp_path):
        command("calibrate", "--out", tmp_path / "t.json", "-m", 30, "--min-gear-duration", 1000)
        arguments = (
            "-m",
            40,
            "--gear",
            "low",
            "--thresholds",
            tmp_path / "t.json",
            "--summary",
            tmp_path / "s.json",
        )
        command("generate", *arguments)
        assert read_json(tmp_path / "s.json")["shifts"] == 0
        content = read_json(tmp_path / "t.json")
        (tmp_path / "t.json").write_text(json.dumps(content | {"min_gear_duration": 1}))
        command("generate", *arguments)
        assert read_json(tmp_path / "s.json")["shifts"] > 0

    def test_a_link_is_written_through_and_a_pipe_is_written_to(self, command, tmp_path):
        (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
        (tmp_path / "target.json").write_text("before")
        command("generate", "-m", 3, "--summary", tmp_path / "link.json", "--trace", "/dev/null")
        assert (tmp_path / "link.json").is_symlink()
        assert read_json(tmp_path / "target.json")["tokens"] == 3
        assert Path("/dev/null").is_char_device()

    def test_a_file_beside_the_output_is_left_alone(self, command, tmp_path):
        (tmp_path / "s.json.part").write_text("mine")
        command("generate", "-m", 3, "--summary", tmp_path / "s.json")
        assert (tmp_path / "s.json.part").read_text() == "mine"

    def test_tinted_text_is_the_text(self, command, monkeypatch):
        from gearbx_mlx.cli.terminal import TintedText

        written = io.StringIO()
        monkeypatch.setattr(sys, "stdout", written)
        monkeypatch.setenv("FORCE_COLOR", "1")
        TintedText(["low", "high"]).write("a\tb\r\n\x0c[bold]c", "low")
        assert "a\tb\r\n\x0c[bold]c" in written.getvalue()


class TestCalibrateAndAnalyze:
    @pytest.mark.slow
    def test_thresholds_go_from_calibrate_to_generate(self, command, tmp_path):
        file = tmp_path / "thresholds.json"
        result = command("calibrate", "--out", file, "-m", 40)
        assert result.status == 0
        content = read_json(file)
        assert (content["method"], content["vocab_size"], content["gears"]) == ("share", 4096, [4, 8, 16])
        assert content["thresholds"] == sorted(content["thresholds"])
        assert sum(content["shares"]) == pytest.approx(1)
        assert command("generate", "-m", 10, "--thresholds", file).status == 0

    @pytest.mark.slow
    def test_a_wanted_share_is_reached_in_telemetry(self, command, held_out, tmp_path):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"question": row["question"]}) for row in held_out[:6]))
        command("calibrate", "--prompts", prompts, "--shares", "0.5,0.3,0.2", "--out", tmp_path / "t.json", "-m", 60)
        command(
            "analyze",
            "--prompts",
            prompts,
            "-m",
            60,
            "--thresholds",
            tmp_path / "t.json",
            "--out",
            tmp_path / "out",
            "--gear",
            "low",
        )
        summary = read_json(tmp_path / "out" / "summary.json")
        shares = [count / summary["tokens"] for count in summary["gear_tokens"].values()]
        assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.08)

    @pytest.mark.slow
    def test_analyze_writes_trace_summary_and_pictures(self, command, four_bit, tmp_path):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("Once upon a time\n\nTom has 3 apples.\n")
        result = command("analyze", "--model", four_bit, "--prompts", prompts, "--out", tmp_path / "out", "-m", 20)
        assert result.status == 0
        summary, trace = read_json(tmp_path / "out" / "summary.json"), read_trace(tmp_path / "out" / "trace.jsonl")
        assert summary.keys() >= SUMMARY_FIELDS
        assert (summary["mode"], summary["prompts"]) == ("telemetry-only", 2)
        assert summary["unmanaged_layers"] == 43  # as generate counts them, the tied output head among them
        assert {entry["prompt"] for entry in trace} == {0, 1}
        assert len(trace) == summary["tokens"]
        for name in ("entropy_trace", "entropy_histogram", "gear_shares"):
            picture = (tmp_path / "out" / f"{name}.png").read_bytes()
            assert picture.startswith(b"\x89PNG")
            assert len(picture) > 5000
            assert str(tmp_path / "out" / f"{name}.png") in result.out

    @pytest.mark.slow
    def test_a_log_says_how_far_they_are(self, command, tmp_path, monkeypatch):
        monkeypatch.setattr(terminal, "SHORT", 0)
        monkeypatch.setattr(terminal, "BETWEEN_LINES", 0)
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("Once upon a time\n\nTom has 3 apples.\n")
        flags = "--prompts", prompts, "-m", 8, "--gears", "4,16"
        analyzed = command("analyze", *flags, "--out", tmp_path / "out")
        routed = command("calibrate", *flags, "--out", tmp_path / "t.json")
        assert "prompts: 2 of 2" in analyzed.err
        assert "prompts: 2 of 2" in routed.err


class TestFromAProgram:
    @pytest.mark.slow
    def test_analyze_returns_the_summary_and_prints_nothing(self, tmp_path, capsys):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("Once upon a time\nTom has 3 apples.\n")
        summary = analyze(prompts, out=tmp_path / "out", num_prompts=1, max_tokens=8, gears="4,16")
        assert capsys.readouterr().out == ""
        assert summary == read_json(tmp_path / "out" / "summary.json")
        assert (summary["prompts"], list(summary["gear_tokens"])) == (1, ["low", "high"])

    @pytest.mark.slow
    def test_calibrate_returns_a_file_and_writes_it_where_that_is_asked_for(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        found = calibrate(gears="4,16", max_tokens=20, window=2)
        assert (found.gears, found.window, len(found.thresholds)) == ([4, 16], 2, 1)
        assert not list(tmp_path.iterdir())
        found = calibrate(mode="kickdown", gears="4,16", max_tokens=20, out="t.json")
        assert read_json(tmp_path / "t.json")["thresholds"] == found.thresholds
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("keywords", "words"),
        [
            ({"temperature": 1}, "no setting 'temperature'"),
            ({"num_prompts": 0}, "--num-prompts is 0; give 1 or more"),
            ({"shares": "nan,1"}, "shares must be parts of 1"),
            ({"shares": "0.5,0.5"}, "give 3 parts"),
            ({"target_kl": 1.0}, "--target-kl is gone since gearbx-mlx "),
            ({"method": "median"}, "no setting 'method'"),
            ({"out": ""}, "--out is empty"),
        ],
    )
    def test_mistakes(self, keywords, words):
        with pytest.raises(GearbxError, match=re.escape(words)):
            calibrate(**keywords)

    def test_analyze_has_no_settings_of_a_gearbox(self, tmp_path):
        with pytest.raises(GearbxError, match="no setting 'format'"):
            analyze(tmp_path / "p.txt", format="planes")
