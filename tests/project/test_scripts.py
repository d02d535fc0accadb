"""What the scripts fuzz_commands.py and run_mlx_lm_tests.py find: a part of it, and what they call a failure."""

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
from fuzzing.running import Outcome
from run_mlx_lm_tests import get_tests

from gearbx_mlx import GearbxError

SCRIPTS = Path(__file__).parents[2] / "scripts"
FUZZ = [sys.executable, str(SCRIPTS / "fuzz_commands.py")]
RUN = [sys.executable, str(SCRIPTS / "run_mlx_lm_tests.py")]


@pytest.mark.fuzz
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not let a process fork that has loaded Metal")
def test_fuzzing_flags_and_files_finds_no_failure():
    done = subprocess.run([*FUZZ, "--minutes", "0.3", "--jobs", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failures" in done.stdout


UNFORESEEN = "unforeseen error: KeyError: PATH (GEARBX_TRACEBACK=N shows where)"


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(0, "", 1), None),
        (Outcome(2, "error: --gears 9: choose another\n", 1), None),
        (Outcome(2, "gearbx_mlx.x: error: no such flag\n", 1), None),
        (Outcome(2, "usage: x\ngearbx_mlx.x: error: no such flag\n", 1), "the usage before the error"),
        (Outcome(130, "", 1, late=True), None),
        (Outcome(2, "", 1), "the error is not one line: "),
        (Outcome(2, "error: the name\nis long\n", 1), "the error is not one line: is long"),
        (Outcome(2, "error: one\nerror: two\n", 1), "several errors: error: two"),
        (Outcome(2, "error: one\n", 1, left=[".out.json.x7.part"]), "left behind: .out.json.xN.part"),
        (Outcome(0, "", 1, left=[".out.json.x7.part"]), "left behind: .out.json.xN.part"),
        (Outcome(1, "", 1), "status 1 without a word"),
        (Outcome(3, "", 1), "status 3"),
        (Outcome(-11, "", 1), "ended by SIGSEGV"),
        (Outcome(-9, "", 1, late=True), "ended by SIGKILL, late"),
        (Outcome(0, "", 1, waiting=True), "waits for ever"),
        (Outcome(1, "Traceback (most recent call last):\nKeyError: 7\n", 1), "Traceback: KeyError: N"),
        (Outcome(1, "error: KeyError: 'a/b' (GEARBX_TRACEBACK=1 shows where)\n", 1), UNFORESEEN),
    ],
)
def test_outcome_has_expected_problem(outcome, problem):
    assert outcome.problem == problem


@pytest.fixture(scope="session")
def tests() -> Path:
    try:
        return get_tests(platformdirs.user_cache_path("gearbx-mlx") / "mlx-lm-tests", seconds=120)
    except GearbxError as error:
        pytest.skip(str(error))


@pytest.mark.processes
@pytest.mark.parametrize("file", ["prompt_cache", "generate"])
def test_mlx_lm_tests_pass_with_our_models(tests, file):
    expression = {"prompt_cache": "quant or save_load", "generate": "test_stream_generate_max_tokens"}[file]
    wrappers = ["--wrapper", "low gear", "--wrapper", "mid gear", "--wrapper", "high gear"]
    command = [*RUN, "--tests", str(tests), "--only", file, "-k", expression, *wrappers]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"| test_{file} "))
    plain, *wrapped = [int(cell) for cell in row.split("|")[2:6]]
    assert plain > 0
    assert wrapped == [plain] * 3
