"""python -m research NAME [flags]: run a study. Without a name, list them all."""

import sys

from gearbx_mlx.cli.terminal import run

from .studies import listed, start


def main() -> None:
    names = sys.argv[1:]
    if not names or names[0] in ("-h", "--help"):
        run(lambda: print(__doc__, "", *listed(), sep="\n"))
    else:
        run(lambda: start(names[0], names[1:]))


if __name__ == "__main__":
    main()
