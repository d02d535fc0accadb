"""The command, its bundled prompts, and the head that ships with the demo model."""

import itertools
import json
import time
from types import SimpleNamespace

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model
from safetensors.numpy import load_file

from gearbx_mlx.draft_head.prompts import COUNT, bundled_prompts, crossed, sources

FEW = ("--num-prompts", 25, "-m", 8, "--draft-vocab-size", 64, "--intermediate-size", 32, "--minutes")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Each look at the clock takes a second, so that training for three seconds is three steps."""
    seconds = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    for name in ("run", "answers"):
        monkeypatch.setattr(f"gearbx_mlx.draft_head.{name}.time", fake)


def test_bundled_prompts_are_different_and_of_all_kinds():
    prompts = bundled_prompts()
    assert len(prompts) == len({*prompts}) == COUNT
    first = prompts[:100]
    for kind, source in sources().items():
        own = {*itertools.islice(source, 100)}
        assert len(own.intersection(first)) >= 10, kind
    assert not any("{" in prompt for prompt in prompts)


def test_templates_meet_each_topic_once():
    made = [*crossed(("{} a", "{} b"), ("x", "y", "z", "w"))]
    assert sorted(made) == sorted(f"{topic} {letter}" for topic in "xyzw" for letter in "ab")


def test_more_minutes_continue_the_same_head(command, tmp_path):
    out = tmp_path / "head"
    done = command("draft_head", "--out", out, *FEW, 0.1)
    assert done.status == 0, done.err
    assert "correct at positions 1 to 3" in done.out
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 64
    assert steps_of(out) == 3

    again = command("draft_head", "--out", out, *FEW, 0.1)
    assert again.status == 2
    assert "use more --minutes" in again.err
    assert command("draft_head", "--out", out, *FEW, 0.3).status == 0
    assert steps_of(out) == 9


def names_in(out) -> set[str]:
    return {path.name for path in out.rglob("*") if path.is_file()}


def steps_of(out) -> int:
    return int(load_file(out / "training" / "state.safetensors")["optimizer step "])


def test_interrupted_training_continues_with_its_answers(command, tmp_path, monkeypatch):
    out = tmp_path / "head"

    def interrupted(self, progress):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gearbx_mlx.draft_head.training.Trainer.train_step", interrupted)
        stopped = command("draft_head", "--out", out, *FEW, 0.1)
    assert stopped.status == 130
    assert "has no head yet" in stopped.err
    assert names_in(out) == {"answers.journal"}
    other = command("draft_head", "--out", out, *FEW, 0.1, "--max-tokens", 9)
    assert other.status == 2
    assert "with max_tokens 8, and now it is 9" in other.err
    before = (out / "training" / "answers.journal").read_bytes()
    assert command("draft_head", "--out", out, *FEW, 0.1).status == 0
    assert (out / "training" / "answers.journal").read_bytes() == before


def test_full_disk_leaves_no_part_of_a_head(command, tmp_path, monkeypatch):
    def full(*arguments):
        raise RuntimeError("[save_safetensors] No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    failed = command("draft_head", "--out", tmp_path / "head", *FEW, 0.1)
    assert failed.status == 2
    assert "cannot be written" in failed.err
    assert names_in(tmp_path / "head") == {"answers.journal"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data", "EMPTY"), "no prompt"),
        (("--data", "missing.txt"), "missing.txt"),
        (("--num-attention-heads", 3), "--num-attention-heads: must divide the model's 4, got 3"),
        (("--out", "EMPTY"), "is a file"),
        (("--minutes", 0), "--minutes: out of range"),
        (("--num-prompts", 3), "--num-prompts: out of range"),
        (("--model", "OTHER"), "is not like a Llama"),
    ],
)
def test_bad_input_is_one_line(command, tmp_path, flags, words):
    (tmp_path / "empty").touch()
    if "OTHER" in flags:
        save_model(tiny_model("gpt_neox"), tmp_path / "other")
    places = {"EMPTY": tmp_path / "empty", "OTHER": tmp_path / "other"}
    failed = command("draft_head", "--out", tmp_path / "out", *(places.get(flag, flag) for flag in flags))
    assert failed.status == 2
    assert words in failed.err
    assert len(failed.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_one_line(command, tmp_path, monkeypatch):
    monkeypatch.setattr("gearbx_mlx.draft_head.run.available_memory", lambda: 1000)
    failed = command("draft_head", "--out", tmp_path / "out")
    assert failed.status == 2
    assert "beside the model, got 1 kB" in failed.err
