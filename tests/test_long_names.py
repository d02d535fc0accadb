"""File names that are too long for any file system, wherever a command reads or writes one."""

from pathlib import Path

import pytest
from test_bad_input import assert_refused

LONG = "x" * 5000
DATA = Path(__file__).parent / "data" / "gsm8k_held_out.jsonl"


@pytest.mark.some(9)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("generate", ("--thresholds", LONG)),
        ("generate", ("--manifest", LONG)),
        ("generate", ("--summary", LONG)),
        ("generate", ("--trace", LONG)),
        ("generate", ("--prompt-cache-file", LONG)),
        ("generate", ("--model", LONG)),
        ("generate", ("--small-model", LONG)),
        ("generate", ("--base", LONG)),
        ("generate", ("--adapter-path", LONG)),
        ("analyze", ("--prompts", LONG)),
        ("analyze", ("--prompts", DATA, "--out", LONG)),
        ("calibrate", ("--out", LONG)),
        ("calibrate", ("--prompts", LONG)),
        ("convert", ("--mlx-path", LONG)),
        ("convert", ("--model", LONG)),
        ("convert", ("--manifest", LONG)),
        ("evaluate", ("--data", LONG)),
        ("evaluate", ("--data", DATA, "--out", LONG, "--tokens", 4, "--context", 4)),
        ("sensitivity", ("--out", LONG)),
        ("sensitivity", ("--data", LONG)),
        ("allocate", ("--manifest", LONG)),
        ("benchmark", ("decode", "--json", LONG)),
    ],
)
def test_are_refused_in_one_line(command, tmp_path, monkeypatch, name, arguments):
    monkeypatch.chdir(tmp_path)
    assert_refused(command(name, *arguments), "x" * 100)
    assert not list(tmp_path.iterdir())
