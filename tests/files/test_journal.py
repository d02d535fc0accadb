"""Long commands continue where they stopped, after an interrupt, a kill or a full disk, and give the same result."""

import contextlib
import resource
import signal
import subprocess
import sys

import pytest
from conftest import save_model, tiny_model
from refusals import assert_refused

from gearbx_mlx import GearbxError
from gearbx_mlx.files.journal import Journal

SMALL = "small"  # stands for the path of a small model
MODEL = ("--model", SMALL)
GEARS = (*MODEL, "--q-group-size", 32, "--gears", "4,16")
COMMANDS = {
    "route": ("calibrate", *MODEL, "-m", 8),
    "kickdown": ("calibrate", *GEARS, "--mode", "kickdown", "-m", 8),
    "sensitivity": ("sensitivity", *GEARS[:-2], "--num-samples", 1, "--sequence-length", 16, "--bits", "4,8"),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> dict[str, list]:
    """The commands, with the path of the small model."""
    path = tmp_path_factory.mktemp("models") / "small"
    save_model(tiny_model(seed=1, vocab_size=4096), path)
    return {name: [path if flag == SMALL else flag for flag in flags] for name, flags in COMMANDS.items()}


@contextlib.contextmanager
def parts_added(monkeypatch, most: float = float("inf")):
    """The names of the parts that are kept; an interrupt keeps their number within the limit."""
    add, added = Journal.add, []

    def counted(self, part, found):
        if len(added) == most:
            raise KeyboardInterrupt
        added.append(part)
        add(self, part, found)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", counted)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted_command_resumes_to_same_result(command, flags, tmp_path, monkeypatch, name):
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
    assert out.read_bytes() == once.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"once", "out"}


def test_other_prompts_or_lengths_do_not_resume(command, flags, tmp_path, monkeypatch):
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


def test_journal_edited_with_other_line_ends_continues(tmp_path):
    file = tmp_path / "journal"
    file.write_bytes(b'{"model": "a"}\r\n{"part": "1", "found": 1}\r\n')
    journal = Journal(file, {"model": "a"}, int)
    journal.add("2", 2)
    assert Journal(file, {"model": "a"}, int).parts == {"1": 1, "2": 2}


class TestFullDisk:
    def test_unwritable_journal_is_refused_and_parts_kept(self, tmp_path):
        file = tmp_path / "journal"
        journal = Journal(file, {"model": "a"})
        journal.add("first", [1.0] * 10)
        whole = file.read_bytes()
        with files_of_at_most(len(whole) + 10), pytest.raises(GearbxError) as raised:
            journal.add("second", [2.0] * 10)
        assert str(raised.value).startswith(f"{file}: cannot be written (")
        assert str(raised.value).endswith("; make room, and the same command continues")
        assert file.read_bytes()[len(whole) :] == b'{"part": "'  # what fitted
        assert Journal(file, {"model": "a"}).parts == {"first": [1.0] * 10}
        journal.add("second", [2.0] * 10)
        assert Journal(file, {"model": "a"}).parts == {"first": [1.0] * 10, "second": [2.0] * 10}

    def test_journal_of_running_process_is_refused(self, tmp_path, holding):
        process = holding("if Journal(path, {'model': 'a'}):", tmp_path / "journal")
        with pytest.raises(GearbxError, match="journal: another process writes it; wait for it, or end it"):
            Journal(tmp_path / "journal", {"model": "a"})
        process.communicate()
        Journal(tmp_path / "journal", {"model": "a"})


@pytest.mark.processes
def test_killed_command_resumes_to_same_result(command, flags, tmp_path):
    name, *more = flags["route"]
    once, out = tmp_path / "once", tmp_path / "out"
    assert command(name, *more, "--out", once).status == 0
    code = "import itertools, os, signal; from gearbx_mlx.calibrate import main; "
    code += "fsync, count = os.fsync, itertools.count(); "
    code += "os.fsync = lambda file: next(count) == 2 and os.kill(os.getpid(), signal.SIGKILL) or fsync(file); "
    code += "main()"
    killed = subprocess.run([sys.executable, "-c", code, *map(str, more), "--device", "cpu", "--out", out])
    assert killed.returncode == -signal.SIGKILL
    assert command(name, *more, "--out", out).status == 0
    assert out.read_bytes() == once.read_bytes()
