"""gearbx_mlx COMMAND: all commands under one name, as in mlx_lm. Without a command, a list of them."""

import sys
from importlib import import_module
from pathlib import Path

from .cli import signals

signals.end_at_once()  # the imports below are slow

from .cli import terminal  # noqa: E402
from .cli.parser import version_line  # noqa: E402
from .errors import GearbxError, choose  # noqa: E402

COMMANDS = {
    "generate": "generate text, and watch its gears",
    "chat": "chat with a model, and watch its gears",
    "convert": "write a geared checkpoint that mlx-lm can also read",
    "calibrate": "find entropy thresholds between the gears",
    "analyze": "record the gears that prompts would use, without shifting",
    "evaluate": "measure KL, perplexity and top-1 agreement of gears and modes",
    "sensitivity": "measure the cost of each layer's precision",
    "allocate": "find bits for every layer from these measurements",
    "draft_head": "train a head that drafts for a model in mode lossless",
    "benchmark": "time gears, and on a Mac the speedup over mlx-lm",
    "server": "serve a model in gears with OpenAI's API",
    "list": "list available models with sizes and gears",
    "cache": "show or remove entries of the user's cache",
    "lm_eval": "run lm-eval's tasks on a model in gears",
}
USAGE = "usage: gearbx_mlx COMMAND [flags]; gearbx_mlx COMMAND --help shows the flags\n\n" + "\n".join(
    f"  {name if name == 'lm_eval' else name.replace('_', '-'):12} {purpose}" for name, purpose in COMMANDS.items()
)


def main() -> None:
    """Run the command named by the first argument, with the other arguments."""
    typed = sys.argv[1] if len(sys.argv) > 1 else "--help"
    name = typed.replace("-", "_")  # draft-head is a package
    if name not in COMMANDS:
        terminal.run(lambda: show_commands(typed))
    program = Path(sys.argv[0]).name
    sys.argv[:2] = [f"{'gearbx_mlx' if program == '__main__.py' else program} {typed}"]
    import_module(f".{name}", __package__).main()


def show_commands(name: str) -> None:
    """Print the commands or the version; any other name is an error."""
    if name == "--version":
        print(version_line())
    elif name in ("-h", "--help"):
        print(USAGE)
    else:
        raise GearbxError(f"{name}: no such command; {choose(name, COMMANDS)}")


if __name__ == "__main__":
    main()
