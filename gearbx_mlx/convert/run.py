"""The command `convert`: a model becomes a checkpoint on disk, also for stock mlx-lm."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id
from mlx.utils import tree_map_with_path

from ..bit_selection import Floors
from ..bit_selection.codebook_selection import select_bits, selection_as_dict, selection_lines
from ..bit_selection.h_process import Limits, fit_floors, measure_reserve, points_table
from ..bit_selection.precision import PrecisionManifest, fitted_to, read_precision
from ..cli.bases import calibrated, text_of
from ..cli.decide import ladder_of_codes
from ..cli.flags import LayerSettings
from ..cli.prompt import HARD, TRIVIAL, read_prompts
from ..cli.terminal import counting, messages, note, progress_bar
from ..conversion.calibrated_base import CalibratedBase
from ..conversion.converter import BASE_FILE, Converter, Plan
from ..conversion.kept_bases import key_of
from ..conversion.model_card import (
    CARD,
    CardQuality,
    Provenance,
    gear_sizes,
    geared_card,
    provenance,
    share_text,
    table_card,
    write_table,
)
from ..conversion.original import (
    REPORT,
    OriginalFiles,
    Restorer,
    check_names,
    copy_companions,
    write_config,
    write_original,
)
from ..decoding.route import SHORT_PROMPTS
from ..errors import GearbxError, error_context, escaped, one_line
from ..files.writing import new_directory, write_text
from ..formats import SPLIT_CODES, get_format
from ..gears.activations import DTYPES
from ..gears.discovery import Layer, is_quantized
from ..gears.in_place import OwnCodes, own_codes
from ..gears.ladder import EMBEDDINGS
from ..gears.manifest import GEARS_FILE, ORIGINAL_FILE, PRECISION, RESTORE, Manifest
from ..gears.saved import SavedGears, open_gears
from ..gears.tensor_files import header_of
from ..gears.weight_files import in_safetensors, weight_files
from ..loading import DEMO_MODEL, checkpoint_gears, find, load, model_name
from ..settings import human_bytes
from ..telemetry.summary import as_json
from . import BudgetSettings, ConvertSettings
from .quality import card_quality

Loads = Callable[..., tuple[nn.Module, Any]]
"""Loads a copy of the model to convert, and its tokenizer. lazy: as of `load`."""


def write_gears(settings: ConvertSettings, source: Path, work: Path, origin: Provenance) -> None:
    """Write geared files into `work`. Raises GearbxError for an unsupported model, OSError for a full disk."""
    conversion = settings.conversion
    original = partial(load_cast, source, conversion.dtype, conversion.trust_remote_code)
    model, tokenizer = original(lazy=True)
    with error_context(model_name(conversion.model)):
        codes = codes_to_keep(model, settings)
    if get_format(settings.layout.chosen_format).ladders:
        check_names(source)
    copy_companions(source, work)
    precision = None if conversion.manifest is None else precision_of(settings, conversion.manifest, model)
    plan = plan_of(settings, precision)
    if codes is not None:
        gears = tuple(gear.bits for gear in codes.chosen(settings.layout.gears))
        plan = replace(plan, format=SPLIT_CODES, gears=gears, group_size=codes.group_size, embeddings=EMBEDDINGS[1])
    if settings.quality is not None:
        plan = replace(plan, bits=bits_for(settings.quality, original, plan, work))
    base = None
    if codes is None and settings.calibrates:
        try:
            base = calibrated_base(conversion.calibrate or "", original, model, tokenizer, plan)
        except GearbxError as error:
            if conversion.asks_text:
                raise
            note(f"base: round-to-nearest, since {one_line(error)}")
    converter = Converter(model, plan, work, base.layers if base else None)
    try:
        files = open_original(source) if get_format(plan.format).ladders else None
        converter.wanted = {*files.hashes.values()} if files else set()
        with counting("converting", converter.size, in_bytes=True) as advance:
            for size in converter:
                advance(size)
        manifest = converter.finish(files.keep(converter.views, work) if files else None)
    except RuntimeError as error:  # from MLX, for a file that was removed
        raise GearbxError(f"{source}: cannot be read ({one_line(error)}); download it again") from error
    finally:
        converter.close()
    write_config(source, work, converter.quantization())
    if precision is not None:
        write_text(work / PRECISION, precision.as_json())
    quality = card_quality(work, source, manifest, original) if settings.measures else None
    write_geared_card(converter, manifest, work, origin, files.size if files else None, quality)


def codes_to_keep(model: nn.Module, settings: ConvertSettings) -> OwnCodes | None:
    """Return the codes of a quantized model, for its top gear. Raises GearbxError if no lower gear is possible."""
    codes, conversion = own_codes(model), settings.conversion
    if codes is None:
        return None
    flags = {
        "--dtype": conversion.dtype,
        "--embeddings": conversion.embeddings,
        "--calibrate": conversion.asks_text,
        "--manifest": conversion.manifest,
        "the floors": settings.quality,
    }
    if len(ladder_of_codes(codes, settings.layout, flags)) == 1:
        raise GearbxError(f"there is no lower gear to write; without conversion {codes.summary()}")
    return codes


def calibrated_base(file: str, original: Loads, model: nn.Module, tokenizer: Any, plan: Plan) -> CalibratedBase:
    """Return the base, kept by an earlier run or new. Raises GearbxError if the layout has no free codes.

    file: of the text; "": bundled prompts, with answers that a copy of the model generates.
    """
    text = text_of(tokenizer, file)
    key = key_of(model, get_format(plan.format), plan.gears, plan.manage, plan.group_size, text)
    alternative = "use --calibrate none for round-to-nearest, at once"
    return key.find() or calibrated(model, key, text, lambda: original(lazy=False), alternative)


def open_original(source: Path) -> OriginalFiles:
    """Return the files to restore later, hashed. Raises GearbxError if one cannot be read."""
    with counting("hashing", sum(file.stat().st_size for file in weight_files(source)), in_bytes=True) as advance:
        files = OriginalFiles(source, progress=advance)
    _, omitted = files.others
    if omitted and source != DEMO_MODEL:  # the demo model's files are bundled
        note(f"--restore will not restore {escaped(', '.join(omitted))}, which mlx-lm does not read")
    return files


def precision_of(settings: ConvertSettings, file: str, model: nn.Module) -> PrecisionManifest:
    """Return the precision manifest to store with the gears. Raises GearbxError if it is not for this model."""
    manifest = read_precision(Path(file))
    settings.layout.filled(manifest, f"{file} was measured with")
    with error_context(file):
        _, _, missing = fitted_to(manifest, model)
    for path in missing:
        note(f"{file}: has no {path}, which is capped last")
    if manifest.gears:
        note(f"{file}: its tables are not used; every layer has the bits of the gear")
    return manifest


def plan_of(settings: ConvertSettings, precision: PrecisionManifest | None) -> Plan:
    """Return the plan, before the bits of every layer are known."""
    return Plan(
        **settings.layout.filled(precision, "the manifest was measured with"),
        gears=tuple(gear.bits for gear in settings.ladder),
        embeddings=settings.conversion.embeddings or EMBEDDINGS[0],
    )


def bits_for(quality: Floors | BudgetSettings, original: Loads, plan: Plan, work: Path) -> dict[str, int]:
    """Return path to bits, from floors or a budget, after writing a report into `work`."""
    lazy = isinstance(quality, Floors)  # only one layer is in memory at a time
    model, tokenizer = original(lazy=lazy)
    report: dict[str, Any] = {}
    with progress_bar() as progress:
        if isinstance(quality, BudgetSettings):
            prompts = SHORT_PROMPTS + TRIVIAL + HARD if quality.prompts is None else read_prompts(Path(quality.prompts))
            limits = Limits(quality.memory_budget, quality.target_bpw, reserve_for(quality, model))
            found = fit_floors(model, tokenizer, plan.format, plan.manage, prompts, limits, progress)
            selection, report["points"] = found.best.selection, [point.row for point in found.tried]
            messages.print(points_table(found))
        else:
            selection = select_bits(model, plan.format, plan.manage, quality, progress, give_up=True)
    for line in selection_lines(selection):
        note(line)
    write_text(work / REPORT, as_json(selection_as_dict(selection) | report))
    return dict(selection.bits)


def reserve_for(budget: BudgetSettings, model: nn.Module) -> int:
    """Return bytes of a memory budget reserved for generation, and print their purpose."""
    if budget.memory_budget is None:
        return 0
    given = budget.reserved()
    if given is not None:
        note(f"reserve: {human_bytes(given)} in addition to the weights, as set")
        return given
    reserve = measure_reserve(model)
    cache, rest = human_bytes(reserve.cache), human_bytes(reserve.activations)
    note(f"reserve: {cache} for keys and values of {reserve.tokens} tokens, {rest} for activations; set by --reserve")
    return reserve.bytes


def load_cast(source: Path, dtype: str | None, trusted: bool, lazy: bool) -> tuple[nn.Module, Any]:
    """Return model and tokenizer, with the weights in `dtype`, as mlx_lm.convert casts them; None: in their own."""
    model, tokenizer = load(source, lazy=lazy, trust_remote_code=trusted)
    if dtype is not None:
        wanted = getattr(model, "cast_predicate", lambda name: True)

        def cast(name: str, array: mx.array) -> mx.array:
            return array.astype(DTYPES[dtype]) if wanted(name) and mx.issubdtype(array.dtype, mx.floating) else array

        model.update(tree_map_with_path(cast, model.parameters()))
    return model, tokenizer


def write_geared_card(
    converter: Converter,
    manifest: Manifest,
    work: Path,
    origin: Provenance,
    original: int | None,
    quality: CardQuality | None,
) -> None:
    """Write the model card, and print the sizes of the files. original: bytes of its weights; None if not stored."""
    sizes = {name: place.size for file in converter.files.values() for name, place in file.places.items()}
    gears = gear_sizes(manifest, sizes)
    names = [BASE_FILE, GEARS_FILE] if original is None else [BASE_FILE, GEARS_FILE, ORIGINAL_FILE]
    files = {name: (work / name).stat().st_size for name in names}
    (work / CARD).write_text(geared_card(manifest, gears, files, origin, original, quality), encoding="utf-8")
    base, others, *kept = map(human_bytes, files.values())
    runs = "which mlx-lm runs" if manifest.stock else "which mlx-lm does not run, since it does not have the format"
    note(f"base {base}, {runs}; other gears {others}")
    for path, reason in converter.larger.items():
        note(f"{path}: stays dense, since it {reason}")
    if original is not None:
        total = sum(files.values())
        note(f"original: {kept[0]} plus its parameters; together {human_bytes(total)}, {share_text(total, original)}")


def find_gears(path_or_hf_repo: str, revision: str | None) -> SavedGears:
    """Return the gears of a checkpoint, including data of its original. Raises GearbxError if there are none."""
    directory = find(path_or_hf_repo, revision, also=(ORIGINAL_FILE,))
    saved = open_gears(directory)
    if saved is None:
        raise GearbxError(f"{directory}: has no gears; use a directory that gearbx_mlx convert wrote")
    return saved


def verify(path_or_hf_repo: str, revision: str | None) -> str:
    """Compare every array with its hash, and return a line with the result. Raises GearbxError for damaged ones."""
    saved = find_gears(path_or_hf_repo, revision)
    directory = saved.directory
    sizes = {name: place.size for name, place in saved.hashes.places.items()}
    damaged = []
    with counting("comparing", sum(sizes.values()), in_bytes=True) as advance:
        for name, is_whole in saved.hashes.compare(sizes, RESTORE):
            damaged += [] if is_whole else [name]
            advance(sizes[name])
    if damaged:
        file = saved.hashes.places[damaged[0]].file
        raise GearbxError(f"{file}: {damaged[0]} is damaged ({len(damaged)} of {len(sizes)} arrays are); {RESTORE}")
    summary = f"{directory}: {len(sizes)} arrays, {human_bytes(sum(sizes.values()))}, are undamaged"
    return summary if saved.manifest.original is None else f"{summary}; {verify_original(saved)}"


def verify_original(saved: SavedGears) -> str:
    """Restore every file of the original, compare it with its hash, and return a line with the result."""
    restorer, tensors = Restorer(saved), 0
    with counting("decoding", restorer.size, in_bytes=True) as advance:
        for parameters, keys in restorer.groups:
            for key, _ in restorer.tensors(parameters, keys):
                advance(restorer.size_of(key))
                tensors += 1
    files = sum(1 for _ in restorer.files())
    return f"restored: {tensors} tensors and {files} other files equal the original's"


def run(settings: ConvertSettings) -> int:
    if settings.conversion.verify is not None:
        print(verify(settings.conversion.verify, settings.conversion.revision))
        return 0
    out = uploaded_checkpoint(settings)
    print(out)
    return 0


def uploaded_checkpoint(settings: ConvertSettings) -> Path:
    """Write a checkpoint, under its final name once complete, and upload it if a repository is set."""
    conversion = settings.conversion
    out = destination(conversion.mlx_path)
    check_repository(conversion.upload_repo)
    with new_directory(out) as work:
        if conversion.restore is None:
            write_checkpoint(settings, work, conversion.upload_repo or out.name)
        else:
            restorer = Restorer(find_gears(conversion.restore, conversion.revision))
            with counting("restoring", restorer.size, in_bytes=True) as advance:
                write_original(restorer, work, advance)
    if conversion.upload_repo is not None:
        upload(out, conversion.upload_repo)
    return out


def write_checkpoint(settings: ConvertSettings, work: Path, name: str) -> None:
    """Fill a directory with a checkpoint of this name. Raises GearbxError for a model that cannot be converted."""
    conversion = settings.conversion
    with in_safetensors(find(conversion.model or DEMO_MODEL, conversion.revision), work.parent) as source:
        if checkpoint_gears(source) is not None:
            raise GearbxError(f"{source}: already has gears; use the original")
        write = write_manifest_table if settings.writes_table else write_gears
        write(settings, source, work, provenance(name, conversion.model, source))


def destination(mlx_path: str | Path) -> Path:
    """Return the directory to write. Raises GearbxError if it exists, or the system refuses the name."""
    try:
        out = Path(mlx_path).expanduser()
        exists, has_parent = os.path.lexists(out), out.parent.is_dir()
        out.exists()  # fails for a name that is too long
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise GearbxError(f"--mlx-path {mlx_path}: invalid name ({reason}); choose a different one") from error
    if exists:
        raise GearbxError(f"--mlx-path {mlx_path}: already exists; remove it or choose a different path")
    if not has_parent:
        raise GearbxError(f"--mlx-path {mlx_path}: there is no directory {out.parent}; use an existing one")
    return out


def check_repository(repo: str | None) -> None:
    """Validate a repository name before the work. Raises GearbxError for names that the Hub refuses."""
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
            f"{out}: is complete, but was not uploaded ({one_line(error)}); use hf upload {repo} {out} to continue"
        ) from error


# One table of a precision manifest, as a checkpoint of stock mlx-lm


def write_manifest_table(settings: ConvertSettings, source: Path, work: Path, origin: Provenance) -> None:
    """Write a table into `work`. Raises GearbxError as `choose_table`, or for a model that does not fit the table."""
    file, trusted = str(settings.conversion.manifest), settings.conversion.trust_remote_code
    manifest, gear = choose_table(Path(file), settings.layout)
    model, tokenizer, config = load(source, return_config=True, lazy=True, trust_remote_code=trusted)
    if is_quantized(model):
        raise GearbxError(f"{source}: is quantized already, but --manifest is for original weights; omit --manifest")
    with error_context(file):
        manifest, layers, missing = fitted_to(manifest, model, get_format("affine"))
    for path in missing:
        note(f"{file}: has no {path}, which is not quantized")
    bits = manifest.gears[gear].bits
    weights = sum(layer.module.weight.size for layer in layers)
    with messages.status("quantizing"):
        write_table(model, tokenizer, config, source, work, bits, manifest.group_size)
    write_card(layers, bits, weights, work, origin)


def choose_table(file: Path, layout: LayerSettings) -> tuple[PrecisionManifest, int]:
    """Return the manifest, and the gear whose table is written. Raises GearbxError if the flags contradict it."""
    manifest = read_precision(file)
    if layout.format not in (None, "affine"):
        raise GearbxError(f"--format {layout.format}: tables of a manifest are stored as affine; omit --format")
    if layout.q_group_size not in (None, manifest.group_size):
        raise GearbxError(
            f"--q-group-size: must be {manifest.group_size} as in {file}, got {layout.q_group_size}; omit it"
        )
    tables = ", ".join(map(str, manifest.gears))
    if not tables:
        raise GearbxError(f"{file}: has no tables; use gearbx_mlx allocate --manifest {file} to add some")
    wanted = [*manifest.gears] if layout.gears is None else [gear.bits for gear in layout.gears]
    if layout.gears is None and len(wanted) > 1:
        raise GearbxError(f"{file}: has tables for gears {tables}; choose one with --gears")
    if len(wanted) > 1 or wanted[0] not in manifest.gears:
        raise GearbxError(f"{file}: has no table for gears {layout.gears}; choose from {tables}")
    if manifest.format != "affine":
        note(f"{file}: was measured with {manifest.format}; mlx-lm's affine layers differ a little from it")
    return manifest, wanted[0]


def write_card(layers: Sequence[Layer], bits: Mapping[str, int], weights: int, work: Path, origin: Provenance) -> None:
    """Write the model card, with the sizes of the written files."""
    files = sorted(work.glob("model*.safetensors"))
    sizes = {name: place.size for file in files for name, place in header_of(file).places.items()}
    parts = ("weight", "scales", "biases")
    size = sum(sizes.get(f"{layer.path}.{part}", 0) for layer in layers for part in parts)
    counts = {file.name: file.stat().st_size for file in files}
    card = table_card({layer.path: bits[layer.path] for layer in layers}, size, weights, counts, origin)
    (work / CARD).write_text(card, encoding="utf-8")
