"""python -m gearbx_mlx.lm_eval: run lm-eval's own command with the model `gearbx`, which computes token by token."""

from importlib import import_module

from .cli import terminal
from .errors import GearbxError


def run() -> None:
    """Raises GearbxError where lm-eval is not installed."""
    try:
        body = import_module("gearbx_mlx.commands.lm_eval")
    except ModuleNotFoundError as error:
        raise GearbxError(
            f"lm_eval needs {error.name}, which is not installed: pip install 'gearbx-mlx[lm-eval]'"
        ) from error
    body.main()


def main() -> None:
    terminal.run(run)


if __name__ == "__main__":
    main()
