"""benchmark mac with a tiny random model on a CPU: what it writes, compares, refuses and keeps. Nothing of speed."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model

from gearbx_mlx.benchmark import mac as subject
from gearbx_mlx.benchmark.measuring import counting_reads
from gearbx_mlx.kernels import metal

pytestmark = pytest.mark.usefixtures("compiled")

WAYS = list(subject.ORDER)
SHORT = ["--tokens", 6, "--minutes", 0]


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
    return lambda *flags: command("benchmark", "mac", "--model", tiny_directory, *SHORT, *flags)


def written() -> dict:
    return json.loads(Path("mac.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_one_page_and_one_file(bench, tiny_directory):
    done = bench()
    assert done.status == 0, done.out + done.err
    report = written()
    assert report["complete"]
    assert report["failed"] == report["left_out"] == {}
    assert [row["method"] for row in report["methods"]] == WAYS
    assert {(text["series"], text["prompt"]) for text in report["outputs"]} == {(0, name) for name in subject.PROMPTS}
    rows = {row["method"]: row for row in report["methods"]}
    alone = rows[subject.MLX_LM]
    assert (alone["ratio"], alone["spread"], alone["tokens_a_round"]) == (1.0, [1.0, 1.0], 1.0)
    assert alone["reads_a_round"] == 1.0
    assert (alone["same"], alone["agreed"]) == (3, 6)
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["spread"][0] <= row["ratio"] <= row["spread"][1]
        assert 0 <= row["host_share"] <= 1
        assert row["first_seconds"] > 0
    own = sum(array.nbytes for array in mx.load(str(tiny_directory / "model.safetensors")).values())
    assert own <= alone["memory_bytes"] < rows[subject.BY_DRAFT_MODEL[2]]["memory_bytes"]
    assert rows[subject.ONE_GEAR[4]]["memory_bytes"] < rows[subject.ONE_GEAR[8]]["memory_bytes"]
    lines = done.out.splitlines()
    assert [way for way in WAYS if f"| {way} " not in done.out] == []
    assert report["facts"]["machine"] in lines[0]
    assert lines[-1] == report["line"]
    assert len(report["verdict"]) == 3
    assert " ".join(report["verdict"]) in done.out
    assert "the figures do not apply to a GPU" in done.err
    assert f"{3 * len(WAYS) * 6:,} forward passes" in " ".join(done.err.split())
    assert re.search(r"about \S+ minutes at mlx-lm's speed", " ".join(done.err.split()))


def text(way: str, seconds: float, series: int = 0, **change: object) -> subject.MacOutput:
    plain = {"tokens": 11, "first_seconds": 0.5, "rounds": 10, "reads": 10, "waited": seconds / 2, "memory": 100}
    return subject.MacOutput(series=series, prompt="prose", method=way, seconds=seconds, **(plain | change))


def report_of(*texts: subject.MacOutput) -> subject.MacReport:
    facts = subject.MacFacts("a Mac", "1", "2", "3", "a model", "00", 11)
    report = subject.MacReport(facts, "2026-11-28", "bfloat16", 2**34, {}, outputs=list(texts))
    subject.summarise(report)
    return report


def test_variant_is_compared_within_same_turn():
    texts = [text(subject.MLX_LM, 1.0)]
    texts += [text(subject.DEFAULT, 0.5, rounds=4, reads=5, waited=0.1, same=True, agreed=11)]
    texts += [text(subject.MLX_LM, 4.0, 1), text(subject.DEFAULT, 2.5, 1, rounds=6, reads=6, waited=0.2, agreed=3)]
    alone, row = report_of(*texts).methods
    assert row["spread"] == [1.6, 2.0]
    assert row["ratio"] == pytest.approx(1.8)
    assert row["tokens_a_round"] == 2.0
    assert row["reads_a_round"] == 1.1
    assert row["host_share"] == pytest.approx(0.9)
    assert (row["same"], row["outputs"], row["agreed"]) == (1, 2, 3)
    assert subject.shown_row(row)["identical"] == "1 of 2, else 3+ tokens"
    assert alone["host_share"] == 0.5


def test_expected_seconds_of_a_series():
    one = text(subject.MLX_LM, 2.0)  # the first token after 0.5 s, 10 more in 2 s
    assert subject.expected_seconds(one, 36, 201) == pytest.approx(36 * (0.5 + 40))


@pytest.mark.parametrize(("seconds", "word"), [(0.8, "faster than"), (1.0, "as fast as"), (1.1, "slower than")])
def test_the_verdict_follows_from_the_figures(seconds, word):
    report = report_of(
        text(subject.MLX_LM, 1.0),
        text(subject.DEFAULT, seconds, same=True),
        text(subject.FIXED[1], 0.9),
        text(subject.FIXED[3], 0.7),
        text(subject.BY_DRAFT_MODEL[2], 1.25),
        text(subject.ONE_GEAR[8], 0.625),
    )
    first, second, third = report.verdict
    assert f"By default, gearbx-mlx is {word} mlx-lm on a model: {1 / seconds:.2f}×" in first
    assert "1 of 1 outputs are identical" in first
    assert second == "The fastest fixed draft length is 3 for gearbx-mlx (1.43×) and 2 for mlx-lm (0.80×)."
    assert third == "Speedups of single gears, whose output differs: 8-bit 1.60×."
    assert f"default {1 / seconds:.2f} | draft length 1:1.11 3:1.43 | draft model 2:0.80 | bits 8:1.60" in report.line


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
            if len(count) == len(WAYS) + len(WAYS) + 3:  # warmed up, a turn, and two of the next
                raise KeyboardInterrupt
            return timed(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(subject, "timed_output", until)
            return bench()

    def test_completed_measurements_are_kept(self, interrupted):
        assert interrupted.status == 130
        report = written()
        assert not report["complete"]
        assert len(report["outputs"]) == len(WAYS) + 2
        assert [row["outputs"] for row in report["methods"]] == [2, 2] + [1] * (len(WAYS) - 2)
        assert f"| {subject.MLX_LM} " in interrupted.out
        assert "interrupted" in report["line"]

    def test_resumes_with_whole_turns(self, interrupted, bench):
        first = written()["outputs"][: len(WAYS)]
        done = bench()
        assert f"resumes after {len(WAYS) + 2} outputs" in done.err
        report = written()
        assert report["complete"]
        assert report["outputs"][: len(WAYS)] == first
        assert len(report["outputs"]) == 3 * len(WAYS)

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
    done = bench()
    assert done.status == 1
    assert {*written()["failed"]} == {*subject.BY_DRAFT_MODEL.values()}
    name = subject.BY_DRAFT_MODEL[2]
    assert f"failed: {name}: Speculative decoding requires a trimmable prompt cache" in done.out
    assert [row["method"] for row in written()["methods"]] == [way for way in WAYS if way not in written()["failed"]]


@pytest.mark.slow
def test_variants_beyond_memory_are_skipped(bench, monkeypatch, tiny_directory):
    size = sum(array.nbytes for array in mx.load(str(tiny_directory / "model.safetensors")).values())
    monkeypatch.setattr(subject, "most_memory", lambda: size)
    done = bench()
    assert done.status == 0, done.err
    assert {*written()["left_out"]} == {*subject.BY_DRAFT_MODEL.values(), *subject.ONE_GEAR.values()}
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

    def test_a_quantized_model(self, bench, command, succeeds, tmp_path):
        succeeds("convert", "--mlx-path", tmp_path / "geared", "--gears", "4,8")
        assert "use the original" in self.refused(command("benchmark", "mac", "--model", tmp_path / "geared"))

    def test_a_hub_name_without_a_network(self, command, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        name = "mlx-community/no-such-model"
        assert name in self.refused(command("benchmark", "mac", "--model", name))
