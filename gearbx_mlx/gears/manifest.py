"""gears.json: what a geared checkpoint holds beside a model that stock mlx-lm reads."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import GearbxError
from .ladder import Ladder

VERSION = 1
GEARS_FILE, MANIFEST = "gears.safetensors", "gears.json"
RESTORE = "download it again, or make it anew with python -m gearbx_mlx.convert"


@dataclass(frozen=True)
class SavedLayer:
    """One managed layer.

    kind: "linear", "switch" or "embedding". shape, dtype: of the original weight. lowest_bits: its floor.
    gears: bits to the names that the parameters of that gear's module have in the files, its bias aside.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    lowest_bits: int
    gears: dict[int, dict[str, str]]


@dataclass(frozen=True)
class Manifest:
    """Everything that gears.json says.

    format, gears, group_size, manage: as the Gearbox takes them; gears are bits, ascending. dtype: that most of the
    original is in. fingerprint: of the original model. stock: whether mlx-lm can run the base.
    base: hash of every file of the base. layers: by path. unmanaged: path to reason.
    """

    format: str
    gears: tuple[int, ...]
    group_size: int
    manage: str
    dtype: str
    fingerprint: str
    stock: bool
    base: dict[str, str]
    layers: dict[str, SavedLayer]
    unmanaged: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.gears)

    def chosen(self, gears: str | Ladder | None) -> Ladder:
        """Some of the gears, or all.

        Raises:
            GearbxError: one that the checkpoint has not.
        """
        if gears is None:
            return self.ladder
        ladder = gears if isinstance(gears, Ladder) else Ladder.parse(gears)
        for gear in ladder:
            if gear.bits not in self.gears:
                held = ", ".join(map(str, self.gears))
                raise GearbxError(f"the checkpoint holds no gear of {gear.bits} bits; choose from {held}")
        return ladder

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> "Manifest":
        """Raises KeyError, TypeError, ValueError or AttributeError for content that is something else."""
        layers = {
            path: SavedLayer(
                layer["kind"],
                tuple(layer["shape"]),
                layer["dtype"],
                layer["lowest_bits"],
                {int(bits): dict(names) for bits, names in layer["gears"].items()},
            )
            for path, layer in content["layers"].items()
        }
        return cls(**{**content, "gears": tuple(content["gears"]), "layers": layers})


def read_manifest(directory: Path) -> Manifest | None:
    """gears.json of a directory; None where there are no gears.

    Raises:
        GearbxError: it is missing beside gears.safetensors, of a newer version, or not what it should be.
    """
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] > VERSION:
            raise GearbxError(
                f"{file}: of version {content['version']}, and this gearbx-mlx reads up to {VERSION}; "
                "upgrade gearbx-mlx"
            )
        return Manifest.parse(content)
    except FileNotFoundError as error:
        if (directory / GEARS_FILE).exists():
            raise GearbxError(f"{file}: missing beside {GEARS_FILE}; {RESTORE}") from error
        return None
    except GearbxError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GearbxError(f"{file}: damaged ({type(error).__name__}: {error}); {RESTORE}") from error
