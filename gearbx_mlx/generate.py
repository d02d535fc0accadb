"""python -m gearbx_mlx.generate: write a text, and watch the gears while it is written."""

from typing import TYPE_CHECKING

from .commands import command, lazily

if TYPE_CHECKING:
    from .decoding.stream import generate as generate

main = command("generate")
__getattr__ = lazily("generate", "gearbx_mlx.decoding.stream")

if __name__ == "__main__":
    main()
