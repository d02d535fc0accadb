"""The kernels without Python and MLX: a program for each kind, in every build that this machine has."""

from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.native

CHECKS = sorted((Path(__file__).parent / "native").glob("check_*.c*"))
every_check = pytest.mark.parametrize("check", CHECKS, ids=[check.stem for check in CHECKS])


@every_check
@pytest.mark.parametrize("flags", programs.SANITIZED)
def test_under_sanitizers(check, flags):
    programs.run_sanitized(check, flags)


@every_check
@pytest.mark.parametrize(("compiler", "flags"), programs.ARM)
def test_on_an_emulated_arm_processor(check, compiler, flags):
    programs.run_on_arm(check, compiler, flags)


def test_core_on_an_emulated_arm_processor_with_i8mm():
    check = CHECKS[0].with_name("check_core.c")
    programs.run_on_arm(check, programs.GCC, programs.DOT_PRODUCTS, programs.I8MM)
