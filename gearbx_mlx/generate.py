"""python -m gearbx_mlx.generate: write a text, and watch the gears while it is written."""

from .commands import command

main = command("generate")

if __name__ == "__main__":
    main()
