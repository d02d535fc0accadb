"""From a directory or a Hub repository to a model and its tokenizer."""

import os
import re
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open

from .errors import GearbxError, one_line
from .files.reading import parse_python_json, read_as, typed
from .gears.manifest import GEARS_FILE, Manifest, read_manifest
from .gears.saved import SavedGears, open_gears

SAMPLES = (  # what tokenizers differ in: digits, spaces, line ends, capitals, other scripts, signs
    "The 3 brothers paid $1,234.50 each.",
    "def f(x):\n    return x  # twice\n\n\n",
    "naïve ÀÉ 漢字 🙂 don't",
)
COMPLETE = "give the directory of a complete model"
DEMO_MODEL = Path(__file__).parent / "demo_model"


def load(
    path_or_hf_repo: str | Path | None = None,
    *,
    return_config: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> tuple:
    """`mlx_lm.load` with the demo model as default and errors that a user can act on.

    A geared checkpoint (`gearbx_mlx.convert`) is checked and left unread: `Gearbox(model)` reads its gears from the
    files as they are engaged, and mlx-lm's functions its base.

    Args:
        path_or_hf_repo: a local directory or a Hub repository that mlx-lm takes; the demo model if not given.
        return_config: whether to return the model's configuration as well.
        kwargs: further keywords of `mlx_lm.load`.

    Returns:
        model and tokenizer, and the configuration if asked for.

    Raises:
        GearbxError: no such directory, no network, missing or damaged weights, a configuration that does not fit; gears
            that are damaged, of a newer version, or not of this base.
    """
    directory = find(path_or_hf_repo or DEMO_MODEL, revision)
    check_weights(directory)
    read_config(directory)
    saved = open_gears(directory)
    try:
        if saved is None:
            model, tokenizer, config = mlx_lm.load(str(directory), return_config=True, **kwargs)
        else:
            model, tokenizer, config = load_base(directory, saved, **kwargs)
    except GearbxError:
        raise
    except Exception as error:  # a configuration that does not fit fails in a hundred ways
        raise GearbxError(f"{directory}: mlx-lm cannot load this model: {one_line(error)}") from error
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_base(
    directory: Path,
    saved: SavedGears,
    *,
    tokenizer_config: dict | None = None,
    model_config: dict | None = None,
    adapter_path: str | None = None,
    lazy: bool = True,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any, dict]:
    """The base of a geared checkpoint, unread, as `mlx_lm.load` has it.

    Raises:
        GearbxError: an adapter, which the other gears would not have.
    """
    if adapter_path is not None:
        raise GearbxError(f"{directory}: gears take no adapter; fuse it into the original and convert that")
    trust: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    model, config = load_model(directory, lazy=True, strict=saved.manifest.stock, model_config=model_config, **trust)
    saved.attach(model)
    return model, load_tokenizer(directory, tokenizer_config, eos_token_ids=config.get("eos_token_id")), config


def gears_of(path_or_hf_repo: str | Path | None) -> Manifest | None:
    """What gears a model's checkpoint holds, if it is a geared one; downloads it as `load` does."""
    return None if path_or_hf_repo is None else read_manifest(find(path_or_hf_repo))


def load_small(path_or_hf_repo: str | Path, tokenizer: Any, **kwargs: Any) -> nn.Module:
    """The small model of a pair, whose tokenizer has to be that of the large one.

    Raises:
        GearbxError: as `load`, or another tokenizer.
    """
    model, own = load(path_or_hf_repo, **kwargs)
    check_same_tokenizer(own, tokenizer, str(path_or_hf_repo))
    return model


def check_same_tokenizer(small: Any, large: Any, name: str) -> None:
    """Raises GearbxError unless both make the same tokens of the same text.

    Args:
        small, large: tokenizers.
        name: of the small model.
    """
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


def find(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The local directory of a model, downloaded if it is a Hub repository that is not here yet."""
    name = str(path_or_hf_repo)
    try:
        path = Path(path_or_hf_repo).expanduser()
        if path.is_dir():
            return path
        if path.exists():
            raise GearbxError(f"{name}: is a file; give the model's directory")
    except (OSError, RuntimeError) as error:
        raise GearbxError(f"{name}: no such model directory ({one_line(error)})") from error
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(("./", "../", "~")):
        raise GearbxError(f"{name}: no such model directory; give a directory, or a Hub repository as owner/name")
    try:
        return _download(name, revision=revision, allow_patterns=[*DEFAULT_ALLOW_PATTERNS, GEARS_FILE])
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


def check_weights(directory: Path) -> None:
    """Raises GearbxError where there are no safetensors, or damaged or truncated ones."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise GearbxError(f"{directory}: no model*.safetensors there; give the directory of a complete model")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise GearbxError(f"{file}: damaged or truncated ({one_line(error)}); download it again") from error


def read_config(directory: Path) -> dict:
    """config.json of a model.

    Raises:
        GearbxError: it is missing, cannot be read, or is not a JSON object.
    """
    file = directory / "config.json"
    if not os.path.lexists(file):
        raise GearbxError(f"{file}: missing; {COMPLETE}")
    return read_as(file, parse_config, "a model's configuration", COMPLETE)


def parse_config(text: str) -> dict[str, Any]:
    """The content of a config.json. Raises GearbxError for what is not a JSON object."""
    return typed(parse_python_json(text), dict[str, Any])


def context_length(config: dict) -> int | None:
    """Tokens that the model was made for, if its configuration says so."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
    for part in parts:
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
            if type(part.get(key)) is int:
                return part[key]
    return None


def model_name(path_or_hf_repo: str | None) -> str:
    """What to call the model in a report."""
    return str(path_or_hf_repo) if path_or_hf_repo else "demo"
