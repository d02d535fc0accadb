"""A case: a command, its arguments, and a strange or damaged file in place of one of its files."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st
from mutations import damaged

STRANGE = ("a_directory", "a_loop", "a_link_to_nothing", "unreadable", "empty")
ALWAYS = ("manifest.json",)  # what a command reads without a flag
BEGUN, REST = "begun.json", "begun.json.journal"  # what an interrupted run was to write, and what it left


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
            if path.name in (*ALWAYS, *self.files) or path.name in text or (path.name == REST and BEGUN in text):
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


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_strange(path: Path, kind: str) -> None:
    """Make something that is not a readable file."""
    if kind == "a_directory":
        path.mkdir()
    elif kind == "a_loop":
        path.symlink_to(path.name)
    elif kind == "a_link_to_nothing":
        path.symlink_to("nothing")
    else:
        path.touch(0o000 if kind == "unreadable" else 0o666)


# Files that were whole, after a change; and the commands that read them

GENERATE = "generate --model llama -m 2"
EVALUATE = "evaluate --model llama --tokens 8 --context 8 --data"
TEXT = "--num-samples 1 --sequence-length 8"
MODEL_COMMANDS = (
    "generate -m 2 --model {}",
    "generate -m 2 --mode lossless --gears 4,16 --model {}",
    "convert --mlx-path out --model {}",
    "benchmark decode --tokens 1 --trials 1 --model {}",
    "sensitivity --bits 4 --num-samples 1 --sequence-length 4 --model {}",
    "generate -m 2 --model llama --draft-model {}",
    "generate -m 2 --model llama --small-model {}",
    "generate -m 2 --model llama --base {}",
)
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
READERS: dict[str, tuple[str, ...]] = {
    **{f"llama/{name}": tuple(line.format("llama") for line in MODEL_COMMANDS[:5]) for name in MODEL_FILES},
    **{f"small/{name}": tuple(line.format("small") for line in MODEL_COMMANDS[5:7]) for name in MODEL_FILES},
    **{f"{kind}/config.json": (MODEL_COMMANDS[0].format(kind),) for kind in ("mixture", "recurrent", "hybrid")},
    "sliding/config.json": (MODEL_COMMANDS[1].format("sliding"),),
    "quantized/config.json": (MODEL_COMMANDS[0].format("quantized"), MODEL_COMMANDS[7].format("quantized")),
    "quantized/model.safetensors": (MODEL_COMMANDS[0].format("quantized"), MODEL_COMMANDS[7].format("quantized")),
    **{
        f"geared/{name}": (MODEL_COMMANDS[0].format("geared"), "generate -m 2 --residency disk --model geared")
        for name in (*MODEL_FILES, "gears.json", "gears.safetensors")
    },
    **{
        f"exact/{name}": (
            "convert --restore exact --mlx-path out",
            "convert --verify exact",
            MODEL_COMMANDS[0].format("exact"),
        )
        for name in ("gears.json", "gears.safetensors", "original.safetensors")
    },
    "thresholds.json": (f"{GENERATE} --thresholds thresholds.json",),
    "manifest.json": (
        f"{GENERATE} --manifest manifest.json --gears 4,16",
        f"allocate --model llama {TEXT} --gears 4 --exchanges 1",
        "convert --model llama --manifest manifest.json --gears 4 --mlx-path out",
    ),
    "prompts.txt": tuple(f"{name} --model llama --prompts prompts.txt -m 2" for name in ("analyze", "calibrate")),
    "prompts.jsonl": ("analyze --model llama --prompts prompts.jsonl -m 2",),
    "gsm8k.jsonl": (f"{EVALUATE} gsm8k.jsonl", f"sensitivity --model llama --bits 4 {TEXT} --data gsm8k.jsonl"),
    "text.txt": (f"{EVALUATE} text.txt",),
    "cache.safetensors": (f"{GENERATE} --prompt-cache-file cache.safetensors",),
    "adapter/adapter_config.json": (f"{GENERATE} --adapter-path adapter",),
    "adapter/adapters.safetensors": (f"{GENERATE} --adapter-path adapter",),
    "begun.json.journal": (f"sensitivity --model llama --bits 4,5 {TEXT} --out begun.json",),
}
LENGTH = 8  # bytes of the length of a safetensors header


@st.composite
def changes(draw: st.DrawFn, content: bytes, others: list[bytes]) -> bytes | str:
    """Other contents in the place of `content`, or one of STRANGE."""
    kind = draw(st.sampled_from(["json", "json", "json", "cut", "flip", "insert", "swap", "strange"]))
    if kind == "strange":
        return draw(st.sampled_from(STRANGE))
    if kind == "swap":
        return draw(st.sampled_from(others))
    at = draw(st.integers(0, max(len(content) - 1, 0)) | st.integers(0, 64))
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + draw(st.binary(max_size=8)) + content[at:]
    if kind == "json" and (changed := draw(changed_json(content))) is not None:
        return changed
    return content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]


@st.composite
def changed_json(draw: st.DrawFn, content: bytes) -> bytes | None:
    """A change to the JSON of a file, to a line of its JSON Lines, or to its safetensors header; None: it has none."""
    text, rebuilt = draw(json_parts(content))
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return rebuilt(draw(damaged(value)).encode("utf-8", "surrogatepass"))


@st.composite
def json_parts(draw: st.DrawFn, content: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """A piece of JSON in a file, and a function that puts other JSON in its place."""
    length = int.from_bytes(content[:LENGTH], "little")
    if content[LENGTH : LENGTH + 1] == b"{" and LENGTH + length <= len(content):
        after = content[LENGTH + length :]
        return content[LENGTH : LENGTH + length], lambda text: len(text).to_bytes(LENGTH, "little") + text + after
    lines = content.split(b"\n")
    if not (lines[0].startswith(b"{") and lines[0].endswith(b"}")):
        return content, lambda text: text
    number = draw(st.integers(0, len(lines) - 1))
    return lines[number], lambda text: b"\n".join([*lines[:number], text, *lines[number + 1 :]])


def commands_that_read(command: str) -> list[tuple[str, str]]:
    """A file and the line of a command that reads it, for everything that a command reads."""
    return [(file, line) for file, lines in READERS.items() for line in lines if line.split()[0] == command]


@st.composite
def readings(draw: st.DrawFn, command: str, inputs: Path) -> Case:
    """A command that reads a changed file."""
    file, line = draw(st.sampled_from(commands_that_read(command)))
    others = [path.read_bytes() for path in sorted(inputs.iterdir()) if path.is_file()]
    change = draw(changes((inputs / file).read_bytes(), others))
    return Case(command, tuple(line.split()[1:]), {file: change})
