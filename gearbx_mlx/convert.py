"""python -m gearbx_mlx.convert: turn a model into a geared checkpoint, which stock mlx-lm reads too."""

from typing import TYPE_CHECKING

from .commands import command, lazily

if TYPE_CHECKING:
    from .commands.convert import convert as convert

main = command("convert")
__getattr__ = lazily("convert", "gearbx_mlx.commands.convert")

if __name__ == "__main__":
    main()
