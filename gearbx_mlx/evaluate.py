"""python -m gearbx_mlx.evaluate: measure what shifting buys, against chance and against the static gears."""

from typing import TYPE_CHECKING

from .commands import command, lazily

if TYPE_CHECKING:
    from .commands.evaluate import evaluate as evaluate

main = command("evaluate")
__getattr__ = lazily("evaluate", "gearbx_mlx.commands.evaluate")

if __name__ == "__main__":
    main()
