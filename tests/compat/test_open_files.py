"""mlx-lm's import raises the limit of open files, which a hard limit below its own does not allow."""

import subprocess
import sys

import pytest

resource = pytest.importorskip("resource")

TOLD = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
import gearbx_mlx
gearbx_mlx.load
import mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("hard", "expected"), [(1024, "1024 1024"), (3000, "2048 3000"), (4096, "2048 4096")])
def test_a_low_hard_limit_stays(hard, expected):
    done = subprocess.run([sys.executable, "-c", TOLD.format(hard=hard)], capture_output=True, text=True)
    assert done.stdout.split() == expected.split()
