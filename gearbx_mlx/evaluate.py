"""python -m gearbx_mlx.evaluate: measure what shifting buys, against chance and against the static gears."""

from .commands import command

main = command("evaluate")

if __name__ == "__main__":
    main()
