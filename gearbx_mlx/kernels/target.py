"""What the CPU kernels are compiled for: a system, its processor, and the MLX that they are linked with."""

import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

ARM = ("arm64", "aarch64")
OLDEST_MAC = "apple-m1"  # as compilers name its processor; GCC does from version 15 on
CPUINFO = Path("/proc/cpuinfo")  # Linux


@dataclass(frozen=True)
class Target:
    """A machine to compile for; usually this one.

    system, machine: as `sys.platform` and `platform.machine()` name them. mlx: the directory of its MLX.
    """

    system: str
    machine: str
    mlx: Path

    @property
    def is_mac(self) -> bool:
        return self.system == "darwin"

    @property
    def processor_flag(self) -> str:
        """The compiler's flag for the processor. A Mac's cache may move to another Mac, so there it is the oldest."""
        if self.machine not in ARM:
            return "-march=native"
        return f"-mcpu={OLDEST_MAC}" if self.is_mac else "-mcpu=native"


def this_target() -> Target:
    """This machine and its MLX."""
    return Target(sys.platform, platform.machine(), Path(mx.__file__).parent)


def processor_model() -> str:
    """The name of this processor, such as `Apple M2 Pro`; empty where the system has none."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return apple_model()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def processor_features() -> str:
    """This processor's model and, on Linux, its instruction sets, on which -march=native depends."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {apple_model() or platform.processor()}"
    fields = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def apple_model() -> str:
    """The name of a Mac's processor, such as `Apple M2 Pro`; empty elsewhere."""
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.strip()
    except OSError:
        return ""
