"""README.md of a checkpoint: its content, in figures of its conversion, and commands to run it.

The module also writes stock checkpoints with one table of bits. mlx-lm reads them as its own quantization.
"""

import contextlib
import math
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from huggingface_hub import ModelCard, ModelCardData
from mlx_lm.utils import quantize_model, save

from .. import __version__
from ..errors import one_line
from ..files.smollm2 import SMOLLM2
from ..formats import LIKE_MLX, SPLIT_CODES
from ..gears.discovery import at_least
from ..gears.ladder import DENSE, Ladder
from ..gears.manifest import ORIGINAL_FILE, Manifest


def write_table(
    model: nn.Module,
    tokenizer: Any,
    config: dict[str, Any],
    source: Path,
    work: Path,
    bits: Mapping[str, int],
    group_size: int,
) -> None:
    """Quantize a model and write it into the directory `work`, replacing the directory's content.

    Args:
        source: directory of the original, for the files in addition to the weights.
        bits: path to the bits of a layer; layers that are missing keep their weights.
    """

    def bits_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        width = bits.get(path, DENSE)
        return {"bits": width, "group_size": group_size, "mode": "affine"} if width != DENSE else False

    with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints the bits per weight
        model, config = quantize_model(model, config, group_size, min(bits.values()), quant_predicate=bits_of)
        for before in work.iterdir():  # the directory itself is locked
            shutil.rmtree(before) if before.is_dir() else before.unlink()
        try:
            save(work, source, model, tokenizer, config)
        except Exception as error:  # MLX and tokenizers raise various errors for a full disk
            if not isinstance(error, OSError | RuntimeError) and type(error) is not Exception:
                raise
            raise OSError(getattr(error, "errno", None), one_line(error)) from error


CARD = "README.md"
KEPT_METADATA = ("license", "license_name", "license_link", "language", "pipeline_tag")  # keys to keep


@dataclass(frozen=True)
class GearSize:
    """One gear: its name and bits, the bytes of the layers that change gear, and their bits per weight."""

    name: str
    bits: int
    bytes: int
    bits_per_weight: float


@dataclass(frozen=True)
class CardQuality:
    """Distance of the gears from the original on a number of tokens: a head, and a row for each gear."""

    tokens: int
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Provenance:
    """The origin of a checkpoint, and its name.

    name: the user's name of the checkpoint: a directory or a Hub repository. base_model: the original's Hub repository;
    None without one. shown: the original's name in a sentence. metadata: of the original's model card.
    """

    name: str
    base_model: str | None
    shown: str
    metadata: Mapping[str, Any]


def provenance(name: str, model: str | None, directory: Path) -> Provenance:
    """Return the provenance of the checkpoint `name`. model: as the user gave it; directory: of its files."""
    if model is None:
        return Provenance(name, None, "The demo model of gearbx-mlx", {})
    path = Path(model).expanduser()
    if path.is_dir():
        card = directory / CARD
        return Provenance(name, None, directory.resolve().name, read_metadata(card) if card.is_file() else {})
    if path.is_file() or model == SMOLLM2:  # a name that the Hub does not have
        return Provenance(name, None, path.name, {})
    return Provenance(name, model, f"[{model}](https://huggingface.co/{model})", read_metadata(model))


def read_metadata(card: str | Path) -> dict[str, Any]:
    """Return license, language and tags of a model card in a file or on the Hub; empty if it cannot be read."""
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no card, or metadata that the Hub would refuse: the card omits them
        return {}
    found = {key: data[key] for key in (*KEPT_METADATA, "tags") if data.get(key)}
    if not isinstance(found.get("tags", []), list):
        del found["tags"]
    return found


def gear_sizes(manifest: Manifest, sizes: Mapping[str, int]) -> list[GearSize]:
    """Return the size of every gear of a geared checkpoint. sizes: bytes of every array in its files, by name."""
    weights = sum(math.prod(layer.shape) for layer in manifest.layers.values())
    found = []
    for gear in Ladder(manifest.gears):
        total = 0
        for layer in manifest.layers.values():
            bits = at_least(sorted(layer.gears), max(gear.bits, layer.lowest_bits))
            total += sum(sizes[name] for name in set(layer.gears[bits].values()))
        found.append(GearSize(gear.name, gear.bits, total, 8 * total / weights))
    return found


def geared_card(
    manifest: Manifest,
    gears: Sequence[GearSize],
    files: Mapping[str, int],
    origin: Provenance,
    original: int | None,
    quality: CardQuality | None = None,
) -> str:
    """Return the model card of a checkpoint with gears.

    files: name to bytes of the files with weights, the base first. original: bytes of its weights; None if not stored.
    quality: as measured; None: not in the card.
    """
    base, others, *_ = files
    rows = [(gear.name, str(gear.bits), f"{gear.bits_per_weight:.2f}", megabytes(gear.bytes)) for gear in gears]
    sizes = [(f"`{name}`", megabytes(size)) for name, size in files.items()]
    sizes += [] if original is None else [("together", megabytes(sum(files.values())))]
    bits = ", ".join(str(gear.bits) for gear in gears)
    group = f", groups of {manifest.group_size}" if manifest.format in LIKE_MLX else ""
    weights = sum(math.prod(layer.shape) for layer in manifest.layers.values())
    original_weights = "The 16-bit gear has the original weights."
    if manifest.format == SPLIT_CODES:
        original_weights = (
            "The highest gear has the codes, scales and biases of the original; a lower one reads their first bits."
        )
    text = [
        f"# {origin.name}",
        f"{origin.shown} in gears of {bits} bits. gearbx-mlx changes the gear while the model generates. Converted "
        f"with gearbx-mlx {__version__}.",
        *([] if original is None else [three_in_one(gears, sum(files.values()), original)]),
        "## Gears",
        f"Format `{manifest.format}`{group}. {len(manifest.layers)} layers with {weights:,} weights change gear"
        + (f"; {len(manifest.unmanaged)} linear layers do not." if manifest.unmanaged else "."),
        table(("gear", "bits", "bits per weight", "size"), rows),
        "Sizes and bits per weight are of the layers that change gear, as stored, including scales. Gears share "
        f"arrays if the format allows it. {original_weights}",
        table(("file", "size"), sizes),
        *rows_text(manifest),
        *([] if quality is None else quality_text(quality)),
        *run_with_gearbx(origin.name, f"`{others}` has the gears that `{base}` does not have."),
        *([] if original is None else lossless_text(origin.name)),
        "## Use with mlx-lm",
        mlx_lm_text(manifest, gears),
    ]
    if manifest.stock:
        text.append(use_of_mlx_lm(origin.name))
    return card_text(text, origin)


def three_in_one(gears: Sequence[GearSize], size: int, original: int) -> str:
    """Return the summary of a checkpoint that contains its original. size, original: in bytes."""
    bits = gears[0].bits
    return (
        f"It is three models in one: a {bits}-bit model that mlx-lm runs; the lossless pair, in which that model "
        "drafts and the original verifies; and the bfloat16 original, bit for bit. "
        f"Together they take {megabytes(size)}: {share_text(size, original)}."
    )


def share_text(size: int, original: int) -> str:
    """Return a size relative to the original's weights, both in bytes."""
    return f"{size / original:.2f} of the original's {megabytes(original)}"


def lossless_text(name: str) -> list[str]:
    """Return how to generate the original's output with fewer bytes read, and how to restore its files."""
    return [
        "The original's output, with drafts of the lowest gear:",
        shell(f"gearbx_mlx generate --model {shlex.quote(name)} --mode lossless --prompt 'Once upon a time'"),
        "## The original",
        shell(f"gearbx_mlx convert --restore {shlex.quote(name)} --mlx-path original"),
        "This writes every file that mlx-lm reads of the original, byte for byte; `gears.json` has the SHA-256 of each "
        f"tensor. `{ORIGINAL_FILE}` has the parts that no parameter of the model contains, needed only for this.",
    ]


def quality_text(quality: CardQuality) -> list[str]:
    """Return the distance of the gears from the original, as mlx-kld and llama.cpp show it."""
    return [
        "## Distance from the original",
        table(quality.head, quality.rows),
        f"Measured on these weights with {quality.tokens:,} tokens of a text that no calibration reads. KL: divergence "
        "of the original's next-token distribution from the gear's, in nats per token. Same top: tokens with the same "
        "most probable next token. PPL ratio: perplexity over the original's.",
    ]


def rows_text(manifest: Manifest) -> list[str]:
    """Return the bits of input rows, if they depend on the gear."""
    rows = {layer.rows for layer in manifest.changing.values()} - {DENSE}
    if not rows:
        return []
    others = "; in the other gears, they read the original rows" if len(manifest.gears) > 1 else ""
    return [f"In the lowest gear, input tokens read {', '.join(map(str, sorted(rows)))}-bit embedding rows{others}."]


def mlx_lm_text(manifest: Manifest, gears: Sequence[GearSize]) -> str:
    """Return how stock mlx-lm reads the checkpoint."""
    if not manifest.stock:
        return f"mlx-lm does not run this checkpoint: it does not have the format `{manifest.format}`."
    if manifest.format in LIKE_MLX:
        return f"mlx-lm runs the base, which is the gear `{gears[0].name}`, as a {gears[0].bits}-bit model:"
    return "mlx-lm runs the base, which is the original:"


def table_card(bits: Mapping[str, int], size: int, weights: int, files: Mapping[str, int], origin: Provenance) -> str:
    """Return the model card of one table of a precision manifest, written for mlx-lm.

    bits: by path of a layer. size, weights: bytes of these layers, and their number of weights. files: name to bytes.
    """
    counts = [(f"{width}", str(sum(value == width for value in bits.values()))) for width in sorted({*bits.values()})]
    text = [
        f"# {origin.name}",
        f"{origin.shown} with bits for every layer, chosen by measured costs of each layer's precision. "
        f"Converted with gearbx-mlx {__version__}.",
        "## Precision",
        f"{len(bits)} layers with {weights:,} weights take {megabytes(size)}: {8 * size / weights:.2f} bits per weight "
        "with their scales. A 16-bit layer has its original weights.",
        table(("bits", "layers"), counts),
        table(("file", "size"), [(f"`{name}`", megabytes(count)) for name, count in files.items()]),
        "## Use with mlx-lm",
        "This is a stock model of mlx-lm:",
        use_of_mlx_lm(origin.name),
        *run_with_gearbx(origin.name, "gearbx-mlx only records the gears that this model would use; it has no others."),
    ]
    return card_text(text, origin)


def use_of_mlx_lm(name: str) -> str:
    return shell("pip install mlx-lm", f"mlx_lm.generate --model {shlex.quote(name)} --prompt 'Once upon a time'")


def run_with_gearbx(name: str, note: str) -> list[str]:
    command = f"gearbx_mlx generate --model {shlex.quote(name)} --prompt 'Once upon a time'"
    return ["## Use with gearbx-mlx", shell(command), note]


def card_text(paragraphs: Iterable[str], origin: Provenance) -> str:
    """Return a model card with its metadata for the Hub."""
    tags = dict.fromkeys([*origin.metadata.get("tags", []), "mlx", "gearbx-mlx"])
    kept = {key: value for key, value in origin.metadata.items() if key != "tags"}
    relation = {"base_model": origin.base_model, "base_model_relation": "quantized"} if origin.base_model else {}
    data = ModelCardData(
        **{"pipeline_tag": "text-generation", **kept, **relation},
        library_name="mlx",
        tags=list(tags),
        ignore_metadata_errors=True,
    )
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(paragraphs) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def shell(*commands: str) -> str:
    return "```bash\n" + "\n".join(commands) + "\n```"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
