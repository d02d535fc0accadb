"""python -m gearbx_mlx.calibrate: find when a model should change gear, and write it to a file for generate."""

from .commands import command

main = command("calibrate")

if __name__ == "__main__":
    main()
