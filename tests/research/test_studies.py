"""Every study and every script of the project starts: it imports what it needs and shows its flags."""

import importlib
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from pages import fill, table

from gearbx_mlx import GearbxError
from research import MODULES, studies
from research.studies import Found, Study, listed, modules_of_studies, parser_of, publish, start

ROOT = Path(__file__).parents[2]
MAY_BE_MISSING = ("llama_cpp", "gguf", "torch", "torch.nn", "transformers", "tokenizers", "selenium")
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
PARTS = [path for path in sorted((ROOT / "scripts").rglob("*.py")) if path not in SCRIPTS]


@pytest.fixture
def stand_ins(monkeypatch):
    """A stand-in for a package that is not installed."""
    for name in MAY_BE_MISSING:
        try:
            importlib.import_module(name)
        except ImportError:
            monkeypatch.setitem(sys.modules, name, MagicMock())


@pytest.fixture
def nothing_imported(monkeypatch):
    """As in a new process: no module with a study is imported."""
    for name in {f"research.{module}" for module in MODULES} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(studies, "STUDIES", {})


@pytest.mark.parametrize("name", modules_of_studies())
def test_a_study_shows_its_flags(name, nothing_imported, monkeypatch, capsys):
    if modules_of_studies()[name] != "pictures":
        monkeypatch.setitem(sys.modules, "research.pictures", None)  # the one that needs a server's packages
    with pytest.raises(SystemExit) as ended:
        start(name, ["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m research {name} ")
    assert "--write" in shown


def test_unknown_study_name(nothing_imported):
    with pytest.raises(GearbxError) as error:
        start("xyz", [])
    assert str(error.value).startswith("xyz: no such study; choose from figures, ")
    assert ", rows, " in str(error.value)
    assert not studies.STUDIES


def test_missing_package_stops_only_its_own_studies(nothing_imported, monkeypatch):
    monkeypatch.delitem(sys.modules, "asked_servers", raising=False)  # which needs httpx
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(GearbxError, match=r"^server needs the package httpx, which is not installed$"):
        start("server", ["--help"])
    lines = [*listed()]
    assert "server needs the package httpx, which is not installed" in lines
    assert any(line.startswith("rows ") for line in lines)


def test_every_module_of_research_is_known():
    files = {path.stem for path in (ROOT / "research").glob("*.py")}
    own = {"__init__", "__main__", "studies", "on_rank"}
    assert files - own == {*MODULES}
    for name in own - {"__main__"}:
        importlib.import_module(f"research.{name}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_shows_its_flags(path, stand_ins, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_a_part_of_a_script_is_imported(path, stand_ins, monkeypatch):
    monkeypatch.setenv("GEARBX_WRAPPER", "mlx-lm")
    if path.stem == "plugin":
        pytest.skip("it changes mlx-lm; test_scripts.py runs it")
    importlib.import_module(".".join(path.relative_to(ROOT / "scripts").with_suffix("").parts))


def test_flags_are_the_parameters():
    def measure(file: Path, sizes: list[int] = [1], fast: bool = False, temp: float = 0.5) -> None:  # noqa: B006
        """What it measures.

        Args:
            file: One that is read,
                line by line.
        """

    parser = parser_of(Study(measure, ("docs/x.md",), 1, ""))
    found = vars(parser.parse_args(["x.txt", "--sizes", "2", "3", "--fast"]))
    assert found.pop("write") is False
    assert found.pop("json") is None
    assert found == {"file": Path("x.txt"), "sizes": [2, 3], "fast": True, "temp": 0.5}
    assert "One that is read, line by line." in " ".join(parser.format_help().split())


def test_tables_go_to_page_and_figures_to_file(tmp_path, monkeypatch, capsys):
    page = tmp_path / "x.md"
    page.write_text("<!-- some -->\nold\n<!-- end -->\n<!-- other 5 -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "IMAGES", tmp_path)
    some = table(["a"], [[1]])
    found = Found({"some": some, "other": lambda word: f"{word}!\n"}, [1], {"p.png": lambda path: path.write_text("p")})
    study = Study(lambda: found, ("x.md",), 1, "")
    publish(study, found, write=True, kept=tmp_path / "x.json")
    assert page.read_text() == f"<!-- some -->\n{some}<!-- end -->\n<!-- other 5 -->\n5!\n<!-- end -->\n"
    assert (tmp_path / "p.png").read_text() == "p"
    assert studies.read_report(tmp_path / "x.json")["rows"] == [1]
    assert some in capsys.readouterr().out


def test_tables_of_other_model_leave_default_ones(tmp_path, monkeypatch):
    page = tmp_path / "x.md"
    page.write_text("<!-- some -->\nold\n<!-- end -->\n")
    other = tmp_path / studies.OTHER_MODELS
    other.parent.mkdir()
    other.write_text("<!-- some_tiny-0.5b -->\nold\n<!-- end -->\n")

    def measure(model: str = "usual") -> Found:
        return Found({"some": f"{model}!\n"}, pictures={"p.png": lambda path: path.write_text(model)})

    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "IMAGES", tmp_path)
    monkeypatch.setattr(studies, "load", lambda name: Study(measure, ("x.md",), 1, ""))
    start("measure", ["--model", "models/tiny-0.5b", "--write"])
    assert page.read_text() == "<!-- some -->\nold\n<!-- end -->\n"
    assert other.read_text() == "<!-- some_tiny-0.5b -->\nmodels/tiny-0.5b!\n<!-- end -->\n"
    start("measure", ["--write"])
    assert page.read_text() == "<!-- some -->\nusual!\n<!-- end -->\n"
    assert (tmp_path / "p.png").read_text() == "usual"


def test_a_block_without_figures_stays(tmp_path, capsys):
    def missing() -> str:
        raise FileNotFoundError(2, "none", "report.json")

    page = tmp_path / "x.md"
    page.write_text("<!-- some -->\nold\n<!-- end -->\n")
    fill(page, {"some": missing})
    assert "old" in page.read_text()
    assert "report.json" in capsys.readouterr().out
