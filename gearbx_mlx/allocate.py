"""python -m gearbx_mlx.allocate: find bits for every layer from a precision manifest."""

from .commands import command

main = command("allocate")

if __name__ == "__main__":
    main()
