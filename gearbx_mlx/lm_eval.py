"""python -m gearbx_mlx.lm_eval: run lm-eval's own command with the model `gearbx`, which computes token by token."""

from .commands.lm_eval import GearbxLM, main

__all__ = ["GearbxLM", "main"]

if __name__ == "__main__":
    main()
