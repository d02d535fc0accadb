"""Chats in a terminal, with keys."""

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory
from pseudo_terminal import PseudoTerminal
from scripted_model import save_endless

from gearbx_mlx.chat.run import history_file

pytestmark = pytest.mark.processes

CHAT = [sys.executable, "-m", "gearbx_mlx.chat", "--gears", "3,16"]
DONE = r"\d+ prefilled, \d+ generated[^\n]*/token\n"
STOPPED = r"\d+ prefilled, (\d+) generated \(stopped\)"
ENDLESS = "100000"  # tokens


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """A model whose answers never end by themselves."""
    model = tmp_path_factory.mktemp("models") / "endless"
    save_endless(model)
    return model


@pytest.fixture
def state(tmp_path) -> dict[str, str]:
    """The environment of a user without a history."""
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def history(state: dict[str, str]) -> Path:
    return Path(state["XDG_STATE_HOME"]) / "gearbx-mlx" / "chat_history"


def opened(state: dict[str, str], *flags: str) -> PseudoTerminal:
    terminal = PseudoTerminal([*CHAT, "-m", "8", *flags], state)
    terminal.expect("Ctrl-D ends the chat\n")
    terminal.expect(">>")
    return terminal


def say(terminal: PseudoTerminal, keys: str, reply: str) -> None:
    """Type something, and wait for its reply and for the next prompt."""
    terminal.type(keys)
    terminal.expect(reply)
    terminal.expect(">>")


def leave(terminal: PseudoTerminal) -> None:
    terminal.type("\x04")
    assert terminal.ends() == 0
    assert terminal.is_cooked()


def test_answer_is_tinted_and_summary_dim(state):
    with opened(state, "--gears", "4,16", "--mode", "static", "--gear", "low") as terminal:
        terminal.type("Tom has 3 apples.\r")
        line = terminal.expect(DONE)[0]
        terminal.expect(">>")
        leave(terminal)
    assert len(line) < 80
    assert "low 100%" in line
    assert "\x1b[38;2;90;100;211m" in terminal.shown  # the low gear's colour
    assert "\x1b[2m" in terminal.shown
    assert terminal.text.count("/token\n") == 1


def test_pasted_lines_are_one_message(state, tmp_path):
    with opened(state) as terminal:
        say(terminal, "\x1b[200~one é漢🙂\ntwo\tthree\x1b[201~\r", DONE)
        say(terminal, f"/save {tmp_path / 'said.jsonl'}\r", "saved in")
        terminal.type("/exit\r")
        assert terminal.ends() == 0
    asked = json.loads((tmp_path / "said.jsonl").read_text().splitlines()[0])
    assert asked == {"role": "user", "content": "one é漢🙂\ntwo\tthree"}


def test_empty_line_is_ignored_and_ctrl_c_clears(state):
    with opened(state, "--no-history") as terminal:
        terminal.type("\r")
        terminal.expect(">>")
        terminal.type("   \r")
        terminal.expect(">>")
        terminal.type("nobody reads this")
        terminal.expect("nobody reads this")
        terminal.interrupt()
        terminal.expect("Ctrl-D or /exit ends the chat\n")
        terminal.expect(">>")
        leave(terminal)
    assert "read, " not in terminal.text
    assert not history(state).exists()


def test_ctrl_c_stops_answer_and_chat_continues(state, endless):
    with opened(state, "--model", str(endless), "-m", ENDLESS) as terminal:
        for _ in range(2):
            terminal.type("Tom has 3 apples.\r")
            terminal.expect("\n[^\n]{12}")  # of the answer
            terminal.interrupt()
            assert int(terminal.expect(STOPPED)[1]) > 0
            terminal.expect(">>")
        leave(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [False, True], ids=["typing", "answering"])
def test_other_signals_end_chat_and_restore_terminal(state, endless, number, answering):
    with opened(state, "--model", str(endless), "-m", ENDLESS) as terminal:
        terminal.type("Tom has 3 apples.")
        terminal.expect("apples")
        if answering:
            terminal.type("\r")
            terminal.expect("\n[^\n]{12}")
        terminal.signal(number)
        assert terminal.ends() == 128 + number
        assert terminal.is_cooked()
    assert "Traceback" not in terminal.text


class TestHistory:
    def test_lines_return_in_next_chat_and_stay_private(self, state):
        with opened(state) as terminal:
            say(terminal, "Tom has 3 apples.\r", DONE)
            leave(terminal)
        assert "+Tom has 3 apples.\n" in history(state).read_text()
        assert stat.S_IMODE(history(state).stat().st_mode) == 0o600
        with opened(state) as terminal:
            terminal.type("\x1b[A\r")  # the key that goes up
            terminal.expect("Tom has 3 apples")
            terminal.expect(DONE)
            terminal.expect(">>")
            leave(terminal)

    def test_file_readable_by_others_is_made_private(self, state, monkeypatch):
        history(state).parent.mkdir(parents=True)
        history(state).write_text("")
        history(state).chmod(0o666)
        monkeypatch.setenv(*next(iter(state.items())))
        assert history_file() == history(state)
        assert stat.S_IMODE(history(state).stat().st_mode) == 0o600


class TestWithoutPromptToolkit:
    @pytest.fixture
    def without(self, tmp_path) -> Callable[..., dict[str, str]]:
        """The environment of a Python without some packages."""

        def environment(state: dict[str, str], *packages: str) -> dict[str, str]:
            for package in packages:
                (tmp_path / f"{package}.py").write_text("raise ImportError('not installed')")
            return state | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

        return environment

    def test_readline_keeps_the_same_history_and_completes(self, state, without):
        history(state).parent.mkdir(parents=True)
        history(state).write_text("\n# 2026-11-28 10:00:00\n+Tom has 3 apples.\n")
        with opened(without(state, "prompt_toolkit")) as terminal:
            assert "prompt_toolkit" not in terminal.text
            terminal.type("\x1b[A\r")  # the key that goes up
            terminal.expect("Tom has 3 apples")
            terminal.expect(DONE)
            terminal.expect(">>")
            say(terminal, "/ge\tlo\t\r", "every token in gear low\n")
            terminal.type("nobody reads this")
            terminal.expect("nobody reads this")
            time.sleep(0.1)  # Python's readline waits for keys without a look at signals that came just before
            terminal.interrupt()
            terminal.expect("Ctrl-D or /exit ends the chat\n")
            terminal.expect(">>")
            leave(terminal)
        assert [*FileHistory(str(history(state))).load_history_strings()] == ["/gear low ", *["Tom has 3 apples."] * 2]
        assert stat.S_IMODE(history(state).stat().st_mode) == 0o600

    def test_nor_readline_lines_are_read_as_they_come(self, state, endless, without):
        with opened(without(state, "prompt_toolkit", "readline"), "--model", str(endless), "-m", ENDLESS) as terminal:
            assert "pip install prompt_toolkit" in terminal.text
            terminal.type("Tom has 3 apples.\n")
            terminal.expect("\n[^\n]{12}")
            terminal.interrupt()
            terminal.expect(STOPPED)
            terminal.expect(">>")
            time.sleep(0.1)
            terminal.interrupt()
            terminal.expect("Ctrl-D or /exit ends the chat\n")
            leave(terminal)
