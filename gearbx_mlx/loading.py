"""From a directory or a Hub repository to a model and its tokenizer."""

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

SAMPLES = (  # what tokenizers differ in: digits, spaces, line ends, capitals, other scripts, signs
    "The 3 brothers paid $1,234.50 each.",
    "def f(x):\n    return x  # twice\n\n\n",
    "naïve ÀÉ 漢字 🙂 don't",
)
# transformers' name of a warning, that a text is longer than the context, which it gives unless it was given before.
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
DEMO_MODEL = Path(__file__).parent / "demo_model"
TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")  # files, of which a model has one at least


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
    """`mlx_lm.load` with the demo model as default and errors that a user can act on.

    A geared checkpoint is checked and left unread: `Gearbox(model)` reads its gears as they are engaged, and mlx-lm's
    functions its base.

    Args:
        path_or_hf_repo: a local directory or a Hub repository that mlx-lm takes; the demo model if not given.
        tokenizer_config, model_config, adapter_path, lazy, revision: as mlx-lm takes them.
        return_config: whether to return the model's configuration as well.
        group: the ranks that share the model; each gets its part of the layers that mlx-lm's class divides (`shard`).
        shard_sums: of layers whose inputs are divided. "gather": every rank gets all inputs and has some rows, so that
            texts are those of one process. "sum": it has some columns, and products are summed, as in mlx-lm, which
            sends less and rounds otherwise.
        pipeline: each rank gets some of the layers, and not a part of every layer.
        keep_mapped: leave weights mapped from their files, for gears made of them; else copy them into large pages.
        kwargs: further keywords of `mlx_lm.load`. Without `trust_remote_code` no code of the model runs.

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
    # Where this is not said, transformers asks on the terminal, and runs the code if the answer is y.
    kwargs["tokenizer_config"] = {"trust_remote_code": trusted} | (tokenizer_config or {})
    saved = open_gears(directory)
    adapter = None if adapter_path is None else read_adapter(Path(adapter_path))
    try:
        plain = functools.partial(load_plain, keep_mapped=keep_mapped)
        read = plain if saved is None else functools.partial(load_base, saved)
        model, tokenizer, config = read(directory, ranks, pipeline, **kwargs)
        if adapter is not None and adapter_path is not None:
            add_adapter(model, adapter, Path(adapter_path), None if saved is None else saved.dense(model))
        check_longest(tokenizer, directory / "tokenizer_config.json")
        getattr(tokenizer, "deprecation_warnings", {})[TOO_LONG] = True  # room_for says it in one line
    except GearbxError:
        raise
    except Exception as error:  # a configuration that does not fit fails in a hundred ways
        raise cannot_load(directory, error) from error
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def check_longest(tokenizer: Any, file: Path) -> None:
    """Raises GearbxError for a longest text that is not a number: transformers compares every text with it."""
    longest = getattr(tokenizer, "model_max_length", 0)
    if not isinstance(longest, int | float):
        raise GearbxError(f"{file}: model_max_length is {shown(longest)}, not a number; download the file again")


def cannot_load(directory: Path, error: Exception) -> GearbxError:
    """Return what a user can do about a model that mlx-lm cannot load. Raises GearbxError where a file is not JSON."""
    if "trust_remote_code" in str(error):
        return untrusted(directory)
    check_json(directory)
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZERS):
        return GearbxError(f"{directory}: no tokenizer there, such as {TOKENIZERS[0]}; {COMPLETE}")
    other = re.match("Missing|Received|Expected shape", str(error))
    remedy = "; config.json is not that of these weights, download both again" if other else ""
    return GearbxError(f"{directory}: mlx-lm cannot load this model: {one_line(error)}{remedy}")


def check_model(directory: Path, trusted: bool, change: dict) -> None:
    """Raises GearbxError for a directory that is damaged, too large or untrusted. change: fields of config.json."""
    weights = gguf_weights(directory)
    arrays = count_arrays(directory) if weights is None else len(weights.tensors)
    config = read_config(directory) | change
    check_layers(config, arrays, directory / "config.json")
    check_quantization(config, directory / "config.json")
    if config.get("model_file") is None:
        check_fields(config, arguments_of(config, directory / "config.json"), directory / "config.json")
    elif not trusted:  # mlx-lm before 0.32 runs it without a question
        raise untrusted(directory)


def arguments_of(config: dict, file: Path) -> type:
    """Return mlx-lm's class for a configuration. Raises GearbxError for a type of model that cannot be loaded here."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            _, arguments = model_classes(config)
    except (Exception, SystemExit) as error:  # a class that lacks a package ends the process, with a word on stdout
        why = " ".join(said.getvalue().split()) or one_line(error).rstrip(".")
        raise GearbxError(
            f"{file}: model_type is {shown(config.get('model_type'))}, which mlx-lm cannot load ({why}); "
            "update mlx-lm, or give a model of another type"
        ) from error
    return arguments


def check_fields(config: dict, arguments: type, file: Path) -> None:
    """Raises GearbxError for text where mlx-lm's class takes numbers alone, on which some layers fail much later."""
    kinds = get_type_hints(arguments)
    for name in config.keys() & kinds.keys():
        wanted = get_args(kinds[name]) or (kinds[name],)
        if isinstance(config[name], str) and {bool, int, float, NoneType}.issuperset(wanted):
            what = "neither true nor false" if bool in wanted else "not a number"
            raise GearbxError(f"{file}: {name} is {shown(config[name])}, {what}; {REFETCH}")


def untrusted(directory: Path) -> GearbxError:
    return GearbxError(f"{directory}: needs Python code of its own; read it, and give --trust-remote-code to run it")


def load_plain(
    directory: Path, ranks: Ranks | None, pipeline: bool, keep_mapped: bool = False, **kwargs: Any
) -> tuple[nn.Module, Any, dict]:
    """Return a model without gears, as `mlx_lm.load` has it; or a rank's part of it."""
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
    """Return what `mlx_lm.load` does: it reads weights and then the tokenizer, which takes as long, and needs none."""
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
    """Return the base of a geared checkpoint, unread, as `mlx_lm.load` has it; or a rank's part of it."""
    how: dict[str, Any] = {"model_config": model_config, "trust_remote_code": trust_remote_code}
    model, config = load_model(directory, lazy=True, strict=saved.manifest.stock, **how)
    if ranks is not None:
        saved = stage_of(model, saved, ranks.group) if pipeline else divide_saved(model, saved, ranks)
    saved.attach(model)
    return model, load_tokenizer(directory, tokenizer_config, eos_token_ids=config.get("eos_token_id")), config


def checkpoint_gears(path_or_hf_repo: str | Path | None) -> Manifest | None:
    """Return what gears a model's checkpoint holds, if it is a geared one; downloads it as `load` does."""
    return None if path_or_hf_repo is None else read_manifest(find(path_or_hf_repo))


def load_small(path_or_hf_repo: str | Path, tokenizer: Any, **kwargs: Any) -> nn.Module:
    """Return the small model of a pair, whose tokenizer has to be that of the large one.

    Raises:
        GearbxError: as `load`, or another tokenizer.
    """
    model, own = load(path_or_hf_repo, **kwargs)
    check_same_tokenizer(own, tokenizer, str(path_or_hf_repo))
    return model


def check_same_tokenizer(small: Any, large: Any, name: str) -> None:
    """Raises GearbxError unless both tokenizers make the same tokens of the same text. name: of the small model."""
    ours, theirs = small.get_vocab(), large.get_vocab()
    remedy = "a pair needs models of one tokenizer; choose a smaller model of the same family"
    if ours != theirs:
        differing = len(ours.items() ^ theirs.items())
        raise GearbxError(
            f"{name}: its tokenizer is not the model's: {len(ours)} and {len(theirs)} tokens, "
            f"of which {differing} differ; {remedy}"
        )
    for text in SAMPLES:
        if small.encode(text) != large.encode(text):
            raise GearbxError(f"{name}: its tokenizer cuts {text!r} in another way than the model's; {remedy}")


def find(path_or_hf_repo: str | Path, revision: str | None = None, also: Sequence[str] = ()) -> Path:
    """Return the local directory of a model, which is downloaded or unpacked if it is not here yet.

    also: files to download beside those that a model runs with.
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
        raise GearbxError(f"{name}: is {what}; give the model's directory, or a GGUF file")
    if name.endswith(".gguf"):
        raise GearbxError(f"{name}: no such file; check the path")
    if name == SMOLLM2:
        return gguf_directory(known_file(), SMOLLM2, SMOLLM2_DTYPE)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(("./", "../", "~")):
        raise GearbxError(f"{name}: no such model directory; give a directory, or a Hub repository as owner/name")
    directory = snapshot_of(name, revision, tuple(also))
    if not directory.is_dir():  # deleted since this process looked it up
        snapshot_of.cache_clear()
        directory = snapshot_of(name, revision, tuple(also))
    return directory


@functools.cache
def snapshot_of(name: str, revision: str | None, also: tuple[str, ...]) -> Path:
    """Return where a Hub repository is here. A process looks each up once, and so uses one version of it.

    Raises:
        GearbxError: as `find`.
    """
    patterns = [*DEFAULT_ALLOW_PATTERNS, GEARS_FILE, *also]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise GearbxError(
            f"{name}: the Hub gives it to members only; ask for access there and log in with hf"
        ) from error
    except (RevisionNotFoundError, HFValidationError) as error:
        raise GearbxError(f"{name}: {one_line(error)}") from error
    except RepositoryNotFoundError as error:
        raise GearbxError(f"{name}: neither a directory here nor a repository on the Hub; check the name") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        raise GearbxError(
            f"{name}: not a directory here, and the Hub cannot be reached to download it ({type(error).__name__}); "
            "connect to the network or give a local directory"
        ) from error
    except (OSError, RuntimeError) as error:
        raise GearbxError(f"{name}: cannot be downloaded ({one_line(error)})") from error


def check_no_gguf(directory: Path) -> None:
    """Raises GearbxError for a directory of GGUF files, which are models by themselves."""
    found = sorted(file.name for file in directory.glob("*.gguf"))
    if found and not os.path.lexists(directory / "config.json"):
        more = f" or one of {len(found) - 1} others" if len(found) > 1 else ""
        raise GearbxError(f"{directory}: has no config.json; give the GGUF file {directory / found[0]}{more}")


def fingerprint(*files: Path) -> str:
    """Return a hash of the names and of all contents of files."""
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
    """Raises GearbxError for weights that are not real numbers, with which every layer computes something or other."""
    for path, module in model.named_modules():
        weight = module.get("weight")
        if not isinstance(weight, mx.array) or mx.issubdtype(weight.dtype, mx.floating):
            continue
        if not any("scale" in name for name in module):  # quantized weights are whole numbers
            kind = dtype_name(weight.dtype)
            raise GearbxError(f"{path}.weight has numbers of type {kind}; give a model of floating-point weights")


def model_name(path_or_hf_repo: str | None) -> str:
    """Return what to call the model in a report."""
    return str(path_or_hf_repo) if path_or_hf_repo else "demo"
