"""What is gone, and what to use instead. Who meets an unknown flag, field or file looks here before he calls it so."""

SINCE = "0.1.0"

STUDIES = "run python -m research policies in a clone of the repository"
ANSWERS = "run python -m research final-answers in a clone of the repository"

GONE: dict[str, str] = {
    "--residency host": "it freed next to nothing; use --residency disk, or stream",
    "--policy": STUDIES,
    "--share": STUDIES,
    "--between": STUDIES,
    "--reference-dtype": STUDIES,
    "evaluate --seed": STUDIES,
    "evaluate --prompt-tokens": STUDIES,
    "evaluate --prompt-gear": STUDIES,
    "--task": ANSWERS,
    "--num-problems": ANSWERS,
    "--num-shots": ANSWERS,
    "evaluate --max-tokens": ANSWERS,
    "evaluate -m": ANSWERS,
    "evaluate --small-model": "run python -m research pair-sweep in a clone of the repository",
    "--answers-only": "run python -m research pair-sweep in a clone of the repository",
    "benchmark kernels": "run python -m research kernels in a clone of the repository",
    "benchmark token": "run python -m research token in a clone of the repository",
    "benchmark server": "run python -m research server in a clone of the repository",
}
"""From a name to what to use instead: `--flag`, `--flag value`, `command --flag` where other commands still have the
flag, a field of a request, a mode, `schema 'NAME'` of a file."""


def gone(name: str, command: str = "") -> str | None:
    """Return the line that refuses a name; None for one that is not gone."""
    instead = GONE.get(f"{command} {name}") or GONE.get(name)
    return None if instead is None else f"{name} is gone since gearbx-mlx {SINCE}; {instead}"
