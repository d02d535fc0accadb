"""python -m gearbx_mlx.figures: make the pictures of the paper from runs of a model."""

from .commands import command

main = command("figures")

if __name__ == "__main__":
    main()
