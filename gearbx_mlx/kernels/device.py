"""The device that MLX computes on: one for a process, chosen before mlx-lm is imported."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

import mlx.core as mx

from ..compat.classes import generation_stream
from ..errors import GearbxError, check_choice
from . import DEVICES


def use_device(name: str) -> None:
    """Compute everything from now on on the "cpu" or the "gpu".

    Call it before mlx-lm is imported: mlx-lm keeps the device that it finds then.

    Raises:
        GearbxError: another name, no GPU here, or mlx-lm generates on another device already.
    """
    check_choice("device", name, DEVICES)
    wanted = mx.Device(mx.gpu if name == "gpu" else mx.cpu)
    if not mx.is_available(wanted):
        raise GearbxError(f"device {name}: MLX has no such device here; leave it out, and MLX's own choice is used")
    check_generation(name)
    mx.set_default_device(wanted)


def device_in_use() -> str:
    """Return the device on which MLX computes now, as `name_of`."""
    return device_name(mx.default_device())


def device_name(device: mx.Device) -> str:
    """cpu, gpu, or Device(gpu, 1) where there are several."""
    return device.type.name if device == mx.Device(device.type) else str(device)


def check_device(name: str) -> None:
    """Raise GearbxError unless MLX computes, and mlx-lm generates, on the device of a gearbox.

    The gearbox chose its kernels and the type of its weights for this device.
    """
    now = device_in_use()
    if now != name:
        raise GearbxError(
            f"this gearbox was made on {name}, and MLX now computes on {now}; "
            f"go back to {name}, or load the model again and make a new gearbox"
        )
    check_generation(name)


def check_generation(name: str) -> None:
    """Raise GearbxError if mlx-lm was imported while MLX computed on another device."""
    stream = generation_stream()
    pinned = name if stream is None else device_name(stream.device)
    if pinned != name:
        raise GearbxError(
            f"mlx-lm generates on {pinned} since it was imported, and not on {name}; "
            "call gearbx_mlx.use_device before anything imports mlx_lm"
        )


def finish() -> None:
    """Wait for what is still computed, such as the pass beyond a text's end that mlx-lm begins.

    While a process ends, MLX destroys its CPU allocator and lets the threads of its streams run: one that frees memory
    at that moment may abort the process.
    """
    for stream in (None, generation_stream()):  # None: the default one
        with suppress(RuntimeError):  # of a pass that nobody asks for
            mx.synchronize(stream)


def recommended_memory() -> int | None:
    """Return bytes that a program should have on this GPU at most, as macOS recommends; None for other devices."""
    found = mx.device_info().get("max_recommended_working_set_size")
    return None if found is None else int(found)


def whole_memory() -> int:
    """Return bytes of memory that the device has in all; a Mac's GPU and a CPU have the machine's."""
    info = mx.device_info()
    found = info.get("memory_size", info.get("total_memory"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else int(found)


def available_memory() -> int:
    """Return bytes that new programs can use; without psutil, all of the machine's memory."""
    try:
        psutil = import_module("psutil")  # an optional dependency
    except ImportError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return psutil.virtual_memory().available


@contextmanager
def wired_memory() -> Iterator[None]:
    """Within it, what the GPU uses is kept in memory, up to what macOS recommends; elsewhere it does nothing.

    mlx-lm does so while it generates, and not for a pass that is called directly, as evaluation does.
    """
    most = recommended_memory()
    if most is None:
        yield
        return
    before = mx.set_wired_limit(most)
    try:
        yield
    finally:
        mx.synchronize()  # the limit must not change while something is computed
        mx.set_wired_limit(before)
