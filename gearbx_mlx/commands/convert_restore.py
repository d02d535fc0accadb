"""convert --restore: the original of a geared checkpoint, file by file as it was."""

from pathlib import Path

from ..cli.terminal import progress_bar
from ..conversion.restoring import Restorer, write_original
from ..errors import GearbxError
from ..gears.manifest import ORIGINAL_FILE
from ..gears.saved import SavedGears, open_gears
from ..loading import find


def restore(saved: SavedGears, work: Path) -> None:
    """Fill the directory `work`, from the beginning or from where an earlier run stopped.

    Raises:
        GearbxError: a checkpoint that is damaged or does not have its original, or another one's files in `work`.
        OSError: the directory cannot be written.
    """
    restorer = Restorer(saved)
    with progress_bar(in_bytes=True) as progress:
        task = progress.add_task("restoring", total=restorer.size)
        write_original(restorer, work, lambda size: progress.advance(task, size))


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
