"""The texts that the demo model is trained on, and their validation splits."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

VALIDATION_SHARE = 0.05


@dataclass
class Corpus:
    """Documents of one kind of text, split into training and validation."""

    name: str
    licence: str
    train: list[str]
    valid: list[str]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and validation documents: the last 5 % of the characters, in whole documents, are for validation."""
    total, seen = sum(map(len, documents)), 0
    for i, document in enumerate(documents):
        seen += len(document)
        if seen > (1 - VALIDATION_SHARE) * total:
            return documents[:i], documents[i:]
    return documents, []


def word_problems(path: Path) -> list[str]:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]


def prose(path: Path, length: int = 1600) -> list[str]:
    """Documents of about `length` characters: paragraphs without their line wraps."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))]
    return gather([p for p in paragraphs if p], length)


def verse(path: Path, length: int = 1600) -> list[str]:
    """Documents of about `length` characters: speeches with their line breaks, which mean something in a play."""
    return gather([s for s in path.read_text(encoding="utf-8").split("\n\n") if s.strip()], length)


def gather(paragraphs: list[str], length: int) -> list[str]:
    documents, current = [], ""
    for paragraph in paragraphs:
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= length:
            documents.append(current)
            current = ""
    return [*documents, current] if current else documents


def load_corpora(data: Path) -> list[Corpus]:
    return [
        Corpus("gsm8k", "MIT", *split(word_problems(data / "gsm8k_train.jsonl"))),
        Corpus("fairy_tales", "public domain", *split(prose(data / "grimms_fairy_tales.txt"))),
        Corpus("shakespeare", "public domain", *split(verse(data / "tinyshakespeare.txt"))),
    ]
