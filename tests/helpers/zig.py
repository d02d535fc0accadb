"""zig's C++ compiler, which is clang with the headers and libraries of every system.

`python tests/helpers/zig.py ARGUMENTS` starts it. It differs from other clangs in how it spells
processors: apple_m1 for apple-m1.
"""

import importlib.util
import os
import sys
from pathlib import Path


def find_zig() -> Path | None:
    """The program of the wheel `ziglang`, or None where that is not installed."""
    wheel = importlib.util.find_spec("ziglang")
    return Path(wheel.origin).with_name("zig") if wheel and wheel.origin else None


def compiler_for(target: str) -> list[str]:
    """The command of a C++ compiler for a target such as aarch64-macos.14.0."""
    return [sys.executable, __file__, "-target", target]


def clang_for(target: str) -> list[str]:
    """The command of zig's clang with GCC's libraries for this target, since zig would compile its own."""
    program = find_zig() or Path("zig")
    headers = program.with_name("lib") / "include"  # of the processor's own functions
    return [str(program), "clang", "--driver-mode=g++", f"--target={target}", "-isystem", str(headers)]


if __name__ == "__main__":
    arguments = [
        word.replace("-", "_").replace("_mcpu", "-mcpu", 1) if word.startswith("-mcpu=") else word
        for word in sys.argv[1:]
    ]
    os.execv(find_zig(), ["zig", "c++", *arguments])
