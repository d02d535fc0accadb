"""What the commands write on stderr: progress, tables, errors."""

import io
import re
import sys
import time
from functools import partialmethod

import pytest
from conftest import Clock
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused
from rich.cells import cell_len
from rich.console import Console

from gearbx_mlx.cli import terminal as progress_module
from gearbx_mlx.cli.tables import pair_table, summary_table
from gearbx_mlx.cli.terminal import ProgressLines, PromptBar, TintedText, WrappedText, progress_bar
from gearbx_mlx.decoding.modes import KICKDOWN, MODES, PAIR, ROUTE, mode_class
from gearbx_mlx.errors import GearbxError, OutputLost
from gearbx_mlx.gears import sources
from gearbx_mlx.routing.pair import NAMES
from gearbx_mlx.settings import human_bytes
from gearbx_mlx.telemetry.summary import draft_rows


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log(width: int = 80) -> Console:
    """A console that writes to a file, like a redirected stderr."""
    return Console(file=io.StringIO(), width=width)


class TestProgress:
    def lines(self, clock: Clock, seconds: float, items: int) -> list[str]:
        console = log()
        with ProgressLines(console, False, clock) as progress:
            for _ in progress.track(range(items), description="layers"):
                clock.now += seconds
        return console.file.getvalue().splitlines()

    def test_log_gets_line_after_two_seconds_then_ten(self, clock):
        assert self.lines(clock, 1.0, 25) == ["layers: 2 of 25", "layers: 12 of 25", "layers: 22 of 25"]
        assert self.lines(clock, 0.1, 19) == []

    def test_bytes_are_written_as_bytes(self, clock):
        console = log()
        with ProgressLines(console, True, clock) as progress:
            task = progress.add_task("converting", total=4e9)
            clock.now = 3
            progress.advance(task, 1.5e6)
        assert console.file.getvalue() == "converting: 1.5 MB of 4 GB\n"

    def test_encoding_is_counted_in_bytes(self, monkeypatch):
        console = log()
        monkeypatch.setattr(progress_module, "messages", console)
        monkeypatch.setattr(progress_module, "SHORT_SECONDS", 0.0)
        monkeypatch.setattr(sources, "while_encoding", None)
        progress_module.show_encoding()
        with sources.while_encoding(4_000_000) as advance:
            advance(1_500_000)
        assert console.file.getvalue() == "encoding: 1.5 MB of 4 MB\n"

    def test_terminal_bar_vanishes_and_stdout_keeps_lines(self, capsys):
        console = Console(file=Screen(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
        with progress_bar(console=console) as progress:
            for _ in progress.track(range(3), description="layers"):
                print("a row")
        written = console.file.getvalue()
        assert "layers" in written
        assert "3/3" in written
        assert written.endswith("\x1b[2K")  # the line is erased
        assert capsys.readouterr().out == "a row\n" * 3
        assert "a row" not in written

    @pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
    def test_a_file_gets_no_bar(self, environment):
        console = Console(file=io.StringIO(), _environ=environment)
        with progress_bar(console=console) as progress:
            for _ in progress.track(range(3)):
                pass
        assert console.file.getvalue() == ""


class TestPrompts:
    """How far a prompt is read."""

    def told(self, clock: Clock, console: Console, *steps: tuple[float, int], seconds: float = 0.0) -> str:
        with PromptBar(console, clock) as bar:
            bar.update(0, 100)
            time.sleep(seconds)
            for step, read in steps:
                clock.now += step
                bar.update(read, 100)
        return console.file.getvalue()

    def test_log_gets_tokens_per_second(self, clock, monkeypatch):
        monkeypatch.setattr(ProgressLines, "__init__", partialmethod(ProgressLines.__init__, clock=clock))
        lines = self.told(clock, log(), (1, 10), (2, 60), (11, 98), (1, 100)).splitlines()
        assert lines == ["prefill, 20 tokens/s: 60 of 100", "prefill, 7 tokens/s: 98 of 100"]
        assert self.told(clock, log(), (0.5, 50), (0.5, 100)) == ""

    def test_terminal_bar_appears_before_first_part(self, clock, monkeypatch):
        monkeypatch.setattr(progress_module, "SHORT_SECONDS", 0.01)
        console = Console(file=Screen(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
        shown = self.told(clock, console, (4, 60), (1, 100), seconds=0.3)
        assert "prefill" in shown
        assert "0/100" in shown
        assert shown.endswith("\x1b[2K")  # the line is erased

    def test_both_commands_show_it(self, command, monkeypatch):
        shares = []
        monkeypatch.setattr(PromptBar, "update", lambda bar, read, tokens: shares.append(read / tokens))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Tom has 3 apples.\n")))
        for name in ("generate", "chat"):
            shares.clear()
            assert command(name, "--prefill-step-size", 4, "-m", 4).status == 0
            assert 0 < shares[1] < shares[-1] == 1


class Screen(io.StringIO):
    """A terminal that understands text, line ends, colours, moving back and erasing."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        lines = [""]
        for part in re.split(r"(\x1b\[[\d;]*[A-Za-z]|\n)", self.getvalue()):
            if part == "\n":
                lines.append("")
            elif part.endswith("D") and part.startswith("\x1b"):
                kept = cell_len(lines[-1]) - int(part[2:-1])
                while cell_len(lines[-1]) > kept:  # what is erased next
                    lines[-1] = lines[-1][:-1]
            elif not part.startswith("\x1b"):
                lines[-1] += part
        return lines


@given(
    st.lists(st.text("abc \n漢", max_size=7), max_size=40),
    st.integers(6, 30),
    st.sampled_from(["FORCE_COLOR", "NO_COLOR"]),
)
def test_lines_break_between_words_however_they_come(pieces, columns, color):
    screen = Screen()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", screen)
        patched.setenv("COLUMNS", str(columns))
        patched.setenv("TERM", "xterm-256color")
        patched.setenv(color, "1")
        out = WrappedText(["low", "high"])
        for number, piece in enumerate(pieces):
            out.write(piece, ("low", "high")[number % 2])
    lines, words = screen.lines(), "".join(pieces).split()
    assert all(cell_len(line) < columns for line in lines)
    assert "".join("".join(lines).split()) == "".join(words)
    if all(cell_len(word) < columns for word in words):
        assert [word for line in lines for word in line.split()] == words


def test_file_gets_unchanged_lines(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    WrappedText(["low"]).write("word " * 100, "low")
    assert written.getvalue() == "word " * 100


class TestMessages:
    """What is said in the middle of a text."""

    @staticmethod
    def screen(monkeypatch) -> Screen:
        """Text and messages on one terminal. Made in the test, since pytest takes stdout back before it."""
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(progress_module, "messages", Console(file=screen, force_terminal=True, width=80))
        return screen

    @staticmethod
    def write(text: str, error: BaseException | None = None) -> None:
        """A text in which something is said, and that an error ends."""
        out = TintedText(["low"])
        with out.whole():
            out.write(text, "low")
            progress_module.note("said")
            if error is not None:
                raise error

    @pytest.mark.parametrize("kind", [TintedText, WrappedText])
    def test_wait_for_its_end(self, monkeypatch, kind):
        screen = self.screen(monkeypatch)
        out = kind(["low"])
        with out.whole():
            progress_module.note("before")
            out.write("find nectar by", "low")
            progress_module.warn("no table meets 9 tokens/s")
            progress_module.note("compiled")
            with progress_bar() as progress:
                list(progress.track(range(3)))
            out.write(" smell.", "low")
        progress_module.note("after")
        lines = ["before", "find nectar by smell.", "warning: no table meets 9 tokens/s", "compiled", "after", ""]
        assert screen.lines() == lines

    @pytest.mark.parametrize("error", [GearbxError("a layer is NaN"), KeyboardInterrupt()])
    def test_wait_until_error(self, monkeypatch, error):
        screen = self.screen(monkeypatch)
        with pytest.raises(type(error)):
            self.write("find nectar by", error)
        progress_module.print_error("a layer is NaN")
        assert screen.lines() == ["find nectar by", "said", "error: a layer is NaN", ""]

    def test_are_shown_after_lost_output(self, monkeypatch):
        screen = self.screen(monkeypatch)

        def lost(*_: object, **how: object) -> None:
            raise OutputLost("No space left on device")

        monkeypatch.setattr("builtins.print", lost)
        with pytest.raises(OutputLost):
            self.write("find")
        assert "said" in screen.lines()[-2]


SUMMARY = {"model": "[bold]mine", "mode": "lossless", "tokens": 20, "tokens_per_second": 10.0, "seconds": 2.1}
SUMMARY |= {"ladder": [{"name": "low", "bits": 4}, {"name": "high", "bits": 16}], "gear_tokens": {"low": 10, "high": 5}}
SUMMARY |= {"prompt_tokens": 5, "prompt_tokens_per_second": 50.0, "seconds_to_first_token": 0.1, "lookup_accepted": 5}
SUMMARY |= {"shifts": 3, "shift_seconds": 0.0015, "making_seconds": 0.25, "mean_entropy_bits": 1.234}
SUMMARY |= {"effective_bits_per_weight": 7.5, "weight_bytes_per_token": 5e6, "weight_bytes_per_token_top": 10e6}
SUMMARY |= {"peak_memory_bytes": 3e7, "active_memory_bytes": {"high": 2e7}, "managed_layers": 43}
SUMMARY |= {"unmanaged_layers": 1, "unmanaged_reasons": {"its [odd] width": 1}}
SUMMARY |= {"compute_dtype": "float32", "storage_dtype": "bfloat16"}


def shown(table: object) -> list[str]:
    """The lines of a table without their padding."""
    console = log(200)
    console.print(table)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


class TestTables:
    def test_summary_keeps_figures_and_names(self):
        lines = "\n".join(shown(summary_table(SUMMARY, [("drafts", "18 drafted, 17 accepted")])))
        figures = "[bold]mine, mode lossless, 20 tok, 10 tok, 5 tok, 50 tok, 0.10 s, 2.10 s, low (4 bits) 50%"
        figures += ", high (16 bits) 25%, prompt lookup 25%, 18 drafted, 5 MB, 10 MB, 2.00, 30 MB, 43 change gear"
        for figure in (*figures.split(", "), "1: its [odd] width"):
            assert figure in lines

    def test_shows_drafted_and_accepted_tokens(self):
        found = {"drafted": 8, "accepted": 6, "lookup_drafted": 4, "lookup_accepted": 1, "near_ties": 0}
        proposed = "8 drafted, 6 accepted (75%); 4 by prompt lookup, 1 accepted (25%)"
        assert draft_rows(found | {"tokens": 9}) == [("drafts", proposed)]
        assert draft_rows(dict.fromkeys(found, 0) | {"tokens": 9}) == [("drafts", "none (plain decoding)")]
        assert draft_rows({"tokens": 9}) == []

    def test_unused_sources_have_no_row(self):
        nothing = SUMMARY | {"tokens": 0, "gear_tokens": {"low": 0, "high": 0}, "lookup_accepted": 0}
        nothing |= {"weight_bytes_per_token": 0, "drafted": 0, "accepted": 0}
        lines = "\n".join(shown(summary_table(nothing, draft_rows(nothing))))
        assert "0 tokens" in lines
        assert not [name for name in ("tokens from", "drafts", "weights read") if name in lines]

    def test_low_gear_drafts_in_lossless_and_generates_elsewhere(self):
        for mode, low in (("lossless", "drafts of low (4 bits) 50%"), ("route", "tokens from low (4 bits) 50%")):
            assert low in "\n".join(shown(summary_table(SUMMARY | {"mode": mode}, [])))

    def test_a_draft_model_has_its_tokens(self):
        beside = SUMMARY | {"draft_model": {"name": "small"}, "accepted": 4, "gear_tokens": {"low": 0, "high": 15}}
        lines = "\n".join(shown(summary_table(beside, [])))
        assert "drafts of small 20%" in lines
        assert "high (16 bits) 55%" in lines

    @pytest.mark.parametrize(("stored", "said"), [([3, 3], "low (3 bits)"), ([2, 4], "low (2 to 4 bits)")])
    def test_a_gear_has_the_bits_of_its_layers(self, stored, said):
        low, high = SUMMARY["ladder"]
        assert said in "\n".join(shown(summary_table(SUMMARY | {"ladder": [low | {"layer_bits": stored}, high]}, [])))

    def test_one_gear_changes_no_layer(self):
        lines = "\n".join(shown(summary_table(SUMMARY | {"ladder": SUMMARY["ladder"][:1]}, [])))
        assert "43 have the bits of the gear, 1 are unchanged" in lines

    @pytest.mark.parametrize("mode", [*MODES])
    def test_has_twelve_rows_at_most(self, mode):
        """With everything that a run may have beside its text."""
        controller = {"target_tps": None, "cap_changes": 0, "capped_bits_per_weight": 8.0, "machine": {}}
        possible = SUMMARY | {"mode": mode, "drafted": 9, "accepted": 5, "near_ties": 2, "recomputed": 3}
        possible |= {"seconds_in_rounds": 1.0, "plain_seconds": 2.0, "kv_bytes_per_pass": {"4": 1e6, "16": 4e6}}
        possible |= {"streaming": {"disk_bytes_per_token": 1, "disk_bytes_per_second": 1}}
        if mode in (ROUTE, KICKDOWN):
            possible |= {"controller": controller | {"out_of_reach": None}}
            del possible["drafted"]  # a controller cannot time drafts
        if mode == PAIR:
            possible |= {"small_model": "tiny", "shares": dict.fromkeys(NAMES, 0.5)}
            possible |= {"parameters": dict.fromkeys(NAMES, 1), "parameter_ratio": 1.0}
            possible |= {"threshold_bits": 1.0, "caught_up_tokens": 4}
        rows = mode_class(mode).rows(None, possible)
        table = (pair_table if mode == PAIR else summary_table)(possible, rows)
        assert 8 <= table.row_count <= 12


def test_bytes_are_in_powers_of_ten():
    found = [human_bytes(count) for count in (0, 999, 1234567, 5e9, 1.5e12)]
    assert found == ["0 B", "999 B", "1.23 MB", "5 GB", "1.5 TB"]


def test_control_characters_in_names_are_escaped(command):
    for name, shown in {"a\nb": r"a\nb", "a\x1b[2Jb": r"a\x1b[2Jb", "a\r\u2028b": r"a\r\u2028b"}.items():
        result = command("analyze", "--prompts", name)
        assert_refused(result, f"{shown}: cannot be read as text")
        assert result.err.count("\n") == 1
        assert "\x1b[2J" not in result.err
    assert_refused(command("convert", "--memory-budget", "a\nb"), r"not a size, got 'a\nb'")
