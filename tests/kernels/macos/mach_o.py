"""What a library for macOS (Mach-O, 64 bits) says of itself: its processor, and the symbols that it has and needs."""

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC, ARM64 = 0xFEEDFACF, 0x0100000C
SYMBOLS, BUILD = 0x2, 0x32  # LC_SYMTAB, LC_BUILD_VERSION
LIBRARIES = (0xC, 0x80000018, 0x8000001F, 0x80000023)  # LC_LOAD_DYLIB and its kinds: weak, reexported, upward
EXTERNAL, KIND, DEBUGGING = 0x01, 0x0E, 0xE0  # of a symbol's n_type
ANYWHERE = (0, 0xFE)  # in the place of a library's number: dyld searches what the process has loaded; zig writes 0


@dataclass(frozen=True)
class Library:
    """processor, system: ARM64 is 0x0100000c, macOS 1. exports: names. needs: name to the library that has it.

    A needed name that any library of the process may have, such as Python's, has None.
    """

    processor: int
    system: int
    exports: frozenset[str]
    needs: dict[str, str | None]


def read_library(file: Path) -> Library:
    data = file.read_bytes()
    magic, processor, _, _, commands = struct.unpack_from("<5I", data)
    assert magic == MAGIC, f"{file} is not a 64-bit Mach-O file"
    libraries, symbols, system, offset = [""], [], 0, 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, offset)
        if command in LIBRARIES:
            libraries.append(text_at(data, offset + struct.unpack_from("<I", data, offset + 8)[0]))
        elif command == BUILD:
            system = struct.unpack_from("<I", data, offset + 8)[0]
        elif command == SYMBOLS:
            first, count, strings = struct.unpack_from("<3I", data, offset + 8)
            table = struct.iter_unpack("<IBBHQ", data[first : first + 16 * count])
            symbols = [(text_at(data, strings + name), kind, number >> 8) for name, kind, _, number, _ in table]
        offset += size
    external = [s for s in symbols if s[1] & EXTERNAL and not s[1] & DEBUGGING]
    exports = frozenset(name for name, kind, _ in external if kind & KIND)
    needs = {name: None if n in ANYWHERE else libraries[n] for name, kind, n in external if not kind & KIND}
    return Library(processor, system, exports, needs)


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()
