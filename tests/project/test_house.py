"""The house: where code is, how long it is, what is loaded before a command needs it, and what runs without extras."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import gearbx_mlx
from gearbx_mlx.__main__ import COMMANDS

PACKAGE = Path(gearbx_mlx.__file__).parent
SCRIPTS = Path(__file__).parents[2] / "scripts"
TESTS = Path(__file__).parents[1]
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES |= {f"scripts/{path.relative_to(SCRIPTS).as_posix()}": path for path in sorted(SCRIPTS.rglob("*.py"))}
PARSED = [name for name in COMMANDS if name != "lm_eval"]  # whose flags are lm-eval's own


def functions(path: Path) -> dict[str, int]:
    """Name of every function of a module to its number of lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return {node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, kinds)}


def test_no_module_is_longer_than_800_lines():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 800} == {}


@pytest.mark.slow
def test_no_function_is_longer_than_60_lines():
    lengths = [(n, f, lines) for n, path in MODULES.items() for f, lines in functions(path).items()]
    assert [found for found in lengths if found[2] > 60] == []


def test_test_names_have_three_to_eight_words():
    names = [name for path in TESTS.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))]
    assert len(names) > 1000
    assert [name for name in names if not 3 <= name.count("_") <= 8] == []


def test_class_names_are_unique_in_package():
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_imports_go_in_a_circle():
    graph = grimp.build_graph("gearbx_mlx")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_top_level_holds_only_commands():
    others = {"__init__", "__main__", "errors", "loading", "settings"}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - others
    assert modules | {path.parent.name for path in PACKAGE.glob("*/__main__.py")} == {*COMMANDS}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", PARSED)
def test_command_is_parsed_before_mlx_lm_loads(name):
    """So --help answers at once."""
    code = f"import sys; sys.argv = ['x', '--help']; from gearbx_mlx.{name} import main; main()"
    code = f"import atexit, sys; atexit.register(lambda: print('mlx_lm' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m gearbx_mlx.{name}")
    assert done.stdout.endswith("False\n")


def test_every_export_is_there_and_has_a_docstring():
    assert len(gearbx_mlx.__all__) > 20
    for name in gearbx_mlx.__all__:
        assert getattr(gearbx_mlx, name).__doc__, name


def test_generate_needs_no_web():
    code = "import sys, gearbx_mlx.generate.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"fastapi", "starlette", "uvicorn", "pydantic"} & set(done.stdout.split())


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
@pytest.mark.parametrize("name", PARSED)
def test_every_command_shows_its_help_without_extras(name):
    done = without_extras(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"gearbx_mlx {name}" in done.stdout.partition("\n")[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("server",), "server: "),
        (("server", "--server", "http://127.0.0.1:9", "--server-model", "a,b"), "server: "),
        (("analyze", "--server", "http://127.0.0.1:9", "--prompts", "prompts.txt"), "analyze --server: "),
        (("lm_eval", "--tasks", "x"), "lm_eval: lm_eval is not installed"),
    ],
)
def test_missing_extra_names_its_install_command(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("Hello\n")
    done = without_extras(*arguments)
    extra = "lm-eval" if arguments[0] == "lm_eval" else "server"
    install = f"pip install 'gearbx-mlx[{extra}]' (in a clone: pip install '.[{extra}]')"
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.endswith(f" is not installed; use {install}\n")
    assert done.stderr.count("\n") == 1
