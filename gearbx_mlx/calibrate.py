"""python -m gearbx_mlx.calibrate: find when a model should change gear, and write it to a file for generate."""

from typing import TYPE_CHECKING

from .commands import command, lazily

if TYPE_CHECKING:
    from .commands.calibrate import calibrate as calibrate

main = command("calibrate")
__getattr__ = lazily("calibrate", "gearbx_mlx.commands.calibrate")

if __name__ == "__main__":
    main()
