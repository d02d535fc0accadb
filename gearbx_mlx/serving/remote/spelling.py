"""Entries of a vocabulary as text. mlx_lm.server names tokens by them: "Ġking" for " king"."""

from collections.abc import Sequence


def byte_symbols() -> dict[str, int]:
    """GPT-2's symbols for bytes: a printable byte is its own character, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


SYMBOLS = byte_symbols()


def spelled(names: Sequence[str], text: str) -> list[str]:
    """The names as text, if this is what makes the text of the answer of them; else as they are.

    A token that ends within a character becomes U+FFFD.
    """
    if text and text not in "".join(names):
        if all(char in SYMBOLS for name in names for char in name):
            parts = [bytes(SYMBOLS[char] for char in name) for name in names]
            if text.encode() in b"".join(parts):
                return [part.decode("utf-8", "replace") for part in parts]
        spaced = [name.replace("▁", " ") for name in names]  # SentencePiece
        if text in "".join(spaced):
            return spaced
    return list(names)
