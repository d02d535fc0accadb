"""Long commands continue where they stopped, after an interrupt, a kill or a full disk, and give the same result."""

import contextlib
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import save_model, tiny_model
from test_bad_input import assert_refused

from gearbx_mlx import GearbxError
from gearbx_mlx.evaluation import pair, session
from gearbx_mlx.evaluation.pair import PairRecording
from gearbx_mlx.evaluation.session import Journal, beside
from gearbx_mlx.files.writing import replacing

HELD_OUT = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"
SMALL = "small"  # stands for the path of a small model
MODEL = ("--model", SMALL)
GEARS = (*MODEL, "--q-group-size", 32, "--gears", "4,16")
NUMBERS = ("evaluate", "--data", HELD_OUT, "--task", "gsm8k", "--num-problems", 3)
PAIR = (*MODEL, "--small-model", SMALL, "--thresholds", "5")
COMMANDS = {
    "route": ("calibrate", *MODEL, "-m", 8),
    "kickdown": ("calibrate", *GEARS, "--mode", "kickdown", "-m", 8),
    "text": ("evaluate", *GEARS, "--data", HELD_OUT, "--tokens", 24, "--context", 8, "--policy", "lossless"),
    "text of a pair": ("evaluate", *PAIR, "--data", HELD_OUT, "--tokens", 40, "--context", 8),
    "final numbers": (*NUMBERS, *GEARS, "-m", 6),
    "final numbers of a pair": (*NUMBERS, *PAIR, "-m", 24),
    "sensitivity": (
        *("sensitivity", *MODEL, "--num-samples", 1, "--sequence-length", 16, "--bits", "4,8", "--q-group-size", 32),
    ),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> dict[str, list]:
    """The commands, with the path of the small model."""
    path = tmp_path_factory.mktemp("models") / "small"
    save_model(tiny_model(seed=1, vocab_size=4096), path)
    return {name: [path if flag == SMALL else flag for flag in flags] for name, flags in COMMANDS.items()}


@contextlib.contextmanager
def parts_added(monkeypatch, most: float = float("inf")):
    """The names of the parts and files that are kept; an interrupt keeps their number within the limit."""
    add, added = Journal.add, []

    def count(name):
        if len(added) == most:
            raise KeyboardInterrupt
        added.append(name)

    def counted_part(self, part, found):
        count(part)
        add(self, part, found)

    @contextlib.contextmanager
    def counted_file(path):
        with replacing(path) as place:
            yield place
            count(path.name)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", counted_part)
        patch.setattr(session, "replacing", counted_file)
        yield added


@contextlib.contextmanager
def files_of_at_most(size: int):
    """A file that grows further fails as on a full disk: bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def written(out: Path) -> bytes:
    """The output of a command: a file, or the data of a report."""
    return (out / "evaluation.json").read_bytes() if out.is_dir() else out.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "text"])
def test_an_interrupted_command_goes_on_to_the_same_result(command, flags, tmp_path, monkeypatch, name):
    once, out = tmp_path / "once", tmp_path / "out"
    with parts_added(monkeypatch) as all_parts:
        assert command(*flags[name], "--out", once).status == 0
    done = 2 * len(all_parts) // 5
    with parts_added(monkeypatch, done) as before:
        assert command(*flags[name], "--out", out).status == 130
    with parts_added(monkeypatch) as after:
        assert command(*flags[name], "--out", out).status == 0
    assert done > 0
    assert before + after == all_parts
    assert written(out) == written(once)
    assert {path.name for path in tmp_path.iterdir()} == {"once", "out"}


@pytest.mark.slow
def test_an_evaluation_that_is_interrupted_after_each_recording_reports_what_it_has(
    command, flags, tmp_path, monkeypatch
):
    once, out = tmp_path / "once", tmp_path / "out"
    text = (*flags["text"], "--share", 0.5)
    with parts_added(monkeypatch) as all_parts:
        assert command(*text, "--out", once).status == 0
    assert all_parts[:3] == ["reference.npy", "static-4.npz", "static-16.npz"]
    for done in range(1, len(all_parts)):
        with parts_added(monkeypatch, 1):
            assert command(*text, "--out", out).status == 130
        if done > 1:  # a recording besides the reference
            assert not json.loads(written(out))["complete"]
    assert command(*text, "--out", out).status == 0
    assert written(out) == written(once)


@pytest.mark.processes
def test_a_killed_command_goes_on_to_the_same_result(command, flags, tmp_path):
    name, *more = flags["final numbers"]
    assert command(name, *more, "--out", tmp_path / "once").status == 0
    code = "import itertools, os, signal; from gearbx_mlx.evaluation.session import Journal; "
    code += "from gearbx_mlx.evaluate import main; fsync, count = os.fsync, itertools.count(); "
    code += "os.fsync = lambda file: next(count) == 5 and os.kill(os.getpid(), signal.SIGKILL) or fsync(file); "
    code += "main()"
    killed = subprocess.run([sys.executable, "-c", code, *map(str, more), "--device", "cpu", "--out", tmp_path / "out"])
    assert killed.returncode == -signal.SIGKILL
    assert command(name, *more, "--out", tmp_path / "out").status == 0
    assert written(tmp_path / "out") == written(tmp_path / "once")


def test_other_prompts_or_lengths_do_not_go_on(command, flags, tmp_path, monkeypatch):
    out, prompts = tmp_path / "t.json", tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nTwo and two are\n")
    route = (*flags["route"], "--prompts", prompts, "--out", out)
    with parts_added(monkeypatch, 1):
        assert command(*route, "-m", 4).status == 130
    kept = (tmp_path / "t.json.journal").read_bytes()
    assert_refused(command(*route, "-m", 5), "t.json.journal", "max_tokens 4, and now it is 5; choose another --out")
    prompts.write_text("Once upon a time\nTwo and three are\n")
    assert_refused(command(*route, "-m", 4), "t.json.journal", "prompts", "choose another --out")
    assert (tmp_path / "t.json.journal").read_bytes() == kept


class TestWindowsOfAPair:
    @pytest.mark.slow
    def test_a_damaged_window_is_named(self, command, flags, tmp_path):
        out = tmp_path / "out"
        assert command(*flags["text of a pair"], "--out", out).status == 0
        first, second = (out / "recordings" / f"window-{number}.npz" for number in (0, 1))
        arrays = dict(np.load(second))
        np.savez(first, **{field: array[..., :1] for field, array in arrays.items()})
        refused = command(*flags["text of a pair"], "--out", out)
        assert_refused(refused, f"{first}: damaged", "remove it, and the same command makes it again")

    def test_a_recording_is_read_as_it_was_written(self, demo, tmp_path):
        made = pair.record_pair(tiny_model(seed=1, vocab_size=4096), demo.model, [([5, 9, 300, 7, 2], 0)], 4096)
        with (tmp_path / "window.npz").open("wb") as file:
            made.save(file)
        read = PairRecording.load(tmp_path / "window.npz", 4, 4096)
        for one, other in ((made.small, read.small), (made.large, read.large)):
            assert {k: v.tolist() for k, v in vars(one).items()} == {k: v.tolist() for k, v in vars(other).items()}
        assert read.top_probability.tolist() == made.top_probability.tolist()


class TestAFullDisk:
    @pytest.mark.slow
    def test_the_room_for_the_reference_is_named(self, command, flags, tmp_path):
        text = (*flags["text"], "--out", tmp_path / "out")
        with files_of_at_most(300_000):
            done = command(*text)
        assert_refused(done, tmp_path / "out", f"take {24 * 4096 * 4} bytes", "make room, and the same command goes on")
        assert not [file for file in tmp_path.rglob("*") if file.suffix == ".part"]
        assert command(*text).status == 0

    def test_a_journal_that_may_not_grow_is_one_line_and_nothing_is_lost(self, tmp_path):
        file = tmp_path / "journal"
        journal = Journal(file, {"model": "a"})
        journal.add("first", [1.0] * 10)
        whole = file.read_bytes()
        with files_of_at_most(len(whole) + 10), pytest.raises(GearbxError) as raised:
            journal.add("second", [2.0] * 10)
        assert str(raised.value).startswith(f"{file}: cannot be written (")
        assert str(raised.value).endswith("; make room, and the same command goes on")
        assert file.read_bytes()[len(whole) :] == b'{"part": "'  # what fitted
        assert Journal(file, {"model": "a"}).parts == {"first": [1.0] * 10}
        journal.add("second", [2.0] * 10)
        assert Journal(file, {"model": "a"}).parts == {"first": [1.0] * 10, "second": [2.0] * 10}

    def test_a_journal_that_another_process_writes_is_refused(self, tmp_path):
        code = "import sys, pathlib; from gearbx_mlx.evaluation.session import Journal; "
        code += "Journal(pathlib.Path(sys.argv[1]), {'model': 'a'}); print('ready', flush=True); sys.stdin.read()"
        command, file = [sys.executable, "-c", code], tmp_path / "journal"
        with subprocess.Popen([*command, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.read(5)
            with pytest.raises(GearbxError, match="journal: another process writes it; wait for it, or end it"):
                Journal(file, {"model": "a"})
            process.communicate()
        Journal(file, {"model": "a"})

    def test_a_part_that_is_not_finite_is_named(self, tmp_path):
        journal = Journal(tmp_path / "journal", {"model": "a"})
        with pytest.raises(GearbxError, match="journal: first is not finite; check the checkpoint"):
            journal.add("first", [float("nan")])

    def test_what_a_killed_run_wrote_beside_a_recording_makes_room(self, tmp_path):
        session.EvaluationSession(tmp_path, {"model": "a"})
        for name in (".reference.npy.a1b2c3d4.part", "static-4.npz"):
            (tmp_path / "recordings" / name).touch()
        session.EvaluationSession(tmp_path, {"model": "a"})
        assert [file.name for file in (tmp_path / "recordings").iterdir()] == ["static-4.npz"]

    @pytest.mark.some(1)
    @pytest.mark.parametrize("name", ["route", "final numbers"])
    def test_a_command_goes_on_when_there_is_room(self, command, flags, tmp_path, monkeypatch, name):
        once, out, add = tmp_path / "once", tmp_path / "out", Journal.add
        assert command(*flags[name], "--out", once).status == 0

        def on_a_full_disk(self, part, found):
            with files_of_at_most(self.end + 5) if len(self.parts) == 1 else contextlib.nullcontext():
                add(self, part, found)

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", on_a_full_disk)
            assert_refused(command(*flags[name], "--out", out), tmp_path, "make room, and the same command goes on")
        assert command(*flags[name], "--out", out).status == 0
        assert written(out) == written(once)


def test_a_device_keeps_nothing_and_a_link_keeps_its_parts_beside_its_target(command, flags, tmp_path):
    assert beside(Path("/dev/null"), ".journal") is None
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a.json")
    assert beside(tmp_path / "link", ".journal") == tmp_path / "there" / "a.json.journal"
    assert command(*flags["route"], "--out", "/dev/null").status == 0
