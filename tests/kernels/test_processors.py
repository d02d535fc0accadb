"""GEARBX_CPU: for which processors CPU kernels are compiled, and what machines that share a cache load of it."""

import os
import subprocess
import sys

import pytest
from conftest import tiny_model

from gearbx_mlx import Gearbox, GearbxError
from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.kernels import compiler, cpu, tuner
from gearbx_mlx.kernels.compiler import CompileTarget

ZEN_3 = "fpu sse4_2 movbe popcnt fma avx f16c abm bmi1 avx2 bmi2 sha_ni"
ZEN_4 = f"{ZEN_3} avx512f avx512bw avx512_vnni avx512_bf16"
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
    def test_that_work(self, machine, asked):
        machine(ZEN_3, asked)
        assert compiler.instructions() == (asked or "native")
        assert compiler.this_target().instructions == (asked or "native")

    @pytest.mark.parametrize("asked", ["AVX2", "avx512", "native ", "nein\n", "\udcff"])
    def test_that_nobody_knows(self, machine, asked):
        machine(ZEN_3, asked)
        with pytest.raises(GearbxError) as error:
            compiler.this_target()
        expected = f"GEARBX_CPU is {asked!r}, and that name is unknown; choose from native, avx2, portable"
        assert str(error.value) == expected

    @pytest.mark.parametrize(
        ("flags", "lacks"),
        [
            (NEHALEM, "abm, avx2, bmi1, bmi2, f16c, fma, movbe"),
            (ZEN_3.replace(" fma ", " "), "fma"),
            (ZEN_3.replace(" avx2 ", " "), "avx2"),
        ],
    )
    def test_that_this_processor_lacks(self, machine, flags, lacks):
        machine(flags, "avx2")
        with pytest.raises(GearbxError) as error:
            compiler.this_target()
        expected = f"GEARBX_CPU is 'avx2', and this processor has no {lacks}; choose from native, portable"
        assert str(error.value) == expected

    @pytest.mark.parametrize(("system", "name"), [("linux", "aarch64"), ("darwin", "arm64"), ("linux", "riscv64")])
    def test_elsewhere(self, machine, system, name):
        for asked in ("native", "portable"):
            machine("", asked, system, name)
            assert compiler.instructions() == asked
        machine("", "avx2", system, name)
        with pytest.raises(GearbxError, match=r"'avx2', and this processor has no avx2; choose from native, portable$"):
            compiler.instructions()

    @pytest.mark.parametrize("flags", [ZEN_3, ZEN_4])
    def test_are_asked_for_before_a_model_is_made(self, machine, flags):
        machine(flags, "sse")
        for kernels in ("auto", "native"):
            with pytest.raises(GearbxError, match="GEARBX_CPU is 'sse'"):
                Gearbox(tiny_model(), kernels=kernels)


@pytest.mark.parametrize(
    ("system", "name", "flags"),
    [
        ("linux", "x86_64", ["-march=native", "-march=x86-64-v3", "-march=x86-64 -DGEARBX_PORTABLE"]),
        ("linux", "aarch64", ["-mcpu=native", "", "-march=armv8-a -DGEARBX_PORTABLE"]),
        ("darwin", "arm64", ["-mcpu=apple-m1", "", "-mcpu=apple-m1 -DGEARBX_PORTABLE"]),
        ("linux", "riscv64", ["-march=native", "", "-DGEARBX_PORTABLE"]),
    ],
)
def test_flags_for_the_compiler(system, name, flags):
    for asked, expected in zip(NAMES, flags):
        target = CompileTarget(system, name, compiler.this_target().mlx, asked)
        if expected:  # avx2 is for x86-64
            recipe = compiler.make_recipe([], target)
            named = [flag for flag in recipe.flags if flag.startswith(("-march", "-mcpu", "-DGEARBX"))]
            assert named == expected.split()


def library() -> str:
    return cpu.library_name(compiler.make_recipe(["c++"]))


class TestSharedCache:
    def test_has_a_library_for_every_choice_and_for_every_processor_of_native(self, machine):
        found = {}
        for asked in NAMES:
            for flags in (ZEN_3, ZEN_4):
                machine(flags, asked)
                found[asked, flags] = library()
        assert found["native", ZEN_3] != found["native", ZEN_4]
        assert found["avx2", ZEN_3] == found["avx2", ZEN_4]
        assert found["portable", ZEN_3] == found["portable", ZEN_4]
        assert len({*found.values()}) == 4

    def test_times_count_for_one_processor_and_one_choice(self, machine):
        kernels = set()
        for asked in NAMES:
            for flags in (ZEN_3, ZEN_4):
                machine(flags, asked)
                kernels.add(tuner.machine())
        assert len(kernels) == 6

    def test_figures_say_what_kernels_were_compiled_for(self, machine):
        machine(ZEN_3)
        plain = machine_name()
        machine(ZEN_3, "avx2")
        assert machine_name() == f"{plain}, kernels for avx2"


@pytest.mark.processes
def test_a_command_refuses_a_wrong_name_in_one_line():
    environment = os.environ | {"GEARBX_CPU": "mmx"}
    for flags in (["generate", "-m", "3", "--kernels", "mlx"], ["benchmark", "decode"]):
        run = [sys.executable, "-m", "gearbx_mlx", *flags]
        done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: GEARBX_CPU is 'mmx', and that name is unknown; choose from native, ")
        assert done.stderr.count("\n") == 1
