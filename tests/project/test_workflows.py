"""CI runs what the README says, and the workflows' commands exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import ROOT

from gearbx_mlx import benchmark

COMMAND = ROOT / ".ci" / "readme_command"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MACOS = ROOT / ".github" / "workflows" / "macos.yml"
RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def steps(file: Path) -> list[dict]:
    """The steps of all jobs that run something."""
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"] if "run" in step]


def commands(file: Path) -> str:
    return "\n".join(step["run"] for step in steps(file))


@pytest.mark.parametrize("name", ["main", "test"])
def test_a_command_of_the_readme(name):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = re.search(rf"<!-- command: {name} -->\n```bash\n(.+?)```", readme, re.DOTALL).group(1)
    assert subprocess.run([COMMAND, name], capture_output=True, text=True, check=True).stdout == expected


def test_missing_readme_command_is_refused():
    assert subprocess.run([COMMAND, "none"], capture_output=True).returncode == 1


@pytest.mark.parametrize("file", [file for file in WORKFLOWS if file != RELEASE], ids=lambda file: file.stem)
def test_a_workflow_runs_both_commands_of_the_readme(file):
    text = commands(file)
    text += (ROOT / ".ci" / "run").read_text(encoding="utf-8") if ".ci/run" in text else ""
    assert {"main", "test"} <= set(re.findall(r"\.ci/readme_command (\w+)", text))


def test_step_fails_without_readme_command(tmp_path):
    (tmp_path / ".ci").mkdir()
    file = tmp_path / ".ci" / "readme_command"
    file.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    file.chmod(0o755)
    scripts = [step["run"] for step in steps(MACOS) if "readme_command" in step["run"]]
    assert len(scripts) == 2
    for script in scripts:  # as on GitHub
        assert subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path).returncode == 1


def test_release_has_kernel_wheels_for_every_python():
    """Of those that pyproject.toml names, on Linux and on macOS."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = {*re.findall(r"Python :: (3\.\d+)", text)}
    release = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))
    assert release["env"] == {"GEARBX_WHEEL": "kernels"}
    assert {*release["jobs"]["linux"]["strategy"]["matrix"]["python"]} == versions
    macos = re.search(r"^\[tool\.cibuildwheel\.macos\].*?\n\n", text, re.MULTILINE | re.DOTALL).group()
    assert {f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", macos)} == versions
    assert 'GEARBX_WHEEL = "kernels"' in macos


def test_mac_workflow_uploads_measurements():
    files = re.findall(r"--json (\S+)", commands(MACOS))
    assert {"mac.json", "mac_own_kernels.json"} <= {*files}
    for job in yaml.safe_load(MACOS.read_text(encoding="utf-8"))["jobs"].values():
        assert [step["with"] for step in job["steps"] if "with" in step][-1]["path"] == "*.json"
    assert all(Path(file).match("*.json") and Path(file).parent == Path() for file in files)


def test_tests_named_in_mac_workflow_exist():
    files = re.findall(r"tests/\S+\.py", commands(MACOS))
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert any("on_metal" in (ROOT / file).read_text(encoding="utf-8") for file in files)


def test_gpu_benchmarks_run_where_gpu_computes():
    for step in steps(MACOS):
        if "benchmark mac" in step["run"] and "--device cpu" not in step["run"]:
            assert re.search(r"(steps.gpu.outputs.computes|env.COMPUTES) == 'yes'", step["if"])


def test_mac_smoke_job_decides_and_others_may_fail():
    smoke, rest = yaml.safe_load(MACOS.read_text(encoding="utf-8"))["jobs"].values()
    assert smoke["timeout-minutes"] <= 10
    assert "continue-on-error" not in smoke
    assert rest["needs"] == "smoke"
    assert rest["continue-on-error"] is True


def test_the_benchmarks_of_the_workflow_parse(monkeypatch):
    lines = re.findall(r"\.venv/bin/gearbx_mlx (benchmark .*)", commands(MACOS))
    assert lines
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        benchmark.setup_arg_parser().settings()
