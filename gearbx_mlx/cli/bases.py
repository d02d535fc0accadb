"""Which text calibrates a base, and where bases of models are kept: one file each, in the user's cache.

A base stands under the fingerprint of its model, with how gears are stored and the hash of the text. Its file has the
planes under the names that mlx-lm gives them, and the drafting file that belongs to them.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import platformdirs

from ..conversion.calibrated_base import LONGEST, calibrate_base, steps
from ..decoding.draft_plans import CALIBRATED
from ..decoding.draft_trials import draft_files, record_along
from ..errors import GearbxError
from ..files.reading import json_lines, read_text
from ..files.writing import make_directory, replacing
from ..formats import get_format
from ..formats.base import Format
from ..gears.discovery import discover, is_quantized
from ..gears.gearbox import Gearbox, model_fingerprint
from ..gears.ladder import DENSE
from ..kernels.bit_planes import Planes
from ..loading import DEMO_MODEL
from ..ranks.place import current
from ..routing.acceptance import DraftFile, parse_draft_file
from .resolved import LOSSLESS, Resolved
from .terminal import note, progress_bar, spinner

SHIPPED = Path(DEMO_MODEL) / "calibration"
MOST = 16_384  # tokens of a text that are read
HELD_BACK = 4  # of so many texts one is left for the curve: along the others, the gears agree more than elsewhere
VERSION = "1"
NAMES = ("weight", "scales", "biases")


class ShippedAnswer(msgspec.Struct, frozen=True):
    """A line of answers.jsonl."""

    prompt: str
    answer: str


def texts_of(tokenizer: Any, file: str | None) -> list[list[int]]:
    """The tokens of the texts to calibrate with, `LONGEST` at most in each.

    Args:
        file: text, or JSON Lines as of GSM8K; None or "": what ships, chat in the model's own template.

    Raises:
        GearbxError: a file that cannot be read or is empty, or that is shorter than two tokens.
    """
    from ..evaluation.text import read_documents  # few runs need it

    documents = read_documents(Path(file) if file else SHIPPED / "text.jsonl")
    encoded = [tokenizer.encode(document) for document in documents]
    if not file:
        place = SHIPPED / "answers.jsonl"
        lines = json_lines(
            place, read_text(place, "text", "install the package again"), ShippedAnswer, "install it again"
        )
        encoded += [chat_tokens(tokenizer, line) for _, line in lines]
    pieces = [list(text[i : i + LONGEST]) for text in encoded for i in range(0, len(text), LONGEST)]
    texts, left = [], MOST
    for piece in pieces:
        if len(piece) > 1 and left > 0:
            texts.append(piece[:left])
            left -= len(piece)
    if not texts:
        raise GearbxError(f"{file}: has no two tokens to calibrate with; give more text")
    return texts


def chat_tokens(tokenizer: Any, line: ShippedAnswer) -> list[int]:
    """The tokens of a request and its answer."""
    messages = [{"role": "user", "content": line.prompt}, {"role": "assistant", "content": line.answer}]
    if getattr(tokenizer, "has_chat_template", False):
        try:
            return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        except Exception:  # templates are programs, and some want other messages
            pass
    return list(tokenizer.encode(f"{line.prompt}\n\n{line.answer}\n"))


@dataclass
class Base:
    """A calibrated base. layers: path to the lowest gear's plane. rounded: path to reason of the others."""

    layers: dict[str, Planes]
    rounded: dict[str, str] = field(default_factory=dict)
    drafting: DraftFile | None = None


@dataclass(frozen=True)
class BaseKey:
    """What a base depends on. ladder: bits of all gears. text: hash of the tokens; "": of any text."""

    fingerprint: str
    format: str
    ladder: tuple[int, ...]
    manage: str
    group_size: int
    text: str = ""

    @property
    def file(self) -> Path:
        """Of the user's cache, or of the folder GEARBX_BASES."""
        about = f"{VERSION} {self.format} {self.ladder} {self.manage} {self.group_size}"
        short = hashlib.sha256(about.encode()).hexdigest()[:8]
        name = f"{self.fingerprint[:16]}-{short}-{self.text or '*'}.safetensors"
        folder = os.environ.get("GEARBX_BASES")
        cache = platformdirs.user_cache_path("gearbx-mlx", appauthor=False) / "bases"
        return (Path(folder) if folder else cache) / name

    def find(self) -> "Base | None":
        """The base that is kept, the latest one for any text; None where there is none, or it is damaged."""
        try:
            files = sorted(self.file.parent.glob(self.file.name), key=lambda file: file.stat().st_mtime)
            return read_base(files[-1], self) if files else None
        except OSError:
            return None

    def keep(self, base: Base) -> None:
        """Write a base. Raises GearbxError where the cache cannot be written."""
        make_directory(self.file.parent)
        arrays = {
            f"{path}.{name}": array for path, planes in base.layers.items() for name, array in zip(NAMES, planes.arrays)
        }
        about = {"fingerprint": self.fingerprint, "group_size": str(self.group_size), "bits": str(self.ladder[0])}
        about["rounded"] = msgspec.json.encode(base.rounded).decode()
        about["drafting"] = "" if base.drafting is None else base.drafting.text()
        with replacing(self.file) as place:
            beside = place.with_name(f"{place.name}.safetensors")  # save_safetensors adds the suffix to any other name
            try:
                mx.save_safetensors(str(beside), arrays, about)
                beside.replace(place)
            finally:
                beside.unlink(missing_ok=True)


def read_base(file: Path, key: BaseKey) -> Base | None:
    """The base of a file; None where it is another one's or damaged."""
    try:
        arrays, about = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(str(file), return_metadata=True))
        mx.eval(arrays)  # which a file that was cut off does not have
        if about["fingerprint"] != key.fingerprint:
            return None
        bits, group_size = int(about["bits"]), int(about["group_size"])
        layers = {}
        for path in {name.rpartition(".")[0] for name in arrays}:
            words, scales, biases = (arrays[f"{path}.{name}"] for name in NAMES)
            layers[path] = Planes([words], scales, [biases], (bits,), group_size)
        drafting = parse_draft_file(about["drafting"]) if about["drafting"] else None
        return Base(layers, msgspec.json.decode(about["rounded"], type=dict[str, str]), drafting)
    except (RuntimeError, KeyError, ValueError, GearbxError):
        return None


def key_of(
    model: nn.Module,
    format: Format,
    ladder: Sequence[int],
    manage: str,
    group_size: int,
    texts: Sequence[Sequence[int]],
) -> BaseKey:
    """What the base of a model depends on. texts: tokens; none: of any text."""
    digest = hashlib.sha256(msgspec.json.encode([*texts])).hexdigest()[:16] if texts else ""
    return BaseKey(model_fingerprint(model), format.name, tuple(ladder), manage, group_size, digest)


def make_base(model: nn.Module, key: BaseKey, format: Format, texts: Sequence[Sequence[int]], progress: Any) -> Base:
    """Calibrate a base, and keep it.

    Args:
        model: not quantized, without gears.
        progress: a bar (`progress_bar`).

    Raises:
        GearbxError: as `calibrate_base`, or a cache that cannot be written.
    """
    layers, _ = discover(model, key.manage, key.group_size, format)
    task = progress.add_task("calibrating", total=steps(model))
    used = [text for i, text in enumerate(texts) if i % HELD_BACK or len(texts) < HELD_BACK]
    advance = partial(progress.advance, task)
    found = calibrate_base(model, layers, format, key.ladder, key.group_size, used, advance)
    base = Base(found.layers, found.rounded)
    key.keep(base)
    return base


def drafting_along(gearbox: Gearbox, texts: Sequence[Sequence[int]], name: str) -> DraftFile:
    """How the lowest gear drafts for the top one, from texts that did not calibrate it.

    Args:
        name: of the model.
    """
    top, low = gearbox.ladder.top, gearbox.ladder[0]
    records = [record_along(gearbox, top, low, text) for text in texts[::HELD_BACK]]
    (file,) = draft_files(gearbox, top, {low: records}, name, gearbox.group_size, gearbox.format.name)
    return file


def base_key(resolved: Resolved, model: nn.Module, tokenizer: Any) -> tuple[BaseKey | None, list[list[int]]]:
    """What the calibrated base of a model depends on, and the texts that make it; no key where it has none.

    Mode lossless takes one that is there without being asked: its text is the top gear's, with any drafts.

    Raises:
        GearbxError: a base is asked for, and the model cannot have one.
    """
    text, ladder = resolved.calibrate_base, [gear.bits for gear in resolved.ladder]
    plain = not (resolved.floors or resolved.low_model or resolved.manifest or resolved.cap_bits or resolved.saved)
    able = plain and not is_quantized(model) and current() is None and ladder[0] != DENSE and not resolved.observes
    if text is None:
        uses = able and resolved.mode.mode == LOSSLESS and ladder[-1] == DENSE
        key = (model, get_format(resolved.format), ladder, resolved.manage, resolved.group_size, ())
        return (key_of(*key) if uses else None), []
    if not able:
        raise GearbxError("--calibrate-base is for an original model in one process, without floors and other codes")
    texts = texts_of(tokenizer, text)
    return key_of(model, get_format(resolved.format), ladder, resolved.manage, resolved.group_size, texts), texts


def find_base(resolved: Resolved, model: nn.Module, key: BaseKey, texts: list[list[int]]) -> Base | None:
    """The base that is kept; else one that is made, if there are texts to make it of."""
    base = key.find()
    if base is not None:
        note(f"base: calibrated earlier, {key.file.parent}")
    elif texts:
        with progress_bar() as progress:
            base = make_base(model, key, get_format(resolved.format), texts, progress)
        note(f"base: {len(base.layers)} layers calibrated with {sum(map(len, texts))} tokens, and kept")
        show_rounded(base)
    return base


def show_rounded(base: Base) -> None:
    """Name the layers of a base that have the nearest codes, by their reason."""
    for reason in sorted({*base.rounded.values()}):
        paths = [path for path, why in base.rounded.items() if why == reason]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        note(f"base: {', '.join(paths[:3])}{more} rounded: {reason}")


def draft_with(base: Base, gearbox: Gearbox, key: BaseKey, texts: list[list[int]], name: str) -> None:
    """Let lossless mode draft by the curve of a base, which is made from the texts where it is not kept yet."""
    if base.drafting is None and texts and gearbox.ladder.top.dense:
        with spinner("drafting curve"):
            base.drafting = drafting_along(gearbox, texts, name)
        key.keep(base)
    if base.drafting is not None:
        CALIBRATED[gearbox] = base.drafting
