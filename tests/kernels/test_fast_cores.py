"""Fast and slow cores on Linux: folders stand for /sys/devices of other machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gearbx_mlx.kernels import compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of cores")

# Says that the process may run on the cores 0 to argv[2] - 1, whatever this machine has.
PROGRAM = """#include <sched.h>
#include <cstdio>
#include <cstdlib>
#include "cores.h"
static int cores;
extern "C" int sched_getaffinity(pid_t, size_t, cpu_set_t* allowed) noexcept {
  CPU_ZERO(allowed);
  for (int core = 0; core < cores; core++) CPU_SET(core, allowed);
  return cores > 0 ? 0 : -1;
}
int main(int, char** argv) {
  cores = std::atoi(argv[2]);
  std::printf("%d", gearbx::fast_cores(argv[1]));
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cores")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [str(folder / "main.cpp"), str(compiler.SOURCES / "cores.cpp")]
    flags = ["-std=c++20", f"-I{compiler.SOURCES}", "-o", str(folder / "main")]
    subprocess.run([*compiler.find_compiler(), *sources, *flags], check=True, timeout=120)
    return folder / "main"


@pytest.fixture
def fast(program, tmp_path):
    def count(cores: int) -> int:
        done = subprocess.run([program, tmp_path, str(cores)], capture_output=True, text=True, check=True, timeout=20)
        return int(done.stdout)

    return count


def write_capacities(devices: Path, *capacities: int) -> None:
    for core, capacity in enumerate(capacities):
        folder = devices / "system" / "cpu" / f"cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")


class TestIntel:
    @pytest.mark.some(2)
    @pytest.mark.parametrize(("named", "count"), [("0-7\n", 8), ("0,2,4-5\n", 4), ("0-3,16-19\n", 4), ("3", 1)])
    def test_performance_cores_are_named(self, fast, tmp_path, named, count):
        (tmp_path / "cpu_core").mkdir()
        (tmp_path / "cpu_core" / "cpus").write_text(named)
        assert fast(16) == count

    def test_those_that_the_process_may_not_use_do_not_count(self, fast, tmp_path):
        (tmp_path / "cpu_core").mkdir()
        (tmp_path / "cpu_core" / "cpus").write_text("0-7\n")
        assert fast(6) == 6

    @pytest.mark.parametrize("text", ["", "\n", "nonsense", "-", "20-30"])
    def test_a_list_that_says_nothing_of_these_cores_is_left_alone(self, fast, tmp_path, text):
        (tmp_path / "cpu_core").mkdir()
        (tmp_path / "cpu_core" / "cpus").write_text(text)
        assert fast(8) == 0


class TestArm:
    def test_the_smallest_of_three_kinds_are_left_out(self, fast, tmp_path):
        write_capacities(tmp_path, 250, 250, 250, 250, 870, 870, 870, 1024)
        assert fast(8) == 4
        assert fast(5) == 1
        assert fast(4) == 4  # if only small ones may be used, they are all alike

    def test_cores_that_are_alike(self, fast, tmp_path):
        write_capacities(tmp_path, 1024, 1024, 1024)
        assert fast(3) == 3

    def test_a_capacity_that_is_no_number_is_none(self, fast, tmp_path):
        write_capacities(tmp_path, 1024, 1024)
        (tmp_path / "system" / "cpu" / "cpu1" / "cpu_capacity").write_text("much\n")
        assert fast(2) == 1


def test_a_machine_that_says_nothing(fast):
    assert fast(4) == 0


def test_a_process_that_knows_no_core_of_its_own(fast, tmp_path):
    write_capacities(tmp_path, 1024)
    assert fast(0) == 0


def test_here_it_is_no_more_than_the_cores_of_this_process(program):
    count = subprocess.run([program, "/sys/devices", str(len(os.sched_getaffinity(0)))], capture_output=True, text=True)
    assert 0 <= int(count.stdout) <= len(os.sched_getaffinity(0))
