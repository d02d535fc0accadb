"""Validation of the directory of a model or an adapter before any library opens it.

mlx-lm builds as many layers as config.json claims, and errors of the libraries do not name the file.
"""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open

from ..errors import GearbxError, one_line
from .reading import parse_json, parse_python_json, read_as, shown, typed, unreadable


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens; None: the configuration has none."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, Mapping))
    for part in parts:
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
            if type(part.get(key)) is int:
                return part[key]
    return None


COMPLETE = "use the directory of a complete model"
REFETCH = "download it again"

JSON_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "added_tokens.json", "special_tokens_map.json", "adapter_config.json"),
)
PATTERNS = (  # files of a model, a geared checkpoint or an adapter
    *JSON_FILES,
    *("gears.json", "chat_template.json", "*processor_config.json", "*.safetensors.index.json"),
    *("*.safetensors", "*.gguf", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "*.py"),
)

# Fields with the number of layers that mlx-lm builds: a number, or a list or string with one item for each layer.
LAYER_FIELDS = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers", "num_kv_reuse_layers"),
    *("num_loops", "altup_num_inputs"),
    *("layer_types", "layers_block_type", "block_types", "block_configs", "hybrid_override_pattern"),
)
MAX_LAYERS = 1000
SPARE = 64  # maximum number of layers without arrays of their own


def count_arrays(directory: Path, names: str = "model*.safetensors") -> int:
    """Return the number of arrays in safetensors of a pattern. Raises GearbxError for missing or damaged files."""
    files = sorted(directory.glob(names))
    if not files:
        raise GearbxError(f"{directory}: no {names} there; {COMPLETE}")
    count = 0
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                count += len(opened.keys())
        except OSError as error:
            raise unreadable(file, error) from error
        except SafetensorError as error:
            raise GearbxError(f"{file}: damaged or truncated ({one_line(error)}); {REFETCH}") from error
    return count


def check_layers(config: dict[str, Any], arrays: int, file: Path) -> None:
    """Validate the number of layers: mlx-lm builds them before it reads arrays. Raises GearbxError for too many."""
    most = min(MAX_LAYERS, arrays + SPARE)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in LAYER_FIELDS:
            value = part.get(name)
            claimed = len(value) if isinstance(value, list | str) else value
            if isinstance(claimed, int | float) and claimed > most:
                few = f"the weights are {arrays} arrays, too few for it"
                why = few if claimed > arrays + SPARE else f"no model has more than {MAX_LAYERS}"
                raise GearbxError(f"{file}: {name} is {shown(value)}, and {why}; {REFETCH}")


def check_quantization(config: Mapping[str, Any], file: Path) -> None:
    """Validate group sizes and bits, divisors in MLX. Raises GearbxError for anything but whole numbers from 1."""
    for part in (config.get("quantization"), config.get("quantization_config")):
        levels = (part, *part.values()) if isinstance(part, dict) else ()
        for name in ("group_size", "bits"):
            for value in (level[name] for level in levels if isinstance(level, dict) and name in level):
                if value is not None and (type(value) is not int or value < 1):
                    problem = f"{name} of its quantization must be 1 or more, got {shown(value)}"
                    raise GearbxError(f"{file}: {problem}; {REFETCH}")


def check_regular(directory: Path) -> None:
    """Validate that no file of a model is a pipe or a device: reading it would block. Raises GearbxError for one."""
    try:
        for place in directory.iterdir():
            is_read = any(fnmatch(place.name, pattern) for pattern in PATTERNS)
            if is_read and place.exists() and not (place.is_file() or place.is_dir()):
                raise GearbxError(f"{place}: is a pipe or a device, not a file; {COMPLETE}")
    except OSError as error:
        raise unreadable(directory, error) from error


def check_no_file_of_model(path: Path) -> None:
    """Validate that an output is no file of a model or an adapter, also behind a link. Raises GearbxError for one."""
    for place in (path, Path(os.path.realpath(path))):
        own = any(fnmatch(place.name, pattern) for pattern in PATTERNS)
        if own and any((place.parent / name).exists() for name in ("config.json", "adapter_config.json")):
            raise GearbxError(f"{path}: is a file of the model in {place.parent}; choose another place")


def check_json(directory: Path) -> None:
    """Validate the JSON files of a directory. Raises GearbxError with the file's name for a malformed one.

    Called only after a library failed, since reading a large tokenizer a second time takes long.
    """
    for path in (directory / name for name in JSON_FILES):
        if path.exists():
            read_as(path, parse_object, "the JSON of a model", REFETCH)


def parse_object(text: str) -> dict[str, Any]:
    """Return the content of a JSON object as Python's json writes it. Raises GearbxError for other content."""
    return typed(parse_python_json(text), dict[str, Any])


ARRAYS, ADAPTER_FILE = "adapters.safetensors", "adapter_config.json"
USE_ADAPTER = "use a directory that mlx_lm.lora wrote"
if TYPE_CHECKING:
    AdapterKind = str
else:
    AdapterKind = Literal["lora", "dora", "full"]


class Lora(Struct, frozen=True):
    """Settings of LoRA. rank: r. scale: factor of B A. keys: names of adapted layers; None: all that mlx-lm adapts."""

    rank: Annotated[int, Meta(ge=1, le=2**16)]
    scale: float
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    keys: Sequence[str] | None = None


class Adapter(Struct, frozen=True):
    """Settings of an adapter. num_layers: number of adapted blocks, from the last one; -1 and 0: all."""

    fine_tune_type: AdapterKind = "lora"
    num_layers: Annotated[int, Meta(ge=-1, le=2**16)] = -1
    lora_parameters: Lora | None = None

    def __post_init__(self) -> None:
        if self.fine_tune_type != "full" and self.lora_parameters is None:
            raise GearbxError("lora_parameters is missing")


def read_adapter(directory: Path) -> Adapter:
    """Return the settings of an adapter. Raises GearbxError for missing or damaged files, pipes and devices."""
    try:
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "the adapter path does not exist"
            raise GearbxError(f"{directory}: {what}; {USE_ADAPTER}")
        check_regular(directory)
        for name in (ARRAYS, ADAPTER_FILE):
            if not os.path.lexists(directory / name):
                raise GearbxError(f"{directory}: no {name} there; {USE_ADAPTER}")
        count_arrays(directory, ARRAYS)
    except OSError as error:
        raise unreadable(directory, error) from error
    what = "the settings of an adapter"
    return read_as(directory / ADAPTER_FILE, lambda text: typed(parse_json(text), Adapter), what, USE_ADAPTER)
