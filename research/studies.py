"""Shared code of studies: declaration and start, alternating measurements, and tables with machine and date.

A study is a function whose parameters are its flags, and which returns what it `Found`. All studies share two flags:
`--write` puts tables and pictures into docs/, `--json FILE` saves the figures.
"""

import argparse
import ast
import functools
import inspect
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pages import fill, table

from gearbx_mlx.benchmark.measuring import machine_name
from gearbx_mlx.errors import GearbxError, choose
from gearbx_mlx.files.writing import make_directory, write_text
from gearbx_mlx.kernels import cpu
from gearbx_mlx.kernels.compiler import vector_instructions
from gearbx_mlx.telemetry.summary import as_json, finite_json

from . import MODULES, ROOT

DATA = ROOT / "research" / "data"
HELD_OUT = ROOT / "tests" / "data" / "gsm8k_held_out.jsonl"
TALES, OTHER_TALES = DATA / "tales.txt", DATA / "tales_calibrate.txt"
IMAGES = ROOT / "docs" / "images"
OTHER_MODELS = "research/real_models.md"  # the page of what studies find on other models than their own


@dataclass(frozen=True)
class Found:
    """What a study found.

    Attributes:
        tables: Markdown by the name of the block in the page; or a function of the other words of the block's mark.
        data: for JSON.
        pictures: a function that draws into a path, by the name of a file in docs/images.
    """

    tables: Mapping[str, str | Callable[..., str]] = field(default_factory=dict)
    data: Any = None
    pictures: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)

    def of_model(self, name: str) -> "Found":
        """Return the results for a different model than the study's own: tables with its name, and no pictures."""
        tables = {each.removesuffix(f"_{name}") + f"_{name}": text for each, text in self.tables.items()}
        return Found(tables, self.data)


@dataclass(frozen=True)
class Study:
    """measure: its parameters are the flags. pages: those in docs/ with its tables. minutes: on two cores."""

    measure: Callable[..., Found | None]
    pages: tuple[str, ...]
    minutes: float
    writes: str

    @property
    def name(self) -> str:
        return self.measure.__name__.replace("_", "-")


STUDIES: dict[str, Study] = {}


def study(*pages: str, writes: str = "", minutes: float = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a study: the pages of its tables (`docs/x.md`), what else it writes, how long it takes on two cores."""

    def declare(measure: Callable[..., Any]) -> Callable[..., Any]:
        made = Study(measure, pages, minutes, writes)
        STUDIES[made.name] = made
        return measure

    return declare


@functools.cache
def modules_of_studies() -> dict[str, str]:
    """Return the module of each study, by the study's name. None is imported: some need packages of their own."""
    found = {}
    for module in MODULES:
        tree = ast.parse((ROOT / "research" / f"{module}.py").read_text("utf-8"))
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and any(is_study(each) for each in function.decorator_list):
                found[function.name.replace("_", "-")] = module
    return found


def is_study(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == study.__name__


def load(name: str) -> Study:
    """Import the module that declares a study, and not those of others.

    Raises:
        GearbxError: an unknown name, or a package that the study needs and that is not installed.
    """
    modules = modules_of_studies()
    if name not in modules:
        raise GearbxError(f"{name}: no such study; {choose(name, modules)}")
    try:
        import_module(f"research.{modules[name]}")
    except ModuleNotFoundError as missing:
        raise GearbxError(f"{name} needs the package {missing.name}, which is not installed") from missing
    return STUDIES[name]


def load_all() -> None:
    for name in modules_of_studies():
        load(name)


def listed() -> Iterator[str]:
    """Yield a line for each study: its name, how long it takes, what it measures, and what it writes."""
    for name in modules_of_studies():
        try:
            each = load(name)
        except GearbxError as error:
            yield str(error)
            continue
        about = inspect.getdoc(each.measure) or ""
        writes = ", ".join(filter(None, [*each.pages, each.writes]))
        yield f"{name:16} {each.minutes:3g} min  {about.partition(chr(10))[0]} [{writes}]"


def start(name: str, arguments: Sequence[str]) -> None:
    """Run a study with flags. Raises GearbxError as `load`."""
    chosen = load(name)
    given = vars(parser_of(chosen).parse_args(arguments))
    flags = with_real_models(given)
    write, kept = flags.pop("write"), flags.pop("json")
    found = chosen.measure(**flags) or Found()
    model = inspect.signature(chosen.measure).parameters.get("model")
    if model is not None and isinstance(model.default, str) and given["model"] != model.default:
        chosen, found = replace(chosen, pages=(*chosen.pages, OTHER_MODELS)), found.of_model(named(flags["model"]))
    publish(chosen, found, write, kept)


def with_real_models(flags: dict[str, Any]) -> dict[str, Any]:
    """Return flags with the directories of real models in place of their names. Raises GearbxError as `known`."""
    from .real_models import known  # which is a study itself

    found = dict(flags)
    for flag in ("model", "small_model"):
        if isinstance(flags.get(flag), str):
            found[flag] = known(flags[flag])
    if isinstance(flags.get("models"), list):
        found["models"] = [known(name) for name in flags["models"]]
    return found


def named(model: str) -> str:
    """Return a model's name in tables: that of its directory."""
    return Path(model).name


def publish(chosen: Study, found: Found, write: bool, kept: Path | None = None) -> None:
    """Show the tables; write them and the pictures into docs/ if `write`, and the figures into a JSON file."""
    print(*(f"{name}\n{text}" for name, text in found.tables.items() if isinstance(text, str)), sep="\n")
    if kept:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": machine_name()}
        data = found.data if isinstance(found.data, dict) else {"rows": found.data}
        write_text(kept, json.dumps(about | data, indent=2) + "\n")
    if write:
        makers = {name: as_maker(text) for name, text in found.tables.items()}
        for page in chosen.pages:
            fill(ROOT / page, makers)
        for file, draw in found.pictures.items():
            draw(IMAGES / file)


def as_maker(text: str | Callable[..., str]) -> Callable[..., str]:
    return (lambda *_: text) if isinstance(text, str) else text


def parser_of(chosen: Study) -> argparse.ArgumentParser:
    """Return the flags of a study. The text under Args: in its docstring is their help."""
    about = inspect.getdoc(chosen.measure) or ""
    purpose, _, explained = about.partition("\nArgs:\n")
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", explained, re.MULTILINE)
    helps = {name: " ".join(words.split()) for name, words in found}
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m research {chosen.name}", description=purpose, formatter_class=form)
    for parameter in inspect.signature(chosen.measure).parameters.values():
        add_flag(parser, parameter, helps.get(parameter.name, ""))
    parser.add_argument("--write", action="store_true", help=f"Write into {', '.join(chosen.pages) or 'docs/images'}.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Keep the figures.")
    return parser


def add_flag(parser: argparse.ArgumentParser, parameter: inspect.Parameter, explained: str) -> None:
    kind, default = parameter.annotation, parameter.default
    if NoneType in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    options: dict[str, Any] = {"help": explained.replace("%", "%%")}
    if kind is bool:
        options["action"] = "store_true"
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    elif get_origin(kind) is list:
        each = get_args(kind)[0]
        options |= {"nargs": "*", "choices": get_args(each)} if get_args(each) else {"nargs": "*", "type": each}
    else:
        options["type"] = kind
    if default is inspect.Parameter.empty:
        parser.add_argument(parameter.name, **options)
    else:
        shown = "" if default in (None, False, []) else f" Default: {default}"
        options["help"] += shown.replace("%", "%%")
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", default=default, **options)


def results_in_turn(works: Mapping[Any, Callable[[], Any]], trials: int) -> dict[Any, list[Any]]:
    """Return the results of each work in each trial. All alternate within a trial, so other load affects all alike.

    Returns:
        lists as long as `trials`; a first round, the warm-up, is left out.
    """
    rounds = [{name: work() for name, work in works.items()} for _ in range(trials + 1)]
    return {name: [each[name] for each in rounds[1:]] for name in works}


def in_turn(
    works: Mapping[Any, Callable[[], object]],
    trials: int,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[Any, list[float]]:
    """Return seconds of each work in each trial, as of `results_in_turn`.

    Args:
        clock: `time.process_time` counts all threads of this process and no other process.
        before: called before each work, and not timed.
    """

    def seconds(work: Callable[[], object]) -> float:
        before()
        begun = clock()
        work()
        return clock() - begun

    return results_in_turn({name: partial(seconds, work) for name, work in works.items()}, trials)


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Times over other times of the same trials."""
    return [a / b for a, b in zip(times, others, strict=True)]


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the median, and the least and the most of some values."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"


def table_here(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, and where and when its figures were measured."""
    return f"{table(head, rows)}\n{machine_name()}, {time.strftime('%Y-%m-%d')}\n"


def by_kernels(name: str) -> str:
    """Return the name of a table, which has one of its own for kernels with AVX2 alone."""
    return f"{name}_avx2" if vector_instructions() == "AVX2" else name


def native_kernels() -> Any:
    """Return the module of the CPU kernels. Raises GearbxError where there are none."""
    module = cpu.native()
    if module is None:
        raise GearbxError(f"there are no native kernels: {cpu.why_not()}")
    return module


def run_python(*arguments: object, folder: Path = ROOT) -> None:
    """Run Python in the root of the repository, or in another folder. Raises GearbxError if it fails."""
    line = [sys.executable, *map(str, arguments)]
    print("python", *arguments, flush=True)
    if subprocess.run(line, cwd=folder).returncode:
        raise GearbxError(f"{' '.join(line[1:])} failed")


def keep_report(out: Path, report: dict[str, Any], pictures: Mapping[str, Callable[[Path], object]]) -> None:
    """Write a report as evaluation.json, and its pictures, into a directory."""
    make_directory(out)
    write_text(out / "evaluation.json", as_json(finite_json(report)))
    for name, draw in pictures.items():
        draw(out / name)


def read_report(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
