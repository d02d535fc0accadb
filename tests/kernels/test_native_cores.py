"""The kernels without Python and MLX: a program for each kind, in every build that this machine has."""

from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.native

FOLDER = Path(__file__).parent / "native"
CHECKS = sorted(FOLDER.glob("check_*.c*"))
every_check = pytest.mark.parametrize("check", CHECKS, ids=[check.stem for check in CHECKS])


@every_check
@pytest.mark.parametrize("flags", programs.SANITIZED)
def test_native_cores_pass_under_sanitizers(check, flags):
    programs.run_sanitized(check, flags)


@every_check
@pytest.mark.parametrize(("compiler", "flag", "processor"), programs.ARM)
def test_on_an_emulated_arm_processor(check, compiler, flag, processor):
    programs.run_on_arm(check, compiler, flag, processor)
