"""gearbx_mlx COMMAND: every command under one name, as in mlx_lm. Without a command, list them."""

import sys
from importlib import import_module
from pathlib import Path

from .cli import signals

signals.end_at_once()  # the imports below take time

from .cli import terminal  # noqa: E402
from .cli.parser import version_line  # noqa: E402
from .errors import GearbxError, choose  # noqa: E402

COMMANDS = {
    "generate": "write a text, and watch the gears while it is written",
    "chat": "talk with a model, and watch the gears while it answers",
    "convert": "write a geared checkpoint, which stock mlx-lm reads too",
    "calibrate": "find when a model should change gear",
    "analyze": "see which gears prompts would use, without changing the model",
    "evaluate": "measure what gears and modes cost on a text: KL, perplexity, the same favourite",
    "sensitivity": "measure what the precision of each layer costs",
    "allocate": "find bits for every layer from these measurements",
    "benchmark": "time gears on this machine, and beside mlx-lm on a Mac",
    "server": "serve a model in gears, to clients of OpenAI's API",
    "list": "list the models at hand, with their sizes and gears",
    "cache": "show the size of what is kept for later runs, or remove it",
    "lm_eval": "run lm-eval's tasks on a model in gears",
}
USAGE = "usage: gearbx_mlx COMMAND [flags]; gearbx_mlx COMMAND --help shows the flags\n\n" + "\n".join(
    f"  {name:12} {purpose}" for name, purpose in COMMANDS.items()
)


def main() -> None:
    """Run the command that the first argument names, with the arguments after it."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        terminal.run(lambda: show_commands(name))
    program = Path(sys.argv[0]).name
    sys.argv[:2] = [f"{'gearbx_mlx' if program == '__main__.py' else program} {name}"]
    import_module(f".{name}", __package__).main()


def show_commands(name: str) -> None:
    """Raises GearbxError unless the commands are asked for, or the version."""
    if name == "--version":
        print(version_line())
    elif name in ("-h", "--help"):
        print(USAGE)
    else:
        raise GearbxError(f"{name}: no such command; {choose(name, COMMANDS)}")


if __name__ == "__main__":
    main()
