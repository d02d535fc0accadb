"""MLX's device: one per process, chosen before mlx-lm is imported."""

import os
from contextlib import suppress
from importlib import import_module

import mlx.core as mx

from ..compat.classes import generation_stream
from ..errors import GearbxError, check_choice
from . import DEVICES


def use_device(name: str) -> None:
    """Set the default device to "cpu" or "gpu".

    Call it before mlx-lm is imported, because mlx-lm keeps the default device of that moment.

    Raises:
        GearbxError: unknown name, no GPU, or mlx-lm already uses a different device.
    """
    check_choice("device", name, DEVICES)
    wanted = mx.Device(mx.gpu if name == "gpu" else mx.cpu)
    if not mx.is_available(wanted):
        raise GearbxError(f"device: MLX has no such device here, got {name}; omit it to use MLX's default device")
    check_generation(name)
    mx.set_default_device(wanted)


def device_in_use() -> str:
    """Return the name of MLX's default device, as from `device_name`."""
    return device_name(mx.default_device())


def device_name(device: mx.Device) -> str:
    """Return "cpu" or "gpu"; such as "Device(gpu, 1)" for any GPU but the first."""
    return device.type.name if device == mx.Device(device.type) else str(device)


def check_device(name: str) -> None:
    """Validate that MLX and mlx-lm use the device for which a gearbox chose kernels and types.

    Raises:
        GearbxError: MLX or mlx-lm uses a different device.
    """
    now = device_in_use()
    if now != name:
        raise GearbxError(
            f"device: this gearbox was made on {name}, got {now}; "
            f"set {name}, or load the model again and make a new gearbox"
        )
    check_generation(name)


def check_generation(name: str) -> None:
    """Validate that mlx-lm was imported while MLX used this device. Raises GearbxError."""
    stream = generation_stream()
    pinned = name if stream is None else device_name(stream.device)
    if pinned != name:
        raise GearbxError(
            f"device: mlx-lm was imported for {pinned}, got {name}; "
            "set it with gearbx_mlx.use_device before the first import of mlx_lm"
        )


def finish() -> None:
    """Wait for running computations, such as mlx-lm's forward pass after the last token.

    At the end of a process, MLX destroys its CPU allocator while the threads of its streams still run. A thread that
    frees memory at that moment may abort the process.
    """
    for stream in (None, generation_stream()):  # None: the default one
        with suppress(RuntimeError):  # an error of a forward pass whose result is not used
            mx.synchronize(stream)


def recommended_memory() -> int | None:
    """Return macOS's recommended maximum of bytes for a program on this GPU; None for other devices."""
    found = mx.device_info().get("max_recommended_working_set_size")
    return None if found is None else int(found)


def whole_memory() -> int:
    """Return the device's memory in bytes; the machine's for a CPU or a Mac's GPU."""
    info = mx.device_info()
    found = info.get("memory_size", info.get("total_memory"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else int(found)


def available_memory() -> int:
    """Return bytes available to new programs; without psutil, the machine's memory."""
    try:
        psutil = import_module("psutil")  # an optional dependency
    except ImportError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return psutil.virtual_memory().available


WIRED_BESIDE = 2 * 10**9  # bytes beside the weights: KV caches and activations
_wired = 0  # bytes; MLX has one limit per process


def wire(needed: int) -> None:
    """Keep a loaded model of `needed` bytes, and WIRED_BESIDE, wired in a Mac's memory; no effect on other devices.

    The limit never exceeds macOS's recommendation and never shrinks. All recommended bytes, or a model that is still
    being loaded, would take memory from other programs until a Mac of 16 GB freezes.
    """
    global _wired
    most = recommended_memory()
    if most is not None and min(most, needed + WIRED_BESIDE) > _wired:
        _wired = min(most, needed + WIRED_BESIDE)
        mx.synchronize()  # the limit must not change during a computation
        mx.set_wired_limit(_wired)
