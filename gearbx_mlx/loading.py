"""Models and tokenizers from a directory, a GGUF file or a Hub repository."""

import contextlib
import functools
import hashlib
import io
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model, load_tokenizer

from .compat.arrays import dtype_name
from .compat.classes import model_classes
from .decoding.head_files import attach_head, find_head
from .errors import GearbxError, error_context, one_line
from .files.gguf_model import gguf_weights, is_gguf
from .files.model_directory import (
    COMPLETE,
    REFETCH,
    check_json,
    check_layers,
    check_quantization,
    check_regular,
    count_arrays,
    parse_object,
    read_adapter,
)
from .files.reading import read_as, shown
from .files.smollm2 import SMOLLM2, SMOLLM2_DTYPE, known_file
from .files.unpacked import contents
from .gears.adapters import add_adapter
from .gears.dividing import Ranks, cut_into_stages, divide, divide_saved, ranks_of, stage_of
from .gears.manifest import GEARS_FILE, Manifest, read_manifest
from .gears.mapped import into_memory, mapping_kernels
from .gears.offload import large_pages
from .gears.saved import SavedGears, open_gears
from .gears.weight_files import gguf_directory, load_mapped, reading, weights_size

SAMPLES = (  # text on which tokenizers differ: digits, spaces, line ends, capitals, scripts, symbols
    "The 3 brothers paid $1,234.50 each.",
    "def f(x):\n    return x  # twice\n\n\n",
    "naïve ÀÉ 漢字 🙂 don't",
)
# transformers' name of its warning of text beyond the context length. It shows that warning once.
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
DEMO_MODEL = Path(__file__).parent / "demo_model"
TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")  # a model has at least one of these files


def load(
    path_or_hf_repo: str | Path | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    *,
    group: mx.distributed.Group | None = None,
    shard_sums: str = "gather",
    pipeline: bool = False,
    keep_mapped: bool = False,
    **kwargs: Any,
) -> tuple:
    """Load a model as `mlx_lm.load`, with the demo model as default and one-line errors.

    Of a geared checkpoint only the base is read; `Gearbox(model)` reads gears as they are engaged.

    Args:
        path_or_hf_repo: a local directory, a GGUF file or a Hub repository; None: the demo model.
        tokenizer_config, model_config, adapter_path, lazy, revision: as in `mlx_lm.load`.
        return_config: whether to return the model's configuration as well.
        group: the ranks that share the model; each gets a part of the layers that mlx-lm's class divides (`shard`).
        shard_sums: for layers with divided inputs. "gather": each rank gets all inputs and has some rows, so that
            outputs equal one process's. "sum": it has some columns and the products are summed, as in mlx-lm. This
            sends less and rounds differently.
        pipeline: each rank gets some of the layers (pipeline parallelism), not a part of every layer.
        keep_mapped: keep weights mapped, for gears made of them; otherwise they are copied into large pages.
        kwargs: more keywords of `mlx_lm.load`. Without `trust_remote_code` no code of the model runs.

    Returns:
        model and tokenizer, and the configuration if asked for.

    Raises:
        GearbxError: no such directory, no network, code that is not trusted, damaged or wrong weights, gears, adapter.
    """
    directory = find(path_or_hf_repo or DEMO_MODEL, revision)
    trusted = kwargs.get("trust_remote_code", False)
    kwargs |= {"model_config": model_config, "lazy": lazy}
    ranks = ranks_of(group, shard_sums, adapter_path, kwargs)
    check_model(directory, trusted, model_config or {})
    # Without this, transformers asks on the terminal, and runs the code if the answer is y.
    kwargs["tokenizer_config"] = {"trust_remote_code": trusted} | (tokenizer_config or {})
    saved = open_gears(directory)
    adapter = None if adapter_path is None else read_adapter(Path(adapter_path))
    try:
        plain = functools.partial(load_plain, keep_mapped=keep_mapped)
        read = plain if saved is None else functools.partial(load_base, saved)
        model, tokenizer, config = read(directory, ranks, pipeline, **kwargs)
        if adapter is not None and adapter_path is not None:
            add_adapter(model, adapter, Path(adapter_path), None if saved is None else saved.dense(model))
        attach_head(model, find_head(directory) if ranks is None else None)
        check_longest(tokenizer, directory / "tokenizer_config.json")
        getattr(tokenizer, "deprecation_warnings", {})[TOO_LONG] = True  # room_for warns in one line
    except GearbxError:
        raise
    except Exception as error:  # a configuration that does not fit fails in a hundred ways
        raise cannot_load(directory, error) from error
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def check_longest(tokenizer: Any, file: Path) -> None:
    """Validate the tokenizer's maximum length, used for every encoding. Raises GearbxError if it is no number."""
    longest = getattr(tokenizer, "model_max_length", 0)
    if not isinstance(longest, int | float):
        raise GearbxError(f"{file}: model_max_length is {shown(longest)}, not a number; download the file again")


def cannot_load(directory: Path, error: Exception) -> GearbxError:
    """Return the error, with its remedy, for a model that mlx-lm cannot load. Raises GearbxError for malformed JSON."""
    if "trust_remote_code" in str(error):
        return untrusted(directory)
    check_json(directory)
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZERS):
        return GearbxError(f"{directory}: no tokenizer there, such as {TOKENIZERS[0]}; {COMPLETE}")
    other = re.match("Missing|Received|Expected shape", str(error))
    remedy = "; config.json does not belong to these weights, download both again" if other else ""
    return GearbxError(f"{directory}: mlx-lm cannot load this model: {one_line(error)}{remedy}")


def check_model(directory: Path, trusted: bool, change: dict) -> None:
    """Validate a model directory. change: to config.json. Raises GearbxError if damaged, too large or untrusted."""
    weights = gguf_weights(directory)
    arrays = count_arrays(directory) if weights is None else len(weights.tensors)
    config = read_config(directory) | change
    check_layers(config, arrays, directory / "config.json")
    check_quantization(config, directory / "config.json")
    if config.get("model_file") is None:
        check_fields(config, arguments_of(config, directory / "config.json"), directory / "config.json")
    elif not trusted:  # mlx-lm before 0.32 runs it without asking
        raise untrusted(directory)


def arguments_of(config: dict, file: Path) -> type:
    """Return mlx-lm's arguments class of a configuration. Raises GearbxError for unknown model types."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            _, arguments = model_classes(config)
    except (Exception, SystemExit) as error:  # a class without its package prints a line and ends the process
        why = " ".join(output.getvalue().split()) or one_line(error).rstrip(".")
        raise GearbxError(
            f"{file}: model_type is {shown(config.get('model_type'))}, which mlx-lm cannot load ({why}); "
            "update mlx-lm, or use a model of a different type"
        ) from error
    return arguments


def check_fields(config: dict, arguments: type, file: Path) -> None:
    """Validate that numbers are no text, since some layers fail late. Raises GearbxError for text."""
    kinds = get_type_hints(arguments)
    for name in config.keys() & kinds.keys():
        wanted = get_args(kinds[name]) or (kinds[name],)
        if isinstance(config[name], str) and {bool, int, float, NoneType}.issuperset(wanted):
            what = "neither true nor false" if bool in wanted else "not a number"
            raise GearbxError(f"{file}: {name} is {shown(config[name])}, {what}; {REFETCH}")


def untrusted(directory: Path) -> GearbxError:
    return GearbxError(f"{directory}: needs Python code of its own; read it, and pass --trust-remote-code to run it")


def load_plain(
    directory: Path, ranks: Ranks | None, pipeline: bool, keep_mapped: bool = False, **kwargs: Any
) -> tuple[nn.Module, Any, dict]:
    """Return a model without gears, or a rank's part of it, as `mlx_lm.load` does."""
    load = functools.partial(read_together, directory, keep_mapped=keep_mapped, **kwargs)
    mapped = ranks is None and mapping_kernels() is not None
    copied = not mapped or gguf_weights(directory) is not None  # else `into_memory` makes large pages
    with large_pages(weights_size(directory) if copied else 0):
        if mapped:
            model, tokenizer, config = load_mapped(directory, load)
        else:
            with reading(directory):
                model, tokenizer, config = load()
    with error_context(directory):
        check_kinds(model)
        if ranks is not None:
            cut_into_stages(model, ranks.group) if pipeline else divide(model, ranks)
    return model, tokenizer, config


def read_together(
    directory: Path,
    *,
    tokenizer_config: dict | None = None,
    model_config: dict | None = None,
    lazy: bool = False,
    trust_remote_code: bool = False,
    keep_mapped: bool = False,
) -> tuple[nn.Module, Any, dict]:
    """Return the result of `mlx_lm.load`, but read tokenizer and weights at once: each takes equally long."""
    how: dict[str, Any] = {"model_config": model_config, "trust_remote_code": trust_remote_code}
    model, config = load_model(directory, lazy=True, **how)
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, directory, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
        if not lazy:
            if not keep_mapped:
                into_memory(model)
            mx.eval(model.parameters())
        return model, tokenizer.result(), config


def load_base(
    saved: SavedGears,
    directory: Path,
    ranks: Ranks | None = None,
    pipeline: bool = False,
    *,
    tokenizer_config: dict | None = None,
    model_config: dict | None = None,
    lazy: bool = True,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any, dict]:
    """Return the base of a geared checkpoint, or a rank's part of it, unread, as `mlx_lm.load` does."""
    how: dict[str, Any] = {"model_config": model_config, "trust_remote_code": trust_remote_code}
    model, config = load_model(directory, lazy=True, strict=saved.manifest.stock, **how)
    if ranks is not None:
        saved = stage_of(model, saved, ranks.group) if pipeline else divide_saved(model, saved, ranks)
    saved.attach(model)
    return model, load_tokenizer(directory, tokenizer_config, eos_token_ids=config.get("eos_token_id")), config


def checkpoint_gears(path_or_hf_repo: str | Path | None) -> Manifest | None:
    """Return the manifest of a geared checkpoint; None: any other model. Downloads it as `load` does."""
    return None if path_or_hf_repo is None else read_manifest(find(path_or_hf_repo))


def load_small(path_or_hf_repo: str | Path, tokenizer: Any, **kwargs: Any) -> nn.Module:
    """Return the small model of a pair. Its tokenizer must equal the large model's.

    Raises:
        GearbxError: as `load`, or a different tokenizer.
    """
    model, own = load(path_or_hf_repo, **kwargs)
    check_same_tokenizer(own, tokenizer, str(path_or_hf_repo))
    return model


def check_same_tokenizer(small: Any, large: Any, name: str) -> None:
    """Validate that two tokenizers are the same. name: of the small model. Raises GearbxError for different ones."""
    own, expected = small.get_vocab(), large.get_vocab()
    remedy = "a pair needs models of one tokenizer; choose a smaller model of the same family"
    if own != expected:
        differing = len(own.items() ^ expected.items())
        raise GearbxError(
            f"{name}: its tokenizer is not the model's: {len(own)} and {len(expected)} tokens, "
            f"of which {differing} differ; {remedy}"
        )
    for text in SAMPLES:
        if small.encode(text) != large.encode(text):
            raise GearbxError(f"{name}: its tokenizer splits {text!r} differently from the model's; {remedy}")


def find(path_or_hf_repo: str | Path, revision: str | None = None, also: Sequence[str] = ()) -> Path:
    """Return the local directory of a model, downloaded if necessary.

    also: more files to download.
    """
    name = str(path_or_hf_repo)
    try:
        path = Path(path_or_hf_repo).expanduser()
        if path.is_dir():
            check_regular(path)
            check_no_gguf(path)
            return path
        is_file, is_there = path.is_file(), path.exists()
    except (OSError, RuntimeError) as error:
        raise GearbxError(f"{name}: no such model directory ({one_line(error)})") from error
    if is_file and is_gguf(path):
        return gguf_directory(path)
    if is_there:
        what = "a file" if is_file else "a pipe or a device"
        raise GearbxError(f"{name}: is {what}; use the directory of a model, or a GGUF file")
    if name.endswith(".gguf"):
        raise GearbxError(f"{name}: no such file; check the path")
    if name == SMOLLM2:
        return gguf_directory(known_file(), SMOLLM2, SMOLLM2_DTYPE)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(("./", "../", "~")):
        raise GearbxError(f"{name}: no such model directory; use a directory, or a Hub repository as owner/name")
    directory = snapshot_of(name, revision, tuple(also))
    if not directory.is_dir():  # deleted since this process found it
        snapshot_of.cache_clear()
        directory = snapshot_of(name, revision, tuple(also))
    return directory


@functools.cache
def snapshot_of(name: str, revision: str | None, also: tuple[str, ...]) -> Path:
    """Return the local directory of a Hub repository. A process resolves each once, and so uses one version.

    Raises:
        GearbxError: as `find`.
    """
    patterns = [*DEFAULT_ALLOW_PATTERNS, GEARS_FILE, *also]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise GearbxError(f"{name}: the Hub restricts access; request it there, and log in with hf") from error
    except (RevisionNotFoundError, HFValidationError) as error:
        raise GearbxError(f"{name}: {one_line(error)}") from error
    except RepositoryNotFoundError as error:
        raise GearbxError(f"{name}: neither a directory here nor a repository on the Hub; check the name") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        raise GearbxError(
            f"{name}: not a directory here, and the Hub cannot be reached to download it ({type(error).__name__}); "
            "connect to the network, or use a local directory"
        ) from error
    except (OSError, RuntimeError) as error:
        raise GearbxError(f"{name}: cannot be downloaded ({one_line(error)})") from error


def check_no_gguf(directory: Path) -> None:
    """Validate that a directory is no mere folder of GGUF files, each of them a model. Raises GearbxError if it is."""
    found = sorted(file.name for file in directory.glob("*.gguf"))
    if found and not os.path.lexists(directory / "config.json"):
        more = f" or one of {len(found) - 1} others" if len(found) > 1 else ""
        raise GearbxError(f"{directory}: has no config.json; use the GGUF file {directory / found[0]}{more}")


def fingerprint(*files: Path) -> str:
    """Return a hash of the names and all bytes of files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {contents(file)} ".encode())
    return digest.hexdigest()[:16]


def model_contents(model: str | None) -> str:
    """Return the fingerprint of a model's files; None: the demo model."""
    directory = find(model or DEMO_MODEL)
    return fingerprint(*(file for pattern in ("*.safetensors", "*.json") for file in directory.glob(pattern)))


def adapter_contents(directory: str | None) -> str | None:
    """Return the fingerprint of an adapter's files; None: there is no adapter."""
    return None if directory is None else fingerprint(*(file for file in Path(directory).glob("*") if file.is_file()))


def read_config(directory: Path) -> dict:
    """Return config.json of a model. Raises GearbxError if it is missing, cannot be read, or is not a JSON object."""
    file = directory / "config.json"
    if not os.path.lexists(file):
        raise GearbxError(f"{file}: missing; {COMPLETE}")
    return read_as(file, parse_object, "a model's configuration", COMPLETE)


def check_kinds(model: nn.Module) -> None:
    """Validate that weights are real numbers. Raises GearbxError for integers and complex numbers."""
    for path, module in model.named_modules():
        weight = module.get("weight")
        if not isinstance(weight, mx.array) or mx.issubdtype(weight.dtype, mx.floating):
            continue
        if not any("scale" in name for name in module):  # quantized weights are integers
            kind = dtype_name(weight.dtype)
            raise GearbxError(f"{path}.weight has numbers of type {kind}; use a model with floating-point weights")


def model_name(path_or_hf_repo: str | None) -> str:
    """Return the model's name in reports."""
    return str(path_or_hf_repo) if path_or_hf_repo else "demo"
