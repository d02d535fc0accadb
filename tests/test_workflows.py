"""What CI runs is what the README says, and the workflows' commands exist."""

import re
import shlex
import subprocess
import sys

import pytest
import yaml
from documents import ROOT

from gearbx_mlx.cli.parsers import benchmark

COMMAND = ROOT / ".ci" / "readme_command"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow: dict) -> str:
    return "\n".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])


@pytest.mark.parametrize("name", ["main", "test"])
def test_a_command_of_the_readme(name):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = re.search(rf"<!-- command: {name} -->\n```bash\n(.+?)```", readme, re.DOTALL).group(1)
    assert subprocess.run([COMMAND, name], capture_output=True, text=True, check=True).stdout == expected


def test_a_command_that_the_readme_lacks():
    assert subprocess.run([COMMAND, "none"], capture_output=True).returncode == 1


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_both_commands_of_the_readme(file):
    text = commands(yaml.safe_load(file.read_text(encoding="utf-8")))
    text += (ROOT / ".ci" / "run").read_text(encoding="utf-8") if ".ci/run" in text else ""
    assert {"main", "test"} <= set(re.findall(r"\.ci/readme_command (\w+)", text))


def test_the_benchmarks_of_the_workflow_parse(monkeypatch):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "macos.yml").read_text(encoding="utf-8"))
    assert [job["runs-on"] for job in workflow["jobs"].values()] == ["macos-15"]
    lines = re.findall(r"\.venv/bin/gearbx_mlx (benchmark .*)", commands(workflow))
    assert lines
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        benchmark.parse()
