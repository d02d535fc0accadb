"""What the commands write on stderr: progress, tables, errors."""

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_bad_input import assert_refused

from gearbx_mlx.cli import terminal as progress_module
from gearbx_mlx.cli.tables import layers_table, summary_table
from gearbx_mlx.cli.terminal import ProgressLines, WrappedText, progress_bar
from gearbx_mlx.gears.cost import LayerPath
from gearbx_mlx.gears.ladder import Ladder
from gearbx_mlx.settings import human_bytes


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log(width: int = 80) -> Console:
    """A console that writes to a file, like a redirected stderr."""
    return Console(file=io.StringIO(), width=width)


class TestProgress:
    def lines(self, clock: Clock, seconds: float, items: int, in_bytes: bool = False) -> list[str]:
        console = log()
        with ProgressLines(console, in_bytes, clock) as progress:
            for _ in progress.track(range(items), description="layers"):
                clock.now += seconds
        return console.file.getvalue().splitlines()

    def test_a_log_gets_a_line_after_two_seconds_and_then_every_ten(self, clock):
        assert self.lines(clock, 1.0, 25) == ["layers: 2 of 25", "layers: 12 of 25", "layers: 22 of 25"]

    def test_a_log_gets_nothing_from_short_work(self, clock):
        assert self.lines(clock, 0.1, 19) == []

    def test_on_a_terminal_stdout_keeps_what_is_printed_beside_a_bar(self, capsys):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        with progress_bar(console=Console(file=terminal, force_terminal=True, force_interactive=True)) as progress:
            for _ in progress.track(range(3), description="layers"):
                print("a row")
        assert capsys.readouterr().out == "a row\n" * 3
        assert "layers" in terminal.getvalue()
        assert "a row" not in terminal.getvalue()

    def test_bytes_are_written_as_bytes(self, clock):
        console = log()
        with ProgressLines(console, True, clock) as progress:
            task = progress.add_task("converting", total=4e9)
            clock.now = 3
            progress.advance(task, 1.5e6)
        assert console.file.getvalue() == "converting: 1.5 MB of 4 GB\n"

    def test_updates_count_and_a_task_may_have_no_total(self, clock):
        console = log()
        with ProgressLines(console, False, clock) as progress:
            task = progress.add_task("tokens", total=None)
            clock.now = 5
            progress.update(task, completed=7)
        assert console.file.getvalue() == "tokens: 7\n"

    def test_a_terminal_gets_a_bar_that_vanishes(self):
        class Tty(io.StringIO):
            def isatty(self) -> bool:
                return True

        console = Console(file=Tty(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
        with progress_module.progress_bar(console=console) as progress:
            for _ in progress.track(range(3), description="layers"):
                pass
        written = console.file.getvalue()
        assert "layers" in written
        assert "3/3" in written
        assert written.endswith("\x1b[2K")  # the line is erased

    @pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
    def test_a_file_gets_no_bar(self, environment):
        console = Console(file=io.StringIO(), _environ=environment)
        with progress_module.progress_bar(console=console) as progress:
            for _ in progress.track(range(3)):
                pass
        assert console.file.getvalue() == ""


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


def test_a_file_gets_its_lines_as_they_are(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    WrappedText(["low"]).write("word " * 100, "low")
    assert written.getvalue() == "word " * 100


SUMMARY = {
    "model": "[bold]mine",
    "mode": "lossless",
    "ladder": [{"name": "low", "bits": 4}, {"name": "high", "bits": 16}],
    "tokens": 20,
    "tokens_per_second": 10.0,
    "prompt_tokens": 5,
    "prompt_tokens_per_second": 50.0,
    "gear_tokens": {"low": 15, "high": 5},
    "shifts": 3,
    "shift_seconds": 0.0015,
    "making_seconds": 0.25,
    "mean_entropy_bits": 1.234,
    "effective_bits_per_weight": 7.5,
    "weight_bytes_per_token": 5e6,
    "weight_bytes_per_token_top": 10e6,
    "peak_memory_bytes": 3e7,
    "active_memory_bytes": {"high": 2e7},
    "managed_layers": 43,
    "unmanaged_layers": 1,
    "unmanaged_reasons": {"its [odd] width": 1},
    "compute_dtype": "float32",
    "storage_dtype": "bfloat16",
}


def shown(table: object) -> list[str]:
    """The lines of a table without their padding."""
    console = log(200)
    console.print(table)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


class TestTables:
    def test_the_summary_shows_every_figure_and_every_name_as_it_is(self):
        assert shown(summary_table(SUMMARY, [("drafted", "18, 17 accepted (94%), 3 verifications")])) == [
            "model [bold]mine (lossless)",
            "generation 20 tokens, 10.0 tokens/s",
            "prompt 5 tokens, 50.0 tokens/s",
            "gears low (4) 75% high (16) 25%",
            "shifts 3, 1.5 ms in all; gears were made in 250.0 ms",
            "drafted 18, 17 accepted (94%), 3 verifications",
            "mean entropy 1.23 bits",
            "effective bits 7.50 per weight of the managed layers",
            "weights read 5 MB per token, the top gear 10 MB (2.00 times as much)",
            "memory peak 30 MB; after shifting to high 20 MB",
            "layers 43 change gear, 1 do not",
            "1: its [odd] width",
            "computed in float32 (bfloat16 checkpoint), which is fast here; the values are kept",
        ]

    @pytest.mark.parametrize(("others", "said"), [(0, ""), (2, ", 2 are as loaded")])
    def test_with_one_gear_nothing_is_said_to_change(self, others, said):
        ladder, tokens = [{"name": "high", "bits": 4}], {"high": 20}
        one = SUMMARY | {"ladder": ladder, "gear_tokens": tokens, "shifts": 0, "unmanaged_layers": others}
        lines = shown(summary_table(one))
        assert f"gear 4 bits, the only one: 43 layers have it{said}" in lines
        assert "memory peak 30 MB" in lines
        assert not [line for line in lines if "change gear" in line or line.startswith(("gears", "shifts", "layers"))]

    def test_telemetry_says_what_would_happen(self):
        lines = shown(summary_table(SUMMARY | {"mode": "telemetry-only", "compute_dtype": "bfloat16"}))
        assert "gears it would use low (4) 75% high (16) 25%" in lines
        assert "would shift 3 times" in lines
        assert "weights read 5 MB per token" in lines
        assert "memory peak 30 MB" in lines
        assert not any(line.startswith("computed in") for line in lines)

    def test_a_controller_is_one_line(self):
        controller = {
            "target_tps": 15.0,
            "cap_changes": 2,
            "capped_bits_per_weight": 7.25,
            "machine": {"thermal": "fair"},
            "out_of_reach": True,
        }
        moved = "caps moved 2 times, the top gear now 7.25 bits per weight; thermal fair; out of reach"
        assert f"controller target 15 tokens/s; {moved}" in shown(summary_table(SUMMARY | {"controller": controller}))

    def test_layers_stand_under_their_kernels_and_the_reason(self):
        native, plain = ("native", "8 vectors at a time"), ("mlx", "as asked")
        layers = [LayerPath(f"model.layers.{i}.mlp", (4, 16), *native) for i in range(3)]
        layers.append(LayerPath("lm_head", (16, 16), *plain, fixed="tied"))
        assert shown(layers_table(Ladder.parse("4,16"), layers)) == [
            "native kernels: 8 vectors at a time",
            "low high layers",
            "4 16 model.layers.0-2.mlp x 3",
            "mlx kernels: as asked; changes no gear: tied",
            "low high layers",
            "16 16 lm_head",
        ]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1234567, "1.23 MB"), (5e9, "5 GB"), (1.5e12, "1.5 TB")]
)
def test_bytes_are_in_powers_of_ten(count, text):
    assert human_bytes(count) == text


def test_names_with_control_characters_stay_on_one_line(command):
    """And control characters in a name do not steer the terminal."""
    for name, shown in {"a\nb": r"a\nb", "a\x1b[2Jb": r"a\x1b[2Jb", "a\r\u2028b": r"a\r\u2028b"}.items():
        result = command("analyze", "--prompts", name)
        assert_refused(result, f"{shown}: cannot be read as text")
        assert result.err.count("\n") == 1
        assert "\x1b[2J" not in result.err
    assert_refused(command("convert", "--memory-budget", "a\nb"), r"'a\nb' is not a size")
