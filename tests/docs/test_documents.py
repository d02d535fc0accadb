"""README and docs are true: every command line and Python block runs as typed, every link leads somewhere.

A line that needs a network or many minutes is only parsed.
"""

import argparse
import functools
import importlib.util
import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
from architectures import installed
from documents import OTHER, PAGES, PARSED, ROOT, RUN, Directory, command_of, parts

from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.loading import DEMO_MODEL
from research.studies import STUDIES, load_all, modules_of_studies, parser_of
from research.studies import load as load_study

REPOSITORY = "https://github.com/gearbx/gearbx-mlx"
LINKED = {**PAGES, "gearbx_mlx/demo_model/README.md": DEMO_MODEL / "README.md"}
OTHERS_FLAGS = {"--logits_all", "--modelfile", "--install"}  # of llama.cpp, Ollama, ...
OTHERS_FLAGS |= {"--force-reinstall", "--no-deps", "--tasks", "--model_args"}  # of pip and lm-eval
OTHERS_FLAGS |= {"--image", "--use-default-chat-template", "--quantize-activations"}  # of mlx_lm.generate


@pytest.mark.docs
@pytest.mark.parametrize("page", dict.fromkeys(line.page for line in RUN))
def test_lines_run_as_typed(page, tmp_path, monkeypatch, command):
    """The lines run in their order, because one writes what the next one reads."""
    monkeypatch.chdir(tmp_path)
    directory = Directory(tmp_path, command)
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        for line in RUN:
            if line.page == page:
                status, err = directory.run(line)
                assert status == 0, f"{line}\n{err[-2000:]}"
                assert "warning" not in err.lower(), f"{line}\n{err}"


@pytest.mark.parametrize("line", [line for line in PARSED if not line.python], ids=str)
def test_unrun_line_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in parts(line):
        if part.startswith("mlx_lm."):
            program, *flags = shlex.split(part)
            import_module(program).configure_parser().parse_args(flags)
            continue
        name, arguments = command_of(part)
        if name == "lm_eval":
            check_lm_eval(arguments)
            continue
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
        parser_of_command(name).settings()


def parser_of_command(name: str) -> argparse.ArgumentParser:
    return import_module(f"gearbx_mlx.{name}").setup_arg_parser()


def check_lm_eval(arguments: str) -> None:
    """The arguments of lm-eval's model are flags of generate, with colons for commas."""
    assert "--model gearbx " in arguments
    (given,) = re.findall(r"--model_args (\S+)", arguments) or [""]
    words = [f"--{pair}".replace(":", ",") for pair in given.split(",") if pair]
    parser_of_command("generate").parse_args(words)


@pytest.mark.parametrize("line", OTHER, ids=str)
def test_other_programs_are_installers_and_existing_scripts(line):
    for part in parts(line):
        words = shlex.split(part)
        while re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words[0] in ("pip", "curl"):
            continue
        if words[0] == "uvx":
            assert words[words.index("--from") + 1] == f"git+{REPOSITORY}"
            program, name, *flags = words[words.index("--from") + 2 :]
            assert program == "gearbx_mlx"
            parser_of_command(name).parse_args(flags)
            continue
        if words[:3] == ["python", "-m", "research"]:
            if len(words) == 3:  # lists the studies
                continue
            if words[4:] == ["--help"]:
                load_study(words[3])
                continue
            parser_of(load_study(words[3])).parse_args(words[4:])
            continue
        assert words[0] == "python", f"{line}: teach this test what it is"
        script = ROOT / words[1]
        assert script.is_file()
        text = script.read_text(encoding="utf-8")
        for word in words[2:]:
            assert not word.startswith("--") or f'"{word}"' in text, f"{words[1]} has no {word}"


OTHER_PAGES = ("tests/README.md", "metal/README.md", "gearbx_mlx/demo_model/README.md")


@pytest.mark.parametrize("name", [*PAGES, *OTHER_PAGES])
def test_modules_and_studies_started_by_pages_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for module, first in re.findall(r"python3? -m (\w[\w.]*)(?:[ \t]+([a-z][\w-]*))?", text):
        package, _, command = module.partition(".")
        if package == "research":
            assert command == "", module
            assert first in {*modules_of_studies(), ""}, f"{module} {first}"
        elif package == "gearbx_mlx":
            assert (command or first) in {*COMMANDS, "COMMAND", ""}, f"{module} {first}"
        else:
            assert importlib.util.find_spec(module), module
    for study in re.findall(r"`research ([a-z][\w-]*)[^`]*`", text):
        assert study in modules_of_studies(), study


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    text = prose(page)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_somewhere(name):
    for link in links(LINKED[name]):
        own = re.match(rf"{REPOSITORY}/(?:blob|raw|tree)/main/(.*)", link)
        if link.startswith(("http:", "https:")) and not own:
            continue
        target, _, anchor = (own[1] if own else link).partition("#")
        path = ROOT / target if own else (LINKED[name].parent / target if target else LINKED[name])
        assert path.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(path), f"{name}: {link}"


def test_the_readme_is_whole_on_pypi():
    """PyPI has no directory around it."""
    for link in links(PAGES["README.md"]):
        assert link.startswith("https://"), link


@functools.cache
def known_flags() -> set[str]:
    load_all()
    studies = [parser_of(each) for each in STUDIES.values()]
    found = {option for parser in studies for action in parser._actions for option in action.option_strings}
    for command in {*COMMANDS} - {"lm_eval"}:
        parsers = [parser_of_command(command)]
        while parsers:
            for action in parsers.pop()._actions:
                found.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_in_page_exists(name):
    codes = [code for code in re.findall(r"`([^`]+)`", prose(PAGES[name])) if not code.startswith("python scripts/")]
    named = {flag for code in codes for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    families = {flag.rstrip("-") for flag in named if flag.endswith("-")}  # --xtc-*
    unknown = {flag for flag in named - known_flags() - OTHERS_FLAGS if flag.rstrip("-") not in families}
    assert not unknown


@pytest.mark.slow
def test_models_page_rows_match_script(monkeypatch):
    """An instance of each class takes too long here."""
    monkeypatch.setattr(sys, "argv", ["describe_models.py", "--check", "llama", "phi3small", "nemotron_h", "olmo"])
    with pytest.raises(SystemExit) as stopped:
        import_module("describe_models").main()
    assert stopped.value.code == 0


def test_every_mlx_lm_class_has_models_page_row():
    rows = [line.split("`")[1] for line in PAGES["docs/models.md"].read_text().splitlines() if line.startswith("| `")]
    assert rows == sorted(rows, key=str.lower)
    assert set(installed()) <= set(rows)
