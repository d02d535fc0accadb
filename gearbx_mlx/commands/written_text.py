"""A text, its trace and its summary, as a command writes them."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..cli import terminal
from ..cli.output import OutputSettings
from ..cli.results import Speed
from ..decoding.response import GearResponse
from ..errors import OutputLost
from ..files.writing import write_text
from ..machine.energy import Energy, counted
from ..telemetry.summary import Tally, as_json
from ..telemetry.trace import TraceWriter, record


@dataclass(frozen=True)
class Written:
    """Exit status, what adds up over the tokens, mlx-lm's figures, and the machine's energy."""

    status: int
    tally: Tally
    speed: Speed
    energy: Energy

    def energy_fields(self) -> dict[str, Any]:
        """Fields of the summary: joules per token, and of what; none where the machine does not say."""
        if self.energy.joules is None:
            return {}
        return {"energy_joules_per_token": self.tally.mean(self.energy.joules), "energy_of": self.energy.name}


def write_out(
    responses: Iterable[GearResponse],
    gears: Sequence[str],
    fields: Sequence[str],
    output: OutputSettings,
    trace: Path | None,
) -> Written:
    """Write text and trace as they come; Ctrl-C ends both whole.

    Args:
        gears: names, lowest first.
        fields: of a response, that the mode adds to the trace.
    """
    tally, speed, text, last = Tally.of(gears), Speed(), "", None
    energy = Energy()
    out = terminal.TintedText(gears, output.color if output.verbose else "never")
    status = 0
    mx.reset_peak_memory()
    try:
        with TraceWriter(trace) as writer, counted() as energy:
            for response in responses:
                writer.write(record(tally.tokens, response, fields=fields))
                tally.add(response)
                last = response
                text += response.text
                if output.verbose:
                    out.write(response.text, response.gear)
    except KeyboardInterrupt:
        status = terminal.INTERRUPTED
    speed.add(last)
    with suppress(OutputLost) if status else nullcontext():  # a terminal that closes takes stdout with it
        print(text if not output.verbose else "", flush=True)
    return Written(status, tally, speed, energy)


def show_summary(result: dict[str, Any], table: Table, verbose: bool, file: Path | None) -> None:
    """Print the summary's table under the text, and write the summary as JSON where that is asked for."""
    if verbose:
        terminal.messages.print()
        terminal.messages.print(table)
    if file:
        write_text(file, as_json(result))
