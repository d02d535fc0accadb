"""Results that a rerun of evaluate finds: it uses them again, or names damaged ones in one line."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import save_model, tiny_model
from test_bad_input import assert_refused

HELD_OUT = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"
SIZES = ("--tokens", 24, "--context", 8, "--q-group-size", 32, "--gears", "4,16", "--policy", "static")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    save_model(tiny_model(vocab_size=4096), path)
    return path


def evaluate(command, small, out, *flags):
    return command("evaluate", "--data", HELD_OUT, "--model", small, "--out", out, *flags)


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory) -> Path:
    import sys

    from gearbx_mlx.evaluate import main

    out = tmp_path_factory.mktemp("results") / "out"
    before, sys.argv = sys.argv, ["evaluate", "--data", str(HELD_OUT), "--model", str(small), "--out", str(out)]
    sys.argv += map(str, SIZES)
    with pytest.raises(SystemExit) as stopped:
        main()
    sys.argv = before
    assert stopped.value.code == 0
    return out


@pytest.fixture
def results(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def without_passes(file: Path) -> None:
    arrays = dict(np.load(file))
    del arrays["passes"]
    np.savez(file, **arrays)


def of_fewer_tokens(file: Path) -> None:
    np.savez(file, **{name: array[:-1] for name, array in np.load(file).items()})


def of_another_ladder(file: Path) -> None:
    np.savez(file, **(dict(np.load(file)) | {"gear": np.full(24, 7)}))


DAMAGE = {
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "of zeros": lambda file: file.write_bytes(bytes(1000)),
    "pickled": lambda file: file.write_bytes(pickle.dumps([1, 2])),
    "of objects": lambda file: np.save(file.open("wb"), np.array([{}, None])),
    "of another shape": lambda file: np.save(file.open("wb"), np.zeros((24, 3), np.float32)),
    "a directory": as_directory,
}
RECORDINGS = {"of fewer tokens": of_fewer_tokens, "without passes": without_passes, "of gears": of_another_ladder}


@pytest.mark.some(2)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["reference.npy", "static-4.npz"])
def test_damaged_recordings_are_named_in_one_line(command, small, results, name, damage):
    DAMAGE[damage](results / "recordings" / name)
    assert_refused(evaluate(command, small, results, *SIZES), name, "remove it, and the same command makes it again")


@pytest.mark.parametrize("damage", RECORDINGS)
def test_recordings_of_something_else_are_named_in_one_line(command, small, results, damage):
    RECORDINGS[damage](results / "recordings" / "static-4.npz")
    assert_refused(evaluate(command, small, results, *SIZES), "static-4.npz: damaged", "remove it")


@pytest.mark.parametrize("content", ["", "[]", "null", "[" * 10000, '{"task": 1e999}', "directory"])
def test_damaged_inputs_are_named_in_one_line(command, small, results, content):
    file = results / "inputs.json"
    as_directory(file) if content == "directory" else file.write_text(content)
    assert_refused(evaluate(command, small, results, *SIZES), file)


class TestFinalNumbers:
    FLAGS = ("--task", "gsm8k", "--num-problems", 2, "--max-tokens", 4, "--gears", "4,16", "--q-group-size", 32)

    def test_a_rerun_computes_nothing_again(self, command, small, tmp_path):
        out = tmp_path / "out"
        first = evaluate(command, small, out, *self.FLAGS)
        assert first.status == 0, first.err
        report = json.loads((out / "evaluation.json").read_text())
        written = {file: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()}
        assert {file.stem for file in written} == {"static-16", "static-4", "route", "kickdown", "lossless"}
        again = evaluate(command, small, out, *self.FLAGS)
        assert again.status == 0, again.err
        assert {file: file.stat().st_mtime_ns for file in (out / "recordings").iterdir()} == written
        assert json.loads((out / "evaluation.json").read_text()) == report

    @pytest.mark.slow
    def test_damaged_attempts_are_named_in_one_line(self, command, small, tmp_path):
        out = tmp_path / "out"
        assert evaluate(command, small, out, *self.FLAGS, "--policy", "route").status == 0
        file = out / "recordings" / "route.jsonl"
        head, first, second = file.read_text().splitlines()
        for line, words in (
            ("{", "not JSON"),
            (second.replace("false", "1"), "found.right is 1, not true or false"),
            ('{"part": "1", "found": {}}', "found has no field 'found'"),
        ):
            file.write_text(f"{head}\n{first}\n{line}\n")
            refused = evaluate(command, small, out, *self.FLAGS, "--policy", "route")
            assert_refused(refused, f"{file}, line 3", words, "remove this line, and the same command goes on")
        file.write_text(f"{head}\n{first}\n")
        assert evaluate(command, small, out, *self.FLAGS, "--policy", "route").status == 0
        assert file.read_text().splitlines() == [head, first, second]
