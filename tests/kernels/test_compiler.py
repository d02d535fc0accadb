"""Where the CPU kernels cannot be compiled, one line says why, and MLX computes; and the cores that threads are for."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import PROMPT, tiny_model

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning
from gearbx_mlx.kernels import compiler, cpu, tuner
from gearbx_mlx.kernels.compiler import CompileTarget
from gearbx_mlx.kernels.cpu import BUILDING_LOCK


def program(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.fixture
def script(afresh, tmp_path):
    """Make CXX a program with this text, and return the cache's directory."""
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(text: str) -> Path:
        afresh.setenv("CXX", str(program(tmp_path / "own-compiler", text)))
        return tmp_path / "cache" / "gearbx-mlx"

    return write


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (None, f"no C++ compiler was found; {compiler.REMEDY}"),
        ("no-such-compiler -O3", "CXX: no such compiler, got 'no-such-compiler -O3'; set it to a compiler such as g++"),
        (" ", "CXX: no such compiler, got ' '; set it to a compiler such as g++"),
        ("/", "CXX: no such compiler, got '/'; set it to a compiler such as g++"),
        ("'", 'CXX: not a command (No closing quotation), got "\'"; set it to a compiler such as g++'),
        ('g++ "-O3', "CXX: not a command (No closing quotation), got 'g++ \"-O3'; set it to a compiler such as g++"),
    ],
)
@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_invalid_compiler_name(afresh, tmp_path, named, reason, kernels):
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    afresh.setenv("PATH", str(tmp_path))
    afresh.delenv("CXX", raising=False) if named is None else afresh.setenv("CXX", named)
    assert cpu.why_not() == reason
    with pytest.warns(GearbxWarning, match=f"MLX's kernels are used: {re.escape(reason)}"):
        gearbox = Gearbox(tiny_model(), kernels=kernels)
    assert f"mlx ({reason})" in gearbox.describe()
    assert mx.array_equal(gearbox.model(PROMPT), Gearbox(tiny_model(), kernels="mlx").model(PROMPT)).item()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\necho 'error: out of luck' >&2\nexit 3\n", "could not compile the CPU kernels: error: out of luck"),
        ("#!/bin/sh\nexit 4\n", "could not compile the CPU kernels: status 4"),
        ("#!/bin/sh\nkill -9 $$\n", "could not compile the CPU kernels: status -9"),
        ("#!/bin/sh\nprintf '\\377 error' >&2\nexit 1\n", "could not compile the CPU kernels: \ufffd error"),
        ("#!/bin/sh\nexit 0\n", "reported success and wrote no CPU kernels"),
        ("#!/no/such/interpreter\n", "cannot be run: No such file or directory"),
        ("\x7fELF and no more", "cannot be run: Exec format error"),
    ],
)
def test_failing_compiler_is_named(script, text, reason):
    cache = script(text)
    assert cpu.why_not() == f"own-compiler {reason}"
    assert [file.name for file in cache.iterdir()] == [BUILDING_LOCK]


def test_missing_compiler_disables_default_quantization(afresh, generated, tmp_path):
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    afresh.setenv("PATH", str(tmp_path))
    afresh.delenv("CXX", raising=False)
    done = generated("--max-tokens", 6)
    assert f"no native kernels (no C++ compiler was found; {compiler.REMEDY})" in " ".join(done.err.split())
    assert "--kernels native" not in done.err
    assert {line["gear"] for line in done.trace if "gear" in line} == {"high"}
    plain = generated("--max-tokens", 6, "--gears", "16")
    assert plain.out == done.out


def test_compiler_writing_other_file_runs_once(script, tmp_path):
    log = tmp_path / "log"
    script(f'#!/bin/sh\nfor last; do :; done\necho "$last" >> {log}\necho text > "$last"\n')
    for _ in range(2):
        cpu._kernels_or_reason.cache_clear()
        assert cpu.why_not().startswith("the compiled CPU kernels cannot be loaded: ")
    assert sum(line.endswith(cpu.LIBRARY_SUFFIX) for line in log.read_text().splitlines()) == 1


def test_slow_compiler_is_stopped(afresh, script):
    afresh.setattr(compiler, "MAX_SECONDS_TO_COMPILE", 0.2)
    script("#!/bin/sh\nexec sleep 60\n")
    assert cpu.why_not() == "own-compiler did not compile the CPU kernels within 0.2 s"


def test_compiler_ends_with_interrupted_command(afresh, script, tmp_path):
    log = tmp_path / "log"
    cache = script(f"#!/bin/sh\necho $$ >> {log}\nexec sleep 600\n")

    def interrupt() -> None:
        while not log.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    waiting = threading.Thread(target=interrupt)
    waiting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cpu.why_not()
    finally:
        signal.signal(signal.SIGINT, before)
    waiting.join()
    with pytest.raises(ProcessLookupError):
        os.killpg(int(log.read_text().split()[0]), 0)
    assert [file.name for file in cache.iterdir()] == [BUILDING_LOCK]


def test_interrupt_during_thread_start_waits_for_compiler(afresh, script, tmp_path):
    log = tmp_path / "log"
    script(f"#!/bin/sh\ntrap 'sleep 0.3; exit 1' TERM\necho $$ >> {log}\nwhile :; do sleep 0.05; done\n")
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        while not log.exists() or not log.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    afresh.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpu.why_not()
    with pytest.raises(ProcessLookupError):
        os.killpg(int(log.read_text().split()[0]), 0)


NO_TOOLS = "macOS's developer tools are not installed; run xcode-select --install"
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


@pytest.fixture
def mac(afresh, tmp_path):
    """This machine claims to be a Mac; its compilers are placeholders, which write down their arguments."""
    placeholders = tmp_path / "placeholders"
    placeholders.mkdir()
    for name in ("c++", "clang++"):
        shell(placeholders / name, f'echo "$@" >> {tmp_path / "log"}; echo "error: it ran" >&2; exit 1')
    pretended = CompileTarget("darwin", "arm64", compiler.this_target().mlx)
    afresh.setattr(compiler, "this_target", lambda: pretended)
    afresh.setattr(compiler, "PLACEHOLDERS", placeholders)
    afresh.setenv("PATH", f"{placeholders}:{tmp_path}:/bin:/usr/bin")
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    afresh.delenv("CXX", raising=False)
    afresh.delenv("GEARBX_CPU", raising=False)
    return pretended


def shell(file: Path, text: str) -> Path:
    return program(file, f"#!/bin/sh\n{text}\n")


def answer(directory: Path, status: int) -> None:
    shell(directory / "xcode-select", f'[ "$*" = -p ] && exit {status}; exit 64')


@pytest.mark.parametrize("named", [None, "clang++ -g", "wrapper c++"])
def test_no_placeholder_is_run_without_developer_tools(mac, afresh, tmp_path, named):
    shell(tmp_path / "wrapper", "exit 3")
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


def test_compiler_lacking_the_processor(mac, afresh, tmp_path):
    said = "error: unknown value 'apple-m1' for '-mcpu'"
    afresh.setenv("CXX", str(shell(tmp_path / "gcc-14", f'echo "cc1plus: {said}" >&2; exit 1')))
    expected = f"gcc-14 could not compile the CPU kernels: cc1plus: {said}; "
    assert cpu.why_not() == expected + "use Apple's c++ (CXX=/usr/bin/c++), or GCC 15"


def test_mac_library_serves_all_macs_others_one_processor(afresh):
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
    shell(tmp_path / "sysctl", '[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M2 Pro"')
    assert compiler.processor_features().endswith(" Apple M2 Pro")


@pytest.mark.processes
def test_threads_are_for_performance_cores(tmp_path):
    """The lines for macOS, compiled here with a stand-in for its system call."""
    if compiler.this_target().is_mac:
        pytest.skip("a Mac has the system call itself")
    for name, text in {"sys/sysctl.h": SYSCTL, "pthread/qos.h": QOS, "main.cpp": PRINT_THREADS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
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


REFUSING = r"""
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <vector>
#include "matvec.h"
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* context) {
  static int made = 0;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  return made++ < 2 ? reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"))(thread, how, run, context) : EAGAIN;
}
int main() {
  const std::vector<uint32_t> words(5 << 20, 3);
  for (int i = 0; i < 20; i++) printf("%u ", gearbx_read_sum(words.data(), words.size()));
}
"""


@pytest.mark.processes
def test_fewer_threads_than_wanted_compute_everything(tmp_path):
    """As in a container that limits its processes."""
    (tmp_path / "main.cpp").write_text(REFUSING)
    sources = [str(tmp_path / "main.cpp"), *(str(compiler.SOURCES / name) for name in ("pool.cpp", "cores.cpp"))]
    flags, made = ["-std=c++20", "-pthread", f"-I{compiler.SOURCES}"], str(tmp_path / "main")
    subprocess.run([*compiler.find_compiler(), *flags, *sources, "-o", made, "-ldl"], check=True)
    environment = os.environ | {"GEARBX_THREADS": "8"}
    done = subprocess.run([made], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(3 * (5 << 20))] * 20


ZEN_3 = "fpu sse4_2 movbe popcnt fma avx f16c abm bmi1 avx2 bmi2 sha_ni"
ZEN_4 = (
    f"{ZEN_3} avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg"
)
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile amx_int8"
NEHALEM = "fpu sse4_2 popcnt"
NAMES = ("native", "avx2", "portable")


@pytest.fixture
def machine(afresh, tmp_path):
    """Makes this machine look like an x86-64 under Linux whose processor has these flags, with this GEARBX_CPU."""

    def pretend(flags: str, asked: str | None = None, system: str = "linux", name: str = "x86_64") -> None:
        lines = f"processor\t: 0\nmodel name\t: {flags[-12:]}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
        (tmp_path / "cpuinfo").write_text(lines)
        afresh.setattr(compiler, "CPUINFO", tmp_path / ("cpuinfo" if system == "linux" else "none"))
        afresh.setattr("platform.machine", lambda: name)
        afresh.setattr("sys.platform", system)
        afresh.delenv("GEARBX_CPU", raising=False) if asked is None else afresh.setenv("GEARBX_CPU", asked)

    return pretend


class TestNames:
    @pytest.mark.parametrize("asked", [None, "", *NAMES])
    def test_valid_names_are_accepted(self, machine, asked):
        machine(ZEN_3, asked)
        assert compiler.instructions() == (asked or "native")
        assert compiler.this_target().instructions == (asked or "native")

    @pytest.mark.parametrize("asked", ["amx", "avx512"])
    def test_intel_server_names_need_their_features(self, machine, asked):
        machine(SAPPHIRE_RAPIDS, asked)
        assert compiler.instructions() == asked
        assert compiler.vector_instructions() == "AVX-512"
        machine(ZEN_4, "amx")
        told = "^GEARBX_CPU: this processor has no amx_bf16, amx_int8, amx_tile, got 'amx'; choose from native, avx512"
        with pytest.raises(GearbxError, match=told):
            compiler.instructions()

    @pytest.mark.parametrize("asked", ["AVX2", "avx1024", "native ", "nein\n", "\udcff"])
    def test_unknown_names_are_refused(self, machine, asked):
        machine(ZEN_3, asked)
        told = f"GEARBX_CPU: unknown name, got {asked!r}; choose from native, avx2, portable"
        with pytest.raises(GearbxError, match=f"^{re.escape(told)}$"):
            compiler.this_target()

    @pytest.mark.parametrize(
        ("flags", "lacks"),
        [
            (NEHALEM, "abm, avx2, bmi1, bmi2, f16c, fma, movbe"),
            (ZEN_3.replace(" fma ", " "), "fma"),
            (ZEN_3.replace(" avx2 ", " "), "avx2"),
        ],
    )
    def test_unsupported_names_are_refused(self, machine, flags, lacks):
        machine(flags, "avx2")
        told = f"^GEARBX_CPU: this processor has no {lacks}, got 'avx2'; choose from native, portable$"
        with pytest.raises(GearbxError, match=told):
            compiler.this_target()

    @pytest.mark.parametrize(("system", "name"), [("linux", "aarch64"), ("darwin", "arm64"), ("linux", "riscv64")])
    def test_other_machines_refuse_x86_instructions(self, machine, system, name):
        for asked in ("native", "portable"):
            machine("", asked, system, name)
            assert compiler.instructions() == asked
        machine("", "avx2", system, name)
        with pytest.raises(GearbxError, match=r"this processor has no avx2, got 'avx2'; choose from native, portable$"):
            compiler.instructions()


@pytest.mark.parametrize(
    ("system", "name", "flags"),
    [
        ("linux", "x86_64", ["-march=native", "-march=x86-64-v3", "-march=x86-64 -DGEARBX_PORTABLE"]),
        ("linux", "x86_64", ["", "", "", "-march=x86-64-v4", "-march=native -DGEARBX_TILE_TWIN"]),
        ("linux", "aarch64", ["-mcpu=native", "", "-march=armv8-a -DGEARBX_PORTABLE"]),
        ("darwin", "arm64", ["-mcpu=apple-m1", "", "-mcpu=apple-m1 -DGEARBX_PORTABLE"]),
        ("linux", "riscv64", ["-march=native", "", "-DGEARBX_PORTABLE"]),
    ],
)
def test_flags_for_the_compiler(system, name, flags):
    for asked, expected in zip((*NAMES, "avx512", "amx-twin"), flags):
        target = CompileTarget(system, name, compiler.this_target().mlx, asked)
        if expected:  # avx2 is for x86-64
            recipe = compiler.make_recipe([], target)
            named = [flag for flag in recipe.flags if flag.startswith(("-march", "-mcpu", "-DGEARBX"))]
            assert named == expected.split()


@pytest.mark.parametrize(
    ("name", "machine", "flags"),
    [("avx512", "x86_64", ["-march=x86-64-v4", "-mavx512bf16"]), ("neon", "aarch64", ["-march=armv8.2-a+dotprod"])],
)
def test_flags_for_sets_of_instructions(name, machine, flags):
    target = CompileTarget("linux", machine, compiler.this_target().mlx, name)
    assert {*flags} <= {*compiler.make_recipe([], target).flags}
    assert not target.is_for_one_processor


def test_instruction_set_needs_all_its_features(machine):
    machine(ZEN_4, "avx512")
    assert compiler.instructions() == "avx512"
    assert compiler.vector_instructions() == "AVX-512"
    machine(ZEN_4.replace(" avx512_bf16 ", " "), "avx512")
    told = r"^GEARBX_CPU: this processor has no avx512_bf16, got 'avx512'; choose from native, avx2, portable$"
    with pytest.raises(GearbxError, match=told):
        compiler.instructions()


def test_compiler_with_other_standard_library_is_not_run(afresh, tmp_path):
    """zig's libc++ has other strings and vectors than libstdc++, with which MLX was compiled."""
    if compiler.this_target().is_mac:
        pytest.skip("a Mac's compilers all have libc++")
    afresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for named in ("{} c++", "/bin/sh {}"):
        zig = shell(tmp_path / "zig", f"echo >> {tmp_path / 'log'}")
        afresh.setenv("CXX", named.format(zig))
        cpu._kernels_or_reason.cache_clear()
        assert cpu.why_not() == f"{named.format(zig)} uses the C++ library libc++, and MLX does not; {compiler.REMEDY}"
    assert not (tmp_path / "log").exists()


def test_library_depends_on_choice_and_times_on_both(machine):
    libraries, times = {}, set()
    for asked, flags in itertools.product(NAMES, (ZEN_3, ZEN_4)):
        machine(flags, asked)
        libraries[asked, flags] = cpu.library_name(compiler.make_recipe(["c++"]))
        times.add(tuner.machine())
    assert libraries["native", ZEN_3] != libraries["native", ZEN_4]
    assert libraries["avx2", ZEN_3] == libraries["avx2", ZEN_4]
    assert libraries["portable", ZEN_3] == libraries["portable", ZEN_4]
    assert len({*libraries.values()}) == 4
    assert len(times) == 6


# Says that the process may run on the cores 0 to argv[2] - 1, whatever this machine has.
PROGRAM = """#include <sched.h>
#include <cstdio>
#include <cstdlib>
#include "pool.h"
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
def counting_program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cores")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [str(folder / "main.cpp"), str(compiler.SOURCES / "cores.cpp")]
    flags = ["-std=c++20", f"-I{compiler.SOURCES}", "-o", str(folder / "main")]
    subprocess.run([*compiler.find_compiler(), *sources, *flags], check=True, timeout=120)
    return folder / "main"


@pytest.fixture
def fast(counting_program, tmp_path):
    """Count the fast cores among so many that the process may use."""
    return lambda cores: int(subprocess.check_output([counting_program, tmp_path, str(cores)], timeout=20))


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of cores")
@pytest.mark.parametrize(
    ("named", "allowed", "count"),
    [
        ("0-7\n", 16, 8),
        ("0,2,4-5\n", 16, 4),
        ("0-3,16-19\n", 16, 4),
        ("3", 16, 1),
        ("0-7\n", 6, 6),
        *((nothing, 8, 0) for nothing in ("", "\n", "nonsense", "-", "20-30")),
    ],
)
def test_usable_intel_cores_count(fast, tmp_path, named, allowed, count):
    (tmp_path / "cpu_core").mkdir()
    (tmp_path / "cpu_core" / "cpus").write_text(named)
    assert fast(allowed) == count


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of cores")
def test_smallest_of_three_arm_core_kinds_is_skipped(fast, tmp_path):
    for core, capacity in enumerate((250, 250, 250, 250, 870, 870, 870, 1024)):
        folder = tmp_path / "system" / "cpu" / f"cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
    assert fast(8) == 4
    assert fast(5) == 1
    assert fast(4) == 4  # if only small ones may be used, they are all alike
    assert fast(0) == 0  # a process that knows no core of its own
    (tmp_path / "system" / "cpu" / "cpu7" / "cpu_capacity").write_text("much\n")
    assert fast(8) == 3


def test_interrupted_compilation_leaves_no_files(afresh, script):
    cache = script("#!/bin/sh\nexit 1\n")

    def interrupt(files: int, kept: bool) -> None:
        raise KeyboardInterrupt

    afresh.setattr(cpu, "while_compiling", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cpu.why_not()
    assert [file.name for file in cache.iterdir()] == [BUILDING_LOCK]
