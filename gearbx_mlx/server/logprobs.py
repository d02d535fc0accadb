"""A server of models in gears, and servers of others. Knows no flag.

Here is what flags and the commands that have no use for a server need of it: importing it costs nothing.
"""

from ..errors import GearbxError

ASSUMED_VOCABULARY = 262144  # Gemma's, the largest that is common: for smaller ones the upper bounds hold too


class OtherError(GearbxError):
    """Says what a server of others does: one line with its URL and the remedy.

    status: of HTTP, where it refused a request; else 0. reason: its words, or what it did.
    """

    def __init__(self, message: str, status: int = 0, reason: str = ""):
        super().__init__(message)
        self.status, self.reason = status, reason


def byte_symbols() -> dict[str, int]:
    """Return GPT-2's symbols for bytes: a printable byte is its own character, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


SYMBOLS = byte_symbols()
