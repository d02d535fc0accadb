"""What the results of an evaluation depend on, and what its report says of how it was made."""

from pathlib import Path
from typing import Any

from ..cli.gears import GearSettings
from ..cli.model import ModelSettings
from ..cli.parsers.evaluate import EvaluateSettings
from ..evaluation.answers import problem_files
from ..evaluation.session import adapter_contents, fingerprint, model_contents, versions
from ..kernels.device import device_in_use
from ..loading import model_name


def inputs_of(settings: EvaluateSettings, gears: GearSettings) -> dict[str, Any]:
    """The inputs that every task on one model depends on."""
    return {
        "data contents": fingerprint(*problem_files(Path(settings.task.data))),
        "task": settings.task.task,
        **model_inputs(settings.model),
        **gear_inputs(gears),
    }


def model_inputs(settings: ModelSettings) -> dict[str, Any]:
    """The inputs that every result of a model depends on."""
    return {
        "model contents": model_contents(settings.model),
        "dtype": settings.dtype,
        "device": device_in_use(),
        "adapter_path": settings.adapter_path,
        "adapter contents": adapter_contents(settings.adapter_path),
        **versions(),
    }


def gear_inputs(gears: GearSettings) -> dict[str, Any]:
    """The inputs that every result of a model in gears depends on."""
    return {
        "gears": str(gears.ladder),
        "format": gears.format,
        "manage": gears.manage,
        "q_group_size": gears.group_size,
        "kernels": gears.kernels,
        "activations": gears.activations,
        **({"low model contents": model_contents(gears.low_model)} if gears.low_model else {}),
        **({"floors": vars(gears.floors)} if gears.floors else {}),
        **({"manifest contents": fingerprint(Path(gears.manifest))} if gears.manifest else {}),
    }


def about(settings: EvaluateSettings, gears: GearSettings, kernels: str) -> dict[str, Any]:
    """What the report of one model says of how it was made.

    Args:
        kernels: those that ran, "native" or "mlx".
    """
    return {
        "model": model_name(settings.model.model),
        "data": settings.task.data,
        "format": gears.format,
        "manage": gears.manage,
        "group_size": gears.group_size,
        "kernels": kernels,
    }
