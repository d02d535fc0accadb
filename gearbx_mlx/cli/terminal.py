"""How the commands speak: text on stdout, everything else on stderr, errors in one line."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import COLOR_SYSTEMS, Console
from rich.progress import Progress
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..errors import GearbxError, GearbxWarning, OutputLost, one_line
from ..routing.pair import NAMES
from ..telemetry.colors import gear_color
from . import progress, signals, streams
from .progress import human_bytes

if TYPE_CHECKING:
    from ..gears.description import LayerPath
    from ..gears.ladder import Ladder

INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended
USER_ERROR = 2
TRACEBACK = "GEARBX_TRACEBACK"

messages = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    messages.print(Text(text, style="dim"), soft_wrap=True)


def print_error(text: str) -> None:
    messages.print(Text(f"error: {text}", style="red"), soft_wrap=True)


def progress_bar(in_bytes: bool = False) -> Progress:
    """Shows on stderr how far long work is: `with progress_bar() as progress: for x in progress.track(xs): ...`.

    On a terminal it is a bar that vanishes at the end. Elsewhere it is a line such as `layers: 12 of 43`, at most
    every ten seconds, and none for work of under two seconds.

    Args:
        in_bytes: totals are bytes.
    """
    return progress.bar(messages, in_bytes)


def run(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit: 2 and one line for a user's mistake, 128 and the signal's number where one ended it."""
    warnings.showwarning = lambda message, *_: messages.print(
        Text(f"warning: {message}", style="yellow"), soft_wrap=True
    )
    warnings.simplefilter("ignore")
    warnings.simplefilter("once", GearbxWarning)
    with signals.heeded() as ending, streams.guarded() as errors:
        status = write_all(command)
    if ending.received and status == INTERRUPTED:
        status = 128 + ending.received
    sys.exit(status or int(errors.lost))


def write_all(command: Callable[[], int | None]) -> int:
    """The exit status of a command and of what it writes on stdout."""
    try:
        status = status_of(command)
        sys.stdout.flush()
    except OutputLost as lost:
        if lost.closed_pipe:
            return BROKEN_PIPE
        print_error(str(lost))
        return 1
    return status


def status_of(command: Callable[[], int | None]) -> int:
    """The exit status of a command; an error is one line on stderr."""
    try:
        return command() or 0
    except GearbxError as error:
        print_error(str(error))
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputLost:
        raise
    except SystemExit as ended:  # from argparse, after --help or a flag that it does not know
        return ended.code if isinstance(ended.code, int) else 0
    except Exception as error:  # not foreseen: still one line, and a way to see the rest
        if os.environ.get(TRACEBACK):
            raise
        print_error(f"{type(error).__name__}: {one_line(error)} ({TRACEBACK}=1 shows where)")
        return 1


def show_compiling() -> None:
    """From here on, a spinner turns while CPU kernels are compiled: some twenty seconds, once for a machine."""
    from ..kernels import cpu

    told = "compiling kernels for this CPU: once, and then kept"
    cpu.while_compiling = lambda: messages.status(told) if messages.is_terminal else nullcontext()


class TintedText:
    """Text on stdout as it is made, each piece in the colour of its gear where colours are wanted.

    Args:
        gears: names of the ladder's gears, lowest first.
        color: "auto" (a terminal, and NO_COLOR is not set), "always" or "never".
    """

    def __init__(self, gears: Sequence[str], color: str):
        self.styles = {name: Style(color=gear_color(i, len(gears))) for i, name in enumerate(gears)}
        console = Console()
        system = "truecolor" if color == "always" else console.color_system if color == "auto" else None
        plain = color == "auto" and console.no_color
        self.system = COLOR_SYSTEMS[system] if system and not plain else None

    def write(self, text: str, gear: str) -> None:
        # Escapes around the text as it is: a console would expand its tabs and drop its control characters.
        sys.stdout.write(self.styles[gear].render(text, color_system=self.system) if self.system else text)
        sys.stdout.flush()


def summary_table(summary: dict[str, Any]) -> Table:
    """The table under a generated text."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    tokens, ladder = summary["tokens"], summary["ladder"]
    watching = summary["mode"] == "telemetry-only"

    table.add_row("model", Text(f"{summary['model']}  ({summary['mode']})"))
    table.add_row("generation", f"{tokens} tokens, {summary['tokens_per_second']:.1f} tokens/s")
    table.add_row("prompt", f"{summary['prompt_tokens']} tokens, {summary['prompt_tokens_per_second']:.1f} tokens/s")
    shares = Text()
    for i, gear in enumerate(ladder):
        count = summary["gear_tokens"][gear["name"]]
        share = count / tokens if tokens else 0.0
        shares.append(f"{gear['name']} ({gear['bits']}) {share:.0%}   ", style=gear_color(i, len(ladder)))
    table.add_row("gears it would use" if watching else "gears", shares)
    if watching:
        table.add_row("would shift", f"{summary['shifts']} times")
    else:
        table.add_row("shifts", f"{summary['shifts']}, {1000 * summary['shift_seconds']:.1f} ms in all")
    if "controller" in summary:
        table.add_row("controller", controller_line(summary["controller"]))
    if "drafted" in summary:
        ties = summary.get("near_ties")
        table.add_row(
            "drafted",
            f"{summary['drafted']}, {summary['accepted']} accepted ({summary['acceptance_rate']:.0%}), "
            f"{summary['verifications']} verifications" + (f", {ties} near-ties" if ties else ""),
        )
    if "recomputed" in summary:
        table.add_row("recomputed", f"{summary['recomputed']} tokens, in a higher gear")
    table.add_row("mean entropy", f"{summary['mean_entropy_bits']:.2f} bits")
    table.add_row(
        "effective bits",
        f"{summary['effective_bits_per_weight']:.2f} per weight of the {'linear' if watching else 'managed'} layers",
    )
    read, top = summary["weight_bytes_per_token"], summary["weight_bytes_per_token_top"]
    against = "" if watching or not read else f", the top gear {human_bytes(top)} ({top / read:.2f} times as much)"
    table.add_row("weights read", f"{human_bytes(read)} per token{against}")
    held = ", ".join(f"{name} {human_bytes(count)}" for name, count in summary["active_memory_bytes"].items())
    table.add_row(
        "memory",
        f"peak {human_bytes(summary['peak_memory_bytes'])}; after shifting to {held}"
        if not watching
        else f"peak {human_bytes(summary['peak_memory_bytes'])}",
    )
    table.add_row("layers", f"{summary['managed_layers']} change gear, {summary['unmanaged_layers']} do not")
    for reason, count in summary["unmanaged_reasons"].items():
        table.add_row("", Text(f"{count}: {reason}"))
    computed, stored = summary["compute_dtype"], summary["storage_dtype"]
    if computed != stored:
        kept = (
            "which is fast here; the values are kept" if computed == "float32" else "as asked for: values are rounded"
        )
        table.add_row("computed in", f"{computed} ({stored} checkpoint), {kept}")
    return table


def controller_line(summary: dict[str, Any]) -> str:
    """What it was to hold, what it did."""
    target = summary["target_tps"]
    wanted = "the machine's state" if target is None else f"target {target:g} tokens/s"
    changes, bits = summary["cap_changes"], summary["capped_bits_per_weight"]
    moved = f"caps moved {changes} times, the top gear now {bits:.2f} bits per weight"
    machine = "".join(f"; {name} {value}" for name, value in summary["machine"].items())
    return f"{wanted}; {moved}{machine}" + ("; out of reach" if summary["out_of_reach"] else "")


def layers_table(ladder: "Ladder", layers: Sequence["LayerPath"]) -> Table:
    """What every layer runs on and why; layers that are alike, over the blocks of a model, are one line."""
    from ..gears.description import grouped

    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, gear in enumerate(ladder):
        table.add_column(gear.name, justify="right", style=gear_color(i, len(ladder)))
    table.add_column("layers", no_wrap=True)
    table.add_column()
    table.add_column("kernels")
    table.add_column("why", overflow="fold")
    for path, layer, count in grouped(layers):
        why = layer.why if layer.fixed is None else f"{layer.why}; changes no gear: {layer.fixed}"
        row = path, f"x {count}" if count > 1 else "", layer.kernels, why
        table.add_row(*map(str, layer.bits), *map(Text, row))
    return table


def pair_table(summary: dict[str, Any]) -> Table:
    """The table under a generated text."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    read, top = summary["weight_bytes_per_token"], summary["weight_bytes_per_token_top"]
    shares = Text()
    for i, name in enumerate(NAMES):
        parameters = summary["parameters"][name] / 1e6
        shares.append(f"{name} ({parameters:.3g} M) {summary['shares'][name]:.0%}   ", style=gear_color(i, len(NAMES)))
    table.add_row("models", Text(f"{summary['small_model']}, {summary['model']}  (pair)"))
    table.add_row("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s")
    table.add_row("prompt", f"{summary['prompt_tokens']} tokens, {summary['prompt_tokens_per_second']:.1f} tokens/s")
    table.add_row("turns", shares)
    table.add_row("switches", f"{summary['shifts']}; {summary['caught_up_tokens']} tokens read to catch up")
    table.add_row(
        "mean entropy", f"{summary['mean_entropy_bits']:.2f} bits; the threshold is {summary['threshold_bits']:.3g}"
    )
    table.add_row("parameters", f"{summary['parameter_ratio']:.0%} of the large model's per token")
    against = f", the large model {human_bytes(top)} ({top / read:.2f} times as much)" if read else ""
    table.add_row("weights read", f"{human_bytes(read)} per token{against}")
    table.add_row("memory", f"peak {human_bytes(summary['peak_memory_bytes'])}")
    return table
