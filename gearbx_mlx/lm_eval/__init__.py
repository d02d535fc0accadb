"""python -m gearbx_mlx.lm_eval: lm-eval's own command, with the model `gearbx` beside its own."""

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec

from ..cli import signals, terminal
from ..cli.flags import choose_device
from ..cli.start import needing
from ..kernels import DEVICES

HELP = """usage: gearbx_mlx lm_eval --model gearbx --model_args model=MODEL[,FLAG=VALUE...] --tasks TASK[,TASK...]

Run lm-eval's tasks on a model in gears. --model_args are flags of gearbx_mlx generate without dashes, with colons for
commas in their values: model=smollm2,gears=4:16. All other flags are lm-eval's; it shows them if installed:
pip install 'gearbx-mlx[lm-eval]'
"""


def run_lm_eval() -> None:
    """Run lm-eval's command. A missing command or device is an error of one line."""
    if {"-h", "--help"} & {*sys.argv[1:]} and not find_spec("lm_eval"):
        print(HELP, end="")
        return
    choose_device(device_of_command())
    with needing("lm-eval", "lm_eval"):
        body = import_module("gearbx_mlx.lm_eval.run")
    body.main()


def device_of_command() -> argparse.Namespace:
    """Return lm-eval's own flag --device, read before mlx-lm is imported; torch's devices, such as mps, are ignored."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--device", nargs="?")
    found, _ = parser.parse_known_args()
    return argparse.Namespace(device=found.device if found.device in DEVICES else None)


def main() -> None:
    signals.end_at_once()
    terminal.run(run_lm_eval)
