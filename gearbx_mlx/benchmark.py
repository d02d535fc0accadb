"""python -m gearbx_mlx.benchmark: time kernels, gears and routing on this machine."""

from .commands import command

main = command("benchmark")

if __name__ == "__main__":
    main()
