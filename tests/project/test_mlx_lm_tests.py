"""A quick part of scripts/run_mlx_lm_tests.py, and its behaviour when something is wrong."""

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from gearbx_mlx import GearbxError

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).parents[2] / "scripts"
RUN = [sys.executable, str(SCRIPTS / "run_mlx_lm_tests.py")]
sys.path.append(str(SCRIPTS))

from run_mlx_lm_tests import get_tests  # noqa: E402


@pytest.fixture(scope="session")
def tests() -> Path:
    try:
        return get_tests(platformdirs.user_cache_path("gearbx-mlx") / "mlx-lm-tests", seconds=120)
    except GearbxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("file", "expression"), [("prompt_cache", "quant or save_load"), ("generate", "test_stream_generate_max_tokens")]
)
def test_mlx_lms_tests_pass_with_our_models(tests, file, expression):
    command = [*RUN, "--tests", str(tests), "--only", file, "-k", expression, "--wrapper", "low gear"]
    done = subprocess.run(
        [*command, "--wrapper", "GearedModel", "--wrapper", "LosslessModel"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"| test_{file} "))
    plain, *wrapped = [int(cell) for cell in row.split("|")[2:6]]
    assert plain > 0
    assert wrapped == [plain] * 3


def test_a_test_that_fails_with_a_wrapper_alone_is_named(tmp_path):
    text = "from mlx_lm import load\n\ndef test_x():\n    assert type(load('any/model')[0]).__name__ == 'Model'\n"
    (tmp_path / "test_server.py").write_text(text)
    command = [*RUN, "--tests", str(tmp_path), "--only", "server", "--wrapper", "LosslessModel"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| test_server | 1 | 0 |" in done.stdout
    assert "test_server: test_x: LosslessModel: " in done.stdout
