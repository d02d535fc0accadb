"""The clock of a summary: it runs from the start of a process, which is when a user presses Enter."""

import subprocess
import sys
import time

import pytest

from gearbx_mlx.cli.tables import time_line
from gearbx_mlx.telemetry.summary import process_start, whole_command

STARTED = (
    "import time; time.sleep(0.4); from gearbx_mlx.telemetry.summary import process_start; "
    "print(time.time() - time.perf_counter() + process_start())"
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil says it, or the import is all that is known")
def test_a_process_knows_when_it_was_started():
    before = time.time()
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True)
    assert before - 0.02 <= float(done.stdout) <= before + 0.35  # seconds; the system counts hundredths


def test_seconds_count_from_enter_to_the_last_token():
    assert whole_command(2.0, 2.5, 3.0, 6.0) == {
        "command_seconds_to_ready": 0.5,
        "command_seconds_to_first_token": 1.0,
        "command_seconds_to_last_token": 4.0,
    }


def test_clock_without_tokens_ends_at_ready_model():
    assert {*whole_command(2.0, 2.5, 0.0, 0.0).values()} == {0.5}


def test_command_reports_its_total_time(generated):
    before = time.perf_counter() - process_start()
    found = generated("-m", 4).summary
    ready, first, last = (found[f"command_seconds_to_{name}"] for name in ("ready", "first_token", "last_token"))
    assert 0 < ready < first < last < before + 60
    assert first - ready == pytest.approx(found["seconds_to_first_token"], abs=1e-6)
    assert f"4 tokens in {last:.2f} s" in time_line(found)
