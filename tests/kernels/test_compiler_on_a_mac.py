"""The compile step on a Mac: what is asked before the compiler, its flags, the cache's key, the threads."""

import os
import subprocess
from pathlib import Path

import pytest

from gearbx_mlx.kernels import compiler, cpu
from gearbx_mlx.kernels.compiler import CompileTarget

NO_TOOLS = "the developer tools of macOS are not installed; run xcode-select --install"
SYSCTL = """#include <cstdlib>
#include <cstring>
inline int sysctlbyname(const char* name, void* value, size_t* size, void*, size_t) {
  const char* fast = std::getenv("FAST_CORES");
  if (!fast || std::strcmp(name, "hw.perflevel0.logicalcpu") != 0 || *size != sizeof(int)) return -1;
  *static_cast<int*>(value) = std::atoi(fast);
  return 0;
}
"""
QOS = """#include <atomic>
enum qos_class_t { QOS_CLASS_USER_INTERACTIVE = 0x21 };
inline std::atomic<int> preferring{0};
inline int pthread_set_qos_class_self_np(qos_class_t, int) { return preferring++; }
"""
PRINT_THREADS = """#include <cstdio>
#include <thread>
#include <pthread/qos.h>
#include "pool.h"
void nothing(const void*, int) {}
int main() {
  gearbx::share_out(64, nothing, nullptr);
  while (preferring + 1 < gearbx::thread_count()) std::this_thread::yield();
  std::printf("%d %u %d", gearbx::thread_count(), std::thread::hardware_concurrency(), preferring.load());
}
"""


def program(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.fixture
def mac(afresh, tmp_path):
    """This machine claims to be a Mac; its compilers are placeholders, which write down their arguments."""
    placeholders = tmp_path / "placeholders"
    placeholders.mkdir()
    for name in ("c++", "clang++"):
        program(placeholders / name, f'echo "$@" >> {tmp_path / "log"}; echo "error: it ran" >&2; exit 1')
    pretended = CompileTarget("darwin", "arm64", compiler.this_target().mlx)
    afresh.setattr(compiler, "this_target", lambda: pretended)
    afresh.setattr(compiler, "PLACEHOLDERS", placeholders)
    afresh.setenv("PATH", f"{placeholders}:{tmp_path}:/bin:/usr/bin")
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    afresh.delenv("CXX", raising=False)
    afresh.delenv("GEARBX_CPU", raising=False)
    return pretended


def answer(directory: Path, status: int) -> None:
    program(directory / "xcode-select", f'[ "$*" = -p ] && exit {status}; exit 64')


@pytest.mark.parametrize("named", [None, "clang++ -g", "wrapper c++"])
def test_no_placeholder_is_run_without_developer_tools(mac, afresh, tmp_path, named):
    program(tmp_path / "wrapper", "exit 3")
    answer(tmp_path, status=2)
    if named:
        afresh.setenv("CXX", named)
    assert cpu.why_not() == NO_TOOLS
    assert not (tmp_path / "log").exists()


def test_the_compiler_is_run_with_developer_tools(mac, tmp_path):
    answer(tmp_path, status=0)
    assert cpu.why_not() == "c++ could not compile the CPU kernels: error: it ran"
    flags = (tmp_path / "log").read_text().split()
    assert "-mcpu=apple-m1" in flags
    assert not {"-march=native", "-mcpu=native", "-pthread"} & set(flags)


def test_another_compiler_needs_no_developer_tools(mac, afresh, tmp_path):
    answer(tmp_path, status=2)
    afresh.setenv("CXX", str(program(tmp_path / "own", 'echo "error: own compiler" >&2; exit 1')))
    assert cpu.why_not() == "own could not compile the CPU kernels: error: own compiler"


def test_a_compiler_that_does_not_know_the_processor(mac, afresh, tmp_path):
    said = "error: unknown value 'apple-m1' for '-mcpu'"
    afresh.setenv("CXX", str(program(tmp_path / "gcc-14", f'echo "cc1plus: {said}" >&2; exit 1')))
    expected = f"gcc-14 could not compile the CPU kernels: cc1plus: {said}; "
    assert cpu.why_not() == expected + "use Apple's c++ (CXX=/usr/bin/c++), or GCC 15"


def test_without_the_program_to_ask_the_compiler_is_run(mac, tmp_path):
    (tmp_path / "xcode-select").write_text("not a program")
    assert cpu.why_not() == "c++ could not compile the CPU kernels: error: it ran"


def test_a_library_serves_any_mac_and_only_the_same_processor_elsewhere(afresh):
    def keys(system: str) -> set[str]:
        found = set()
        for features in ("Apple M1", "Apple M4 Max"):
            afresh.setattr(compiler, "processor_features", lambda named=features: named)
            machine = CompileTarget(system, "arm64", compiler.this_target().mlx)
            found.add(compiler.hash_recipe(compiler.make_recipe([], machine)))
        return found

    assert len(keys("darwin")) == 1
    assert len(keys("linux")) == 2
    assert not keys("darwin") & keys("linux")


def test_the_name_of_the_processor(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "CPUINFO", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path / "sysctl", '[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M2 Pro"')
    assert compiler.processor_features().endswith(" Apple M2 Pro")


@pytest.mark.processes
def test_threads_are_for_performance_cores(tmp_path):
    """The lines for macOS, compiled here with a stand-in for its system call."""
    if compiler.this_target().is_mac:
        pytest.skip("a Mac has the system call itself")
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "sysctl.h").write_text(SYSCTL)
    (tmp_path / "pthread").mkdir()
    (tmp_path / "pthread" / "qos.h").write_text(QOS)
    (tmp_path / "main.cpp").write_text(PRINT_THREADS)

    sources = [str(tmp_path / "main.cpp"), *(str(compiler.SOURCES / name) for name in ("pool.cpp", "cores.cpp"))]
    flags = ["-std=c++20", "-pthread", "-D__APPLE__", f"-I{tmp_path}", f"-I{compiler.SOURCES}"]
    made = str(tmp_path / "main")
    subprocess.run([*compiler.find_compiler(), *flags, *sources, "-o", made], check=True)

    cores = len(os.sched_getaffinity(0))

    def threads(**environment: str) -> list[int]:
        done = subprocess.run([made], env=environment, capture_output=True, text=True, check=True)
        return [int(number) for number in done.stdout.split()]

    assert threads(FAST_CORES="3") == [3, cores, 2]  # the caller's thread keeps its own class
    assert threads(FAST_CORES="3", GEARBX_THREADS="7") == [7, cores, 6]
    assert threads(FAST_CORES="3", GEARBX_THREADS="all") == [cores, cores, cores - 1]
    assert threads() == [cores, cores, cores - 1]
