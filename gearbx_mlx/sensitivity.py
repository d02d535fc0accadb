"""python -m gearbx_mlx.sensitivity: measure what the precision of each layer costs, as a manifest."""

from .commands import command

main = command("sensitivity")

if __name__ == "__main__":
    main()
