"""A case: a command, its arguments, and what stands in the place of one of its files."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STRANGE = ("a_directory", "a_loop", "a_link_to_nothing", "unreadable", "empty")
ALWAYS = ("manifest.json",)  # what a command reads without a flag
# What a name on the command line stands for besides: the rest of an interrupted run, the data of a task.
WITH = {"stopped": "stopped.incomplete", "begun.json": "begun.json.journal", "tasks": "gsm8k.jsonl"}


@dataclass(frozen=True)
class Case:
    """A command to run. files: a path, such as llama/config.json, to other contents, or to one of STRANGE."""

    name: str
    arguments: tuple[str, ...]
    files: Mapping[str, bytes | str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The shorter a case, the better it shows a problem."""
        return len(" ".join(self.arguments)) + sum(map(len, self.files.values()))

    def prepare(self, inputs: Path, directory: Path) -> None:
        """Fill an empty directory with everything that the arguments name: copies of inputs, and strange files."""
        text = " ".join(self.arguments)
        for path in inputs.iterdir():
            if path.name in (*ALWAYS, *self.files) or path.name in text or path.name in named_by(text):
                copy = shutil.copytree if path.is_dir() else shutil.copy
                copy(path, directory / path.name)
        for name in STRANGE:
            if name in text:
                make_strange(directory / name, name)
        for name, content in self.files.items():
            remove(directory / name)
            if isinstance(content, bytes):
                (directory / name).write_bytes(content)
            else:
                make_strange(directory / name, content)


def named_by(text: str) -> list[str]:
    return [left for name, left in WITH.items() if name in text]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_strange(path: Path, kind: str) -> None:
    """Make something that is no readable file."""
    if kind == "a_directory":
        path.mkdir()
    elif kind == "a_loop":
        path.symlink_to(path.name)
    elif kind == "a_link_to_nothing":
        path.symlink_to("nothing")
    else:
        path.touch(0o000 if kind == "unreadable" else 0o666)
