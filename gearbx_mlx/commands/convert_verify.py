"""convert --verify: every array of a geared checkpoint is what was written."""

from ..cli.sizes import human_bytes
from ..cli.terminal import progress_bar
from ..conversion.restoring import Restorer
from ..errors import GearbxError
from ..gears.manifest import RESTORE
from ..gears.saved import SavedGears
from .convert_restore import find_gears


def verify(path_or_hf_repo: str, revision: str | None) -> str:
    """A line that says what was compared.

    Raises:
        GearbxError: a directory without gears, gears without hashes, or arrays that are damaged: the message names the
            first one, and says how many there are.
    """
    saved = find_gears(path_or_hf_repo, revision)
    directory = saved.directory
    if not saved.manifest.hashes:
        raise GearbxError(f"{directory}: was written before checkpoints had hashes; convert the original anew")
    sizes = {name: place.size for name, place in saved.hashes.places.items()}
    damaged = []
    with progress_bar(in_bytes=True) as progress:
        task = progress.add_task("comparing", total=sum(sizes.values()))
        for name, is_whole in saved.hashes.compare(sizes, RESTORE):
            damaged += [] if is_whole else [name]
            progress.advance(task, sizes[name])
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
    restorer = Restorer(saved)
    with progress_bar(in_bytes=True) as progress:
        task = progress.add_task("decoding", total=restorer.size)
        tensors = 0
        for parameters, keys in restorer.groups:
            for key, _ in restorer.tensors(parameters, keys):
                progress.advance(task, restorer.size_of(key))
                tensors += 1
    files = sum(1 for _ in restorer.files())
    return f"decoded, {tensors} tensors and {files} other files are those of the original"
