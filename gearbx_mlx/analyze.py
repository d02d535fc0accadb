"""python -m gearbx_mlx.analyze: see which gears a file of prompts would use, without changing the model."""

from typing import TYPE_CHECKING

from .commands import command, lazily

if TYPE_CHECKING:
    from .commands.analyze import analyze as analyze

main = command("analyze")
__getattr__ = lazily("analyze", "gearbx_mlx.commands.analyze")

if __name__ == "__main__":
    main()
