"""What is gone is refused in one line, which says since when, and what to use instead."""

import json

import pytest

from gearbx_mlx import GearbxError
from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.gone import GONE, SINCE, gone
from gearbx_mlx.routing.gates import read_thresholds

FLAGS = [name for name in GONE if "--" in name]
FILES = [name for name in GONE if name.startswith("schema")]


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_a_command(command, name):
    own, _, flag = name.rpartition(" --" if not name.startswith("--") else "--")
    flag = f"--{flag}"
    own = own or ("evaluate --data x" if flag.startswith("--policy") else "generate")
    done = command(*own.split(), *flag.split())
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert f"{flag} is gone since gearbx-mlx {SINCE}; {GONE[name]}" in line


@pytest.mark.parametrize("name", FILES)
def test_a_file(name, tmp_path):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"schema": name.split("'")[1], "version": 1}))
    with pytest.raises(GearbxError) as refused:
        read_thresholds(str(file))
    assert str(file) in str(refused.value)
    assert gone(name) in str(refused.value)


def test_what_is_not_gone_is_not_refused():
    assert gone("--gears") is None
    assert {name.split()[0] for name in FLAGS if not name.startswith("--")} <= {*COMMANDS}
