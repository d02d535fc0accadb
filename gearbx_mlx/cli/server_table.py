"""The table of a text that a server wrote, with entropies between bounds."""

from typing import Any

from rich.table import Table
from rich.text import Text

from ..telemetry.report import UNDECIDED
from .tables import gear_shares, two_columns


def server_table(summary: dict[str, Any]) -> Table:
    """The table under an analysis of a server, from the object that is written as its summary."""
    shares = gear_shares(summary)
    shares.append(f"{UNDECIDED} {summary['undecided_share']:.0%}")
    listed, size, source = (summary[name] for name in ("top_logprobs", "vocab_size", "vocab_size_source"))
    low, high = summary["mean_entropy_low_bits"], summary["mean_entropy_high_bits"]
    return two_columns(
        [
            ("model", Text(f"{summary['model']}  ({summary['mode']})")),
            ("server", Text(f"{summary['server']}  ({summary['api']})")),
            ("generation", f"{summary['tokens']} tokens, {summary['tokens_per_second']:.1f} tokens/s"),
            ("gears it would use", shares),
            (
                "would shift",
                f"{summary['shifts_low']} times by the lower bounds, {summary['shifts_high']} by the upper",
            ),
            ("mean entropy", f"{low:.2f} to {high:.2f} bits"),
            ("known", f"{listed} log-probabilities of {size} ({source})"),
        ]
    )
