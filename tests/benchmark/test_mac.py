"""benchmark mac with a tiny random model on a CPU: what it writes, compares, refuses and keeps. Nothing of speed."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import mlx.core as mx
import mlx_lm
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx.benchmark import mac as subject
from gearbx_mlx.benchmark import mac_report as page
from gearbx_mlx.benchmark.measuring import counting_reads
from gearbx_mlx.kernels import metal

pytestmark = pytest.mark.usefixtures("compiled")

WAYS = list(page.SHORT)
TURN = len(WAYS) + 1  # outputs: mlx-lm writes two


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory) -> Path:
    """A random model of bfloat16 with the demo model's tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(tiny_model(dtype=mx.bfloat16, vocab_size=4096, max_position_embeddings=512), directory)
    return directory


@pytest.fixture
def bench(command, monkeypatch, tmp_path, tiny_directory):
    """The command with the tiny model, in a directory of its own, with short texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "WARM_UP", 2)
    return lambda *flags: command("benchmark", "mac", "--model", tiny_directory, "--tokens", 6, *flags)


def written() -> dict:
    return json.loads(Path("mac.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_one_page_and_one_file(bench, tiny_directory):
    done = bench()
    assert done.status == 0, done.out + done.err
    report = written()
    assert report["complete"]
    assert report["failed"] == report["left_out"] == {}
    assert {row["method"] for row in report["methods"]} == {*WAYS}
    assert {(text["series"], text["prompt"]) for text in report["outputs"]} == {(0, name) for name in subject.PROMPTS}
    for name in subject.PROMPTS:
        methods = [text["method"] for text in report["outputs"] if text["prompt"] == name]
        assert methods[0] == methods[-1] == page.MLX_LM
        assert len(methods) == TURN
    rows = {row["method"]: row for row in report["methods"]}
    alone = rows[page.MLX_LM]
    assert (alone["tokens_a_round"], alone["reads_a_round"]) == (1.0, 1.0)
    assert (alone["same"], alone["agreed"]) == (6, 6)
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["spread"][0] <= row["ratio"] <= row["spread"][1]
        assert 0 <= row["host_share"] <= 1
        assert 0 <= row["queue_share"] <= 1
        assert row["first_seconds"] > 0
    own = sum(array.nbytes for array in mx.load(str(tiny_directory / "model.safetensors")).values())
    assert own <= alone["memory_bytes"]
    lines = done.out.splitlines()
    assert [way for way in WAYS if f"| {way} " not in done.out] == []
    assert report["facts"]["machine"] in lines[0]
    assert report["line"] in lines
    assert lines[-1] == report["headline"]
    assert "the figures do not apply to a GPU" in done.err
    assert f"{3 * TURN * 6:,} forward passes" in " ".join(done.err.split())
    assert re.search(r"about \S+ minutes at mlx-lm's speed", " ".join(done.err.split()))
    address = urlsplit(next(line for line in lines if "/issues/new" in line).split()[-1])
    issue = parse_qs(address.query)
    assert report["headline"] in issue["title"][0]
    assert report["line"] in issue["body"][0]


def test_text_of_methods_reaches_a_terminal(capsys):
    with subject.pseudo_terminal():
        assert sys.stdout.isatty()
        print("x" * 100_000, flush=True)  # more than a terminal holds unread
    assert capsys.readouterr().out == ""


def test_long_prompt_fits_a_small_context(tiny_directory):
    loaded = subject.load_as_mlx_lm(str(tiny_directory))
    tokens = loaded.tokenizer.encode(subject.prompts_for(loaded)["long"])
    assert 200 < len(tokens) < 300  # half of 512


@pytest.mark.slow
def test_full_adds_fixed_drafts_and_draft_models(bench, tiny_directory):
    assert bench("--full").status == 0
    rows = {row["method"]: row for row in written()["methods"]}
    assert {*rows} == {*page.ORDER}
    assert rows[page.MLX_LM]["memory_bytes"] < rows[page.BY_DRAFT_MODEL[2]]["memory_bytes"]


def text(way: str, seconds: float, series: int = 0, **change: object) -> page.MacOutput:
    plain = {"tokens": 11, "first_seconds": 0.5, "rounds": 10, "reads": 10, "waited": seconds / 2, "memory": 100}
    return page.MacOutput(series=series, prompt="prose", method=way, seconds=seconds, **(plain | change))


def report_of(*texts: page.MacOutput) -> page.MacReport:
    facts = page.MacFacts("a Mac", "1", "2", "3", "a model", "00", 11)
    device = {"device_name": "Apple M4 Pro"}
    report = page.MacReport(facts, "2026-11-28", "bfloat16", 2**34, device, outputs=list(texts))
    page.summarise(report)
    return report


def test_variant_is_compared_within_same_turn():
    texts = [text(page.MLX_LM, 1.0)]
    texts += [text(page.DEFAULT, 0.5, rounds=4, reads=5, waited=0.1, same=True, agreed=11)]
    texts += [text(page.MLX_LM, 4.0, 1), text(page.DEFAULT, 2.5, 1, rounds=6, reads=6, waited=0.2, agreed=3)]
    alone, row = report_of(*texts).methods
    assert row["spread"] == [1.6, 2.0]
    assert row["ratio"] == pytest.approx(1.8)
    assert row["tokens_a_round"] == 2.0
    assert row["reads_a_round"] == 1.1
    assert row["host_share"] == pytest.approx(0.9)
    assert (row["same"], row["outputs"], row["agreed"]) == (1, 2, 3)
    assert page.shown_row(row)["identical"] == "1 of 2, else 3+ tokens"
    assert alone["host_share"] == 0.5


def test_expected_seconds_of_a_series():
    one = text(page.MLX_LM, 2.0)  # the first token after 0.5 s, 10 more in 2 s
    assert subject.expected_seconds(one, 36, 201) == pytest.approx(36 * (0.5 + 40))


def test_baseline_is_mlx_lm_before_and_after():
    default = text(page.DEFAULT, 1.0, same=True)
    rows = {row["method"]: row for row in report_of(text(page.MLX_LM, 1.0), default, text(page.MLX_LM, 2.0)).methods}
    assert rows[page.DEFAULT]["ratio"] == pytest.approx(10 / 7.5)  # it slowed down from 10 to 5 tokens/s
    assert rows[page.MLX_LM]["spread"] == pytest.approx([5 / 7.5, 10 / 7.5])


def test_headline_and_line_follow_from_the_figures():
    report = report_of(
        text(page.MLX_LM, 1.0),
        text(page.DEFAULT, 0.8, same=True),
        text(page.FIXED[1], 0.9),
        text(page.FIXED[3], 0.7),
        text(page.BY_DRAFT_MODEL[2], 1.25),
        text(page.ONE_GEAR[8], 0.625),
        text(page.LOOKUP_GEAR, 0.5),
    )
    assert report.headline == "1.25× mlx-lm's speed on Apple M4 Pro, same text in 1 of 1"
    line = "default 1.25 | draft length 1:1.11 3:1.43 | draft model 2:0.80 | bits 8:1.60 4 with lookup:2.00"
    assert line in report.line
    assert report_of(text(page.MLX_LM, 1.0)).headline == ""


def test_reads_are_counted_once_with_waiting_time():
    array = mx.arange(4)
    with counting_reads() as reads:
        mx.eval(array + 1)
        (array + 2).tolist()
        assert (array[0] + 3).item() == 3
        len([1, 2])
    assert reads.count == 3
    assert reads.seconds > 0
    (array + 4).tolist()
    assert reads.count == 3


@pytest.mark.slow
class TestInterrupted:
    """Ctrl-C keeps what was measured, and the same command goes on there."""

    @pytest.fixture
    def interrupted(self, bench, monkeypatch):
        """Write some texts and interrupt."""
        timed, count = subject.timed_output, []

        def until(*arguments):
            count.append(arguments)
            if len(count) == len(WAYS) + TURN + 3:  # warmed up, a turn, and two of the next
                raise KeyboardInterrupt
            return timed(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(subject, "timed_output", until)
            return bench()

    def test_completed_measurements_are_kept(self, interrupted):
        assert interrupted.status == 130
        report = written()
        assert not report["complete"]
        assert len(report["outputs"]) == TURN + 2
        assert {row["method"]: row["outputs"] for row in report["methods"]}[page.MLX_LM] == 3
        assert f"| {page.MLX_LM} " in interrupted.out
        assert "interrupted" in report["line"]

    def test_resumes_with_whole_turns(self, interrupted, bench):
        first = written()["outputs"][:TURN]
        done = bench()
        assert f"resumes after {TURN + 2} outputs" in done.err
        report = written()
        assert report["complete"]
        assert report["outputs"][:TURN] == first
        assert len(report["outputs"]) == 3 * TURN

    def test_file_of_another_machine_is_ignored(self, interrupted, bench):
        report = written()
        report["facts"]["machine"] = "another Mac"
        Path("mac.json").write_text(json.dumps(report))
        done = bench()
        assert "mac.json: measured with machine another Mac, got " in " ".join(done.err.split())
        assert len(written()["outputs"]) == 3 * TURN

    def test_file_of_other_kind_is_ignored(self, bench):
        Path("mac.json").write_text('{"rows": []}')
        done = bench()
        assert done.status == 0
        assert "mac.json" in done.err
        assert "it is ignored and replaced" in done.err


@pytest.mark.slow
def test_failed_variant_is_named_and_others_run(bench, monkeypatch):
    whole = subject.by_mlx_lm

    def broken(*arguments, **how):
        if how:
            raise ValueError("Speculative decoding requires\na trimmable prompt cache")
        yield from whole(*arguments)

    monkeypatch.setattr(subject, "by_mlx_lm", broken)
    done = bench("--full")
    assert done.status == 1
    assert {*written()["failed"]} == {*page.BY_DRAFT_MODEL.values()}
    name = page.BY_DRAFT_MODEL[2]
    assert f"failed: {name}: Speculative decoding requires a trimmable prompt cache" in done.out
    assert [row["method"] for row in written()["methods"]] == [
        way for way in page.ORDER if way not in written()["failed"]
    ]


@pytest.mark.slow
def test_variants_beyond_memory_are_skipped(bench, monkeypatch, tiny_directory):
    size = sum(array.nbytes for array in mx.load(str(tiny_directory / "model.safetensors")).values())
    monkeypatch.setattr(subject, "most_memory", lambda: size)
    done = bench()
    assert done.status == 0, done.err
    assert {*written()["left_out"]} == {page.ONE_GEAR[4], page.LOOKUP_GEAR, page.ONE_GEAR[8]}
    assert "left out: gearbx-mlx, 8-bit gear: it needs" in done.out


class TestRefused:
    """Bad input is one line and status 2, before a text is written."""

    def refused(self, done: SimpleNamespace) -> str:
        assert done.status == 2
        assert done.out == ""
        assert not Path("mac.json").exists()
        return done.err.splitlines()[-1]

    @pytest.mark.skipif(metal.available(), reason="Metal is here")
    def test_own_kernels_without_metal(self, bench):
        assert "Metal" in self.refused(bench("--own-kernels"))

    def test_too_large_model(self, bench, monkeypatch):
        monkeypatch.setattr(subject, "most_memory", lambda: 1000)
        assert re.search(
            "too large for the 1 kB for weights here, got about .* MB; use a smaller", self.refused(bench())
        )

    def test_model_beyond_recommended_memory(self, bench, monkeypatch):
        monkeypatch.setattr(metal, "available", lambda: True)
        info = {"max_recommended_working_set_size": 100_000, "memory_size": 8 * 10**9}
        monkeypatch.setattr(mx, "device_info", lambda: info)
        assert re.search(r"about .* exceed the 100 kB recommended for this GPU; use ", self.refused(bench()))

    def test_a_4_bit_model(self, command, tmp_path, tiny_directory):
        mlx_lm.convert(str(tiny_directory), str(tmp_path / "4bit"), quantize=True, q_bits=4)
        assert "use the original" in self.refused(command("benchmark", "mac", "--model", tmp_path / "4bit"))

    def test_a_quantized_model(self, bench, command, succeeds, tmp_path):
        succeeds("convert", "--mlx-path", tmp_path / "geared", "--gears", "4,8")
        assert "use the original" in self.refused(command("benchmark", "mac", "--model", tmp_path / "geared"))

    def test_a_hub_name_without_a_network(self, command, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        name = "mlx-community/no-such-model"
        assert name in self.refused(command("benchmark", "mac", "--model", name))
