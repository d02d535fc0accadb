"""python -m gearbx_mlx.convert: turn a model into a geared checkpoint, which stock mlx-lm reads too."""

from .commands import command

main = command("convert")

if __name__ == "__main__":
    main()
