"""python -m gearbx_mlx.server: serve a model in gears, as mlx_lm.server serves models."""

from .commands import command

main = command("server")

if __name__ == "__main__":
    main()
