"""python -m gearbx_mlx.chat: talk with a model, and watch the gears while it answers."""

from .commands import command

main = command("chat")

if __name__ == "__main__":
    main()
