"""What the package does without the modules of its extras: it imports, shows help, and says what installs them."""

import subprocess
import sys

import pytest

from gearbx_mlx.__main__ import COMMANDS

SERVER = ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance", "httpx", "httpx_sse")
BLOCKED = f"""
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {(*SERVER, "lm_eval")}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Blocked())
sys.argv = ["gearbx_mlx", *sys.argv[1:]]
runpy.run_module("gearbx_mlx", run_name="__main__")
"""


def without_extras(*arguments: str) -> subprocess.CompletedProcess:
    """Run the program without the modules of these extras."""
    return subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lm_eval"])
def test_every_command_shows_its_help(name):
    done = without_extras(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"gearbx_mlx {name}" in done.stdout.partition("\n")[0]


@pytest.mark.slow
def test_a_text_is_written():
    done = without_extras("generate", "--max-tokens", "2", "--verbose", "False")
    assert (done.returncode, done.stdout != "") == (0, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("server",), "server needs"),
        (("server", "--server", "http://127.0.0.1:9", "--server-model", "a,b"), "server needs"),
        (("analyze", "--server", "http://127.0.0.1:9", "--prompts", "prompts.txt"), "analyze --server needs"),
        (("lm_eval", "--tasks", "x"), "lm_eval needs lm_eval"),
    ],
)
def test_what_needs_an_extra_says_what_installs_it(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("Hello\n")
    done = without_extras(*arguments)
    extra = "lm-eval" if arguments[0] == "lm_eval" else "server"
    install = f"pip install 'gearbx-mlx[{extra}]' (in a clone: pip install '.[{extra}]')"
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.endswith(f", which is not installed: {install}\n")
    assert done.stderr.count("\n") == 1
