"""Small damage to JSON and arrays: what a wrong edit, a broken download or malice may leave of a file."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gearbx_mlx.gears.manifest import GEARS_FILE, MANIFEST
from gearbx_mlx.gears.tensor_files import hash_place, header_of

DEEP = "[" * 10000 + "]" * 10000
NUMBERS = [0, 1, -1, 3, 7, 32, 2**31, 2**70, -(10**400), 0.5, -0.0, 1e308]
TEXTS = ["", " ", "8", "__class__", "../x", "a\nb", "x" * 5000]
ODD: list[Any] = [*NUMBERS, *TEXTS, None, True, False, [], {}, [0], [[]], {"a": 1}, {"": ""}]
LITERALS = ["NaN", "-Infinity", "1e999", "9" * 5000, DEEP, '"\\ud800"', '"\\u0000"', "tru"]
PLACE = "@place@"

Place = tuple[Any, ...]


def places(content: Any, here: Place = ()) -> list[Place]:
    """All places with a value: keys and indices, the root first."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [here] + [place for key, value in inner for place in places(value, (*here, key))]


def value_at(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def replaced(content: Any, place: Place, value: Any) -> Any:
    """A copy with another value in a place."""
    if not place:
        return value
    content = copy.deepcopy(content)
    value_at(content, place[:-1])[place[-1]] = value
    return content


def dropped(content: Any, place: Place) -> Any:
    content = copy.deepcopy(content)
    del value_at(content, place[:-1])[place[-1]]
    return content


def renamed(content: Any, place: Place, name: str) -> Any:
    """A copy in which a key has another name; an item of a list is doubled."""
    content = copy.deepcopy(content)
    holder = value_at(content, place[:-1])
    if isinstance(holder, dict):
        holder[name] = holder.pop(place[-1])
    else:
        holder.append(holder[place[-1]])
    return content


@st.composite
def damaged(draw: st.DrawFn, content: Any) -> str:
    """The text of a JSON value after one change, which may leave its meaning as it was."""
    inside = places(content)
    kind = draw(st.sampled_from(["drop", "replace", "literal", "swap", "rename", "cut", "byte"]))
    place = draw(st.sampled_from(inside))
    text = json.dumps(content)
    if kind == "cut":
        begin = draw(st.integers(0, len(text)))
        return text[:begin] + text[draw(st.integers(begin, min(len(text), begin + 40))) :]
    if kind == "byte":
        at = draw(st.integers(0, len(text) - 1))
        return text[:at] + draw(st.sampled_from('"{}[],:0-\\x\x00\ud7ffé')) + text[at + 1 :]
    if kind == "literal":
        literal = draw(st.sampled_from(LITERALS))
        return json.dumps(replaced(content, place, PLACE)).replace(json.dumps(PLACE), literal)
    if kind == "drop" and place:
        return json.dumps(dropped(content, place))
    if kind == "rename" and place:
        return json.dumps(renamed(content, place, draw(st.sampled_from([*TEXTS, "16", "4", "3", "99"]))))
    if kind == "swap":
        other = draw(st.sampled_from(inside))
        if place[: len(other)] != other and other[: len(place)] != place:
            swapped = replaced(content, place, value_at(content, other))
            return json.dumps(replaced(swapped, other, value_at(content, place)))
    return json.dumps(replaced(content, place, draw(st.sampled_from(ODD))))


def edit(file: Path, change: Callable[[Any], object] = lambda content: None, **fields: Any) -> None:
    """Change the JSON object in a file by a function, or give some of its fields other values."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content | fields))


def change_array(file: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of an array in a safetensors file, in place."""
    place = header_of(file).places[name]
    content = bytearray(file.read_bytes())
    content[place.begin : place.end] = change(bytes(content[place.begin : place.end]))
    file.write_bytes(content)


def flip(data: bytes, at: int = 0) -> bytes:
    """Return bytes of which one has another lowest bit."""
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def sign_files(directory: Path) -> None:
    """Give gears.json the hashes of the files as they are now, except those of single arrays."""
    content = json.loads((directory / MANIFEST).read_text())
    content["gears_hash"] = header_of(directory / GEARS_FILE).hash
    content["base"] = {name: header_of(directory / name).hash for name in content["base"]}
    (directory / MANIFEST).write_text(json.dumps(content))


def sign_arrays(directory: Path) -> None:
    """Give gears.json all hashes of the files as they are now, as an attacker would."""
    sign_files(directory)
    content = json.loads((directory / MANIFEST).read_text())
    for name in (GEARS_FILE, *content["base"]):
        places = header_of(directory / name).places
        content["hashes"] |= {array: hash_place(place) for array, place in places.items()}
    (directory / MANIFEST).write_text(json.dumps(content))
