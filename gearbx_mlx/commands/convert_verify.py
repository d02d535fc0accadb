"""convert --verify: every array of a geared checkpoint is what was written."""

from ..cli.sizes import human_bytes
from ..cli.terminal import progress_bar
from ..errors import GearbxError
from ..gears.manifest import RESTORE
from ..gears.saved import open_gears
from ..loading import find


def verify(path_or_hf_repo: str) -> str:
    """A line that says what was compared.

    Raises:
        GearbxError: a directory without gears, gears without hashes, or arrays that are damaged: the message names the
            first one, and says how many there are.
    """
    directory = find(path_or_hf_repo)
    saved = open_gears(directory)
    if saved is None:
        raise GearbxError(f"{directory}: holds no gears; only what gearbx_mlx.convert wrote has hashes to compare with")
    if not saved.manifest.hashes:
        raise GearbxError(f"{directory}: was written before checkpoints had hashes; convert the original anew")
    sizes = {name: place.end - place.begin for name, place in saved.hashes.places.items()}
    damaged = []
    with progress_bar(in_bytes=True) as progress:
        task = progress.add_task("comparing", total=sum(sizes.values()))
        for name, is_whole in saved.hashes.compare(sizes):
            damaged += [] if is_whole else [name]
            progress.advance(task, sizes[name])
    if damaged:
        file = saved.hashes.places[damaged[0]].file
        raise GearbxError(f"{file}: {damaged[0]} is damaged ({len(damaged)} of {len(sizes)} arrays are); {RESTORE}")
    return f"{directory}: {len(sizes)} arrays, {human_bytes(sum(sizes.values()))}, are what was written"
