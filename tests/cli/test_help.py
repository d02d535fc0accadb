"""The help of every command: fragments of at most 20 words, each with its default once."""

import argparse
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib import import_module

import pytest

from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.settings import Settings, flag, flags_in

MAX_WORDS = 20
PARSED = [name for name in COMMANDS if name != "lm_eval"]  # whose flags are lm-eval's own


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all flags of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from actions_of(subparser)
        else:
            yield action


@pytest.mark.parametrize("command", PARSED)
def test_help_is_short_fragments_with_the_default_last(command):
    parser = import_module(f"gearbx_mlx.{command}").setup_arg_parser()
    helps = {action.dest: action.help for action in actions_of(parser)}
    assert len(helps) >= 3
    faults = {
        name: text
        for name, text in helps.items()
        if not text
        or len(text.split()) > MAX_WORDS
        or text.endswith(".")
        or "Default:" in text
        or text.count("[default: ") > 1
        or ("[default: " in text and not text.endswith("]"))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("default", "words", "shown"),
    [
        (None, "", "Help"),
        (False, "", "Help"),
        ("", "", "Help"),
        (0.0, "", "Help [default: 0]"),
        ((3, 4), "", "Help [default: 3,4]"),
        (None, "the only one", "Help [default: the only one]"),
    ],
)
def test_flag_appends_the_default(default, words, shown):
    kind = make_dataclass(
        "Some", [("some", object, flag(default, "Help", default_text=words))], bases=(Settings,), frozen=True
    )
    assert flags_in(kind)["some"].metadata["help"] == shown
