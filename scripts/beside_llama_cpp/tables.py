"""The rows of a comparison as tables of Markdown, for the terminal and for docs/performance.md."""

from collections.abc import Callable, Mapping
from typing import Any

from pages import table

Row = Mapping[str, Any]
Column = Callable[[Row], object]


def significant(number: float) -> str:
    """Three digits, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def spread(row: Row) -> str:
    return "-".join(f"{number:.2f}" for number in row["spread"])


SIDES: dict[str, Column] = {
    "bits": lambda row: row["bits"],
    "llama.cpp's type": lambda row: row["llama_cpp_type"],
    "activations": lambda row: row["activations"],
}
SPEEDS: dict[str, Column] = {
    "ours, tokens/s": lambda row: significant(row["tokens_per_second"]),
    "llama.cpp, tokens/s": lambda row: significant(row["llama_cpp_tokens_per_second"]),
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "spread": spread,
}
READ: dict[str, Column] = {"read, GB/s": lambda row: f"{row['read_bandwidth_gigabytes_per_second']:.1f}"}
COLUMNS: dict[str, dict[str, Column]] = {
    "decode": {"context": lambda row: row["context"], **SIDES, **SPEEDS, **READ},
    "prompt": {"tokens": lambda row: row["prompt_tokens"], **SIDES, **SPEEDS, **READ},
    "lossless": {
        "activations": lambda row: row["activations"],
        "llama.cpp drafts": lambda row: row["llama_cpp_draft_tokens"] or "none",
        **SPEEDS,
        "drafts gain us": lambda row: f"{row['speedup']:.2f}",
        "llama.cpp": lambda row: f"{row['llama_cpp_speedup']:.2f}",
        "texts unchanged, ours": lambda row: f"{row['identical']} of {row['prompts']}",
        "theirs": lambda row: f"{row['llama_cpp_identical']} of {row['prompts']}",
    },
}


def table_of(subject: str, rows: list[Row]) -> str:
    """The rows of a subject: decode, prompt or lossless."""
    columns = COLUMNS[subject]
    return table([*columns], [[column(row) for column in columns.values()] for row in rows])
