"""What stands in the directory of a model or an adapter, looked at before any library opens it.

mlx-lm builds as many layers as config.json asks for, and the libraries do not say which file they cannot parse.
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
    """Return tokens that the model was made for, if its configuration says so."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, Mapping))
    for part in parts:
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
            if type(part.get(key)) is int:
                return part[key]
    return None


COMPLETE = "give the directory of a complete model"
REFETCH = "download it again"

JSON_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "added_tokens.json", "special_tokens_map.json", "adapter_config.json"),
)
PATTERNS = (  # what a model, a geared checkpoint or an adapter is read from
    *JSON_FILES,
    *("gears.json", "chat_template.json", "*processor_config.json", "*.safetensors.index.json"),
    *("*.safetensors", "*.gguf", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "*.py"),
)

# Fields from which mlx-lm takes how many layers to build, as a number, or as a list or a string with one item for each.
LAYER_FIELDS = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers", "num_kv_reuse_layers"),
    *("num_loops", "altup_num_inputs"),
    *("layer_types", "layers_block_type", "block_types", "block_configs", "hybrid_override_pattern"),
)
MAX_LAYERS = 1000
SPARE = 64  # a layer without arrays of its own shares those of another; no model has more of them


def count_arrays(directory: Path, names: str = "model*.safetensors") -> int:
    """Return how many arrays the safetensors of a pattern have. Raises GearbxError for missing or damaged ones."""
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
    """Raises GearbxError for more layers than the arrays can fill: mlx-lm builds them before it looks for arrays."""
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
    """Raises GearbxError for groups or codes of no size, of the model or of a layer: MLX divides by them and ends."""
    for part in (config.get("quantization"), config.get("quantization_config")):
        levels = (part, *part.values()) if isinstance(part, dict) else ()
        for name in ("group_size", "bits"):
            for value in (level.get(name) for level in levels if isinstance(level, dict)):
                if isinstance(value, int | float) and value < 1:
                    raise GearbxError(f"{file}: {name} of its quantization is {shown(value)}, below 1; {REFETCH}")


def check_regular(directory: Path) -> None:
    """Raises GearbxError for a pipe or a device in the place of a file of a model, which would be waited for."""
    try:
        for place in directory.iterdir():
            ours = any(fnmatch(place.name, pattern) for pattern in PATTERNS)
            if ours and place.exists() and not (place.is_file() or place.is_dir()):
                raise GearbxError(f"{place}: is a pipe or a device, not a file; {COMPLETE}")
    except OSError as error:
        raise unreadable(directory, error) from error


def check_no_file_of_model(path: Path) -> None:
    """Raises GearbxError for a place that belongs to a model or an adapter, also one behind a link."""
    for place in (path, Path(os.path.realpath(path))):
        own = any(fnmatch(place.name, pattern) for pattern in PATTERNS)
        if own and any((place.parent / name).exists() for name in ("config.json", "adapter_config.json")):
            raise GearbxError(f"{path}: is a file of the model in {place.parent}; choose another place")


def check_json(directory: Path) -> None:
    """Raises GearbxError for a file of JSON that no library could read, by its name.

    To be called when a library failed: reading a large tokenizer a second time takes long.
    """
    for path in (directory / name for name in JSON_FILES):
        if path.exists():
            read_as(path, parse_object, "the JSON of a model", REFETCH)


def parse_object(text: str) -> dict[str, Any]:
    """Return the content of a JSON object, as Python's json writes it. Raises GearbxError for anything else."""
    return typed(parse_python_json(text), dict[str, Any])


ARRAYS, ADAPTER_FILE = "adapters.safetensors", "adapter_config.json"
GIVE_ADAPTER = "give the directory that mlx_lm.lora wrote"
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal["lora", "dora", "full"]


class Lora(Struct, frozen=True):
    """rank: r. scale: of the product. keys: names of the adapted layers; None: all that mlx-lm can adapt."""

    rank: Annotated[int, Meta(ge=1, le=2**16)]
    scale: float
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    keys: Sequence[str] | None = None


class Adapter(Struct, frozen=True):
    """The settings of an adapter. num_layers: blocks that it changes, counted from the last one; -1 and 0: all."""

    fine_tune_type: Kind = "lora"
    num_layers: Annotated[int, Meta(ge=-1, le=2**16)] = -1
    lora_parameters: Lora | None = None

    def __post_init__(self) -> None:
        if self.fine_tune_type != "full" and self.lora_parameters is None:
            raise GearbxError("lora_parameters is missing")


def read_adapter(directory: Path) -> Adapter:
    """Return the settings of an adapter. Raises GearbxError for files that are missing, damaged, or no files."""
    try:
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "the adapter path does not exist"
            raise GearbxError(f"{directory}: {what}; {GIVE_ADAPTER}")
        check_regular(directory)
        for name in (ARRAYS, ADAPTER_FILE):
            if not os.path.lexists(directory / name):
                raise GearbxError(f"{directory}: no {name} there; {GIVE_ADAPTER}")
        count_arrays(directory, ARRAYS)
    except OSError as error:
        raise unreadable(directory, error) from error
    what = "the settings of an adapter"
    return read_as(directory / ADAPTER_FILE, lambda text: typed(parse_json(text), Adapter), what, GIVE_ADAPTER)
