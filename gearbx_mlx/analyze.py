"""python -m gearbx_mlx.analyze: see which gears a file of prompts would use, without changing the model."""

from .commands import command

main = command("analyze")

if __name__ == "__main__":
    main()
