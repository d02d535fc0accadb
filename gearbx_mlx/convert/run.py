"""The body of `convert`: from a model to a checkpoint on disk, which stock mlx-lm reads too."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..bit_selection.precision import PrecisionManifest, fit, read_precision
from ..cli.flags import LayerSettings
from ..cli.terminal import counting, messages, note
from ..conversion.model_card import AFFINE, CARD, Provenance, provenance, table_card, write_table
from ..conversion.restoring import Restorer, original_of, write_original
from ..errors import GearbxError, about, one_line
from ..files.writing import new_directory
from ..formats import get_format
from ..gears.discovery import Layer, is_quantized
from ..gears.manifest import ORIGINAL_FILE, RESTORE
from ..gears.saved import SavedGears, open_gears
from ..gears.tensor_files import header_of
from ..loading import DEMO_MODEL, find, gears_of, load
from ..settings import human_bytes
from . import ConvertSettings
from .gears import write_gears


def find_gears(path_or_hf_repo: str, revision: str | None) -> SavedGears:
    """The gears of a checkpoint with what is kept of its original.

    Raises:
        GearbxError: no such directory or repository, or one without gears.
    """
    directory = find(path_or_hf_repo, revision, also=(ORIGINAL_FILE,))
    saved = open_gears(directory)
    if saved is None:
        raise GearbxError(f"{directory}: holds no gears; give what gearbx_mlx.convert wrote")
    return saved


def verify(path_or_hf_repo: str, revision: str | None) -> str:
    """A line that says what was compared.

    Raises:
        GearbxError: a directory without gears, gears without hashes, or arrays that are damaged: the message names the
            first one, and says how many there are.
    """
    saved = find_gears(path_or_hf_repo, revision)
    directory = saved.directory
    if not saved.manifest.hashes:
        raise GearbxError(f"{directory}: was written before checkpoints had hashes; convert the original again")
    sizes = {name: place.size for name, place in saved.hashes.places.items()}
    damaged = []
    with counting("comparing", sum(sizes.values()), in_bytes=True) as advance:
        for name, is_whole in saved.hashes.compare(sizes, RESTORE):
            damaged += [] if is_whole else [name]
            advance(sizes[name])
    if damaged:
        file = saved.hashes.places[damaged[0]].file
        raise GearbxError(f"{file}: {damaged[0]} is damaged ({len(damaged)} of {len(sizes)} arrays are); {RESTORE}")
    said = f"{directory}: {len(sizes)} arrays, {human_bytes(sum(sizes.values()))}, are what was written"
    return said if saved.manifest.original is None else f"{said}; {verify_original(saved)}"


def verify_original(saved: SavedGears) -> str:
    """Make every file of the original again, and compare it with its hash. Returns a line that says so.

    Raises:
        GearbxError: something that does not come back.
    """
    restorer, tensors = Restorer(saved), 0
    with counting("decoding", restorer.size, in_bytes=True) as advance:
        for parameters, keys in restorer.groups:
            for key, _ in restorer.tensors(parameters, keys):
                advance(restorer.size_of(key))
                tensors += 1
    files = sum(1 for _ in restorer.files())
    return f"decoded, {tensors} tensors and {files} other files are those of the original"


def run(settings: ConvertSettings) -> int:
    if settings.conversion.verify is not None:
        print(verify(settings.conversion.verify, settings.conversion.revision))
        return 0
    out = uploaded_checkpoint(settings)
    print(out)
    return 0


def uploaded_checkpoint(settings: ConvertSettings) -> Path:
    """Write a checkpoint, which has its name when it is whole, and upload it if a repository is named."""
    conversion = settings.conversion
    out = destination(conversion.mlx_path)
    check_repository(conversion.upload_repo)
    half = out.with_name(out.name + ".incomplete")
    if half.is_dir():
        note(f"{half}: half a conversion by an earlier version, which nothing goes on with; remove it")
    if conversion.restore is None:
        fill = filling_gears(settings, out)
    else:
        fill = filling_original(conversion.restore, conversion.revision)
    with new_directory(out) as work:
        fill(work)
    if conversion.upload_repo is not None:
        upload(out, conversion.upload_repo)
    return out


def filling_gears(settings: ConvertSettings, out: Path) -> Callable[[Path], None]:
    """What fills a directory with a checkpoint. Raises GearbxError for a model that cannot be converted."""
    conversion = settings.conversion
    source = find(conversion.model or DEMO_MODEL, conversion.revision)
    if gears_of(source) is not None:
        raise GearbxError(f"{source}: holds gears already; convert the original")
    origin = provenance(conversion.upload_repo or out.name, conversion.model, source)
    if not settings.writes_table:
        return lambda work: write_gears(settings, source, work, origin)
    file, trusted = str(conversion.manifest), conversion.trust_remote_code
    return lambda work: write_manifest_table(file, settings.layout, trusted, source, work, origin)


def filling_original(path_or_hf_repo: str, revision: str | None) -> Callable[[Path], None]:
    """What fills a directory with the original of a checkpoint. Raises GearbxError for one that does not have it."""
    saved = find_gears(path_or_hf_repo, revision)
    original_of(saved)

    def fill(work: Path) -> None:
        restorer = Restorer(saved)
        with counting("restoring", restorer.size, in_bytes=True) as advance:
            write_original(restorer, work, advance)

    return fill


def destination(mlx_path: str | Path) -> Path:
    """Return the directory to write.

    Raises:
        GearbxError: the directory exists, its parent does not, or the file system refuses the name.
    """
    try:
        out = Path(mlx_path).expanduser()
        exists, has_parent = os.path.lexists(out), out.parent.is_dir()
        out.exists()  # fails for a name that is too long
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise GearbxError(f"--mlx-path {mlx_path}: no directory can have this name ({reason}); give another") from error
    if exists:
        raise GearbxError(f"--mlx-path {mlx_path}: is there already; remove it or give another path")
    if not has_parent:
        raise GearbxError(f"--mlx-path {mlx_path}: there is no directory {out.parent}; make it first")
    return out


def check_repository(repo: str | None) -> None:
    """Raises GearbxError for a name that the Hub refuses; before the work, not after it."""
    try:
        if repo is not None:
            validate_repo_id(repo)
    except HFValidationError as error:
        raise GearbxError(f"--upload-repo {repo}: {one_line(error)}") from error


def upload(out: Path, repo: str) -> None:
    """Upload a checkpoint; the Hub's messages go to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            hub = HfApi()
            hub.create_repo(repo_id=repo, exist_ok=True)
            hub.upload_folder(repo_id=repo, folder_path=out, repo_type="model")
    except Exception as error:  # the network, the Hub, a token without permission
        raise GearbxError(
            f"{out}: is whole, and was not uploaded ({one_line(error)}); hf upload {repo} {out} goes on"
        ) from error


# One table of a precision manifest, as a checkpoint of stock mlx-lm


def write_manifest_table(
    file: str | Path, layout: LayerSettings, trust_remote_code: bool, source: Path, work: Path, origin: Provenance
) -> None:
    """Fill the directory `work`.

    Raises:
        GearbxError: as `choose_table`; a quantized model, another model, or a layer that it does not have.
        OSError: the directory cannot be written.
    """
    manifest, gear = choose_table(Path(file), layout)
    model, tokenizer, config = load(source, return_config=True, lazy=True, trust_remote_code=trust_remote_code)
    if is_quantized(model):
        raise GearbxError(f"{source}: is quantized already, and --manifest has bits for original weights; leave it out")
    with about(file):
        manifest, layers, missing = fit(manifest, model, get_format(AFFINE))
    for path in missing:
        note(f"{file}: has no {path}, which stays as it is")
    bits = manifest.gears[gear].bits
    weights = sum(layer.module.weight.size for layer in layers)
    with messages.status("quantizing"):
        write_table(model, tokenizer, config, source, work, bits, manifest.group_size)
    write_card(layers, bits, weights, work, origin)


def choose_table(file: Path, layout: LayerSettings) -> tuple[PrecisionManifest, int]:
    """The manifest, and the gear whose table is written.

    Raises:
        GearbxError: a manifest that cannot be read or lacks the table, or flags that contradict it.
    """
    manifest = read_precision(file)
    if layout.format not in (None, AFFINE):
        raise GearbxError(f"--format {layout.format}: a checkpoint with the bits of a manifest is mlx-lm's own, affine")
    if layout.q_group_size not in (None, manifest.group_size):
        raise GearbxError(
            f"--q-group-size is {layout.q_group_size}, and {file} was measured with {manifest.group_size}"
        )
    tables = ", ".join(map(str, manifest.gears))
    if not tables:
        raise GearbxError(f"{file}: has no tables; make some with python -m gearbx_mlx.allocate --manifest {file}")
    wanted = [*manifest.gears] if layout.gears is None else [gear.bits for gear in layout.gears]
    if layout.gears is None and len(wanted) > 1:
        raise GearbxError(f"{file}: has tables for gears {tables}; choose one with --gears")
    if len(wanted) > 1 or wanted[0] not in manifest.gears:
        raise GearbxError(f"{file}: has no table for gears {layout.gears}; choose one of {tables}")
    if manifest.format != AFFINE:
        note(f"{file}: was measured with {manifest.format}; mlx-lm's affine layers differ a little from it")
    return manifest, wanted[0]


def write_card(layers: Sequence[Layer], bits: Mapping[str, int], weights: int, work: Path, origin: Provenance) -> None:
    """Write the model card, with sizes from the files that were written."""
    files = sorted(work.glob("model*.safetensors"))
    sizes = {name: place.size for file in files for name, place in header_of(file).places.items()}
    parts = ("weight", "scales", "biases")
    size = sum(sizes.get(f"{layer.path}.{part}", 0) for layer in layers for part in parts)
    counts = {file.name: file.stat().st_size for file in files}
    card = table_card({layer.path: bits[layer.path] for layer in layers}, size, weights, counts, origin)
    (work / CARD).write_text(card, encoding="utf-8")
