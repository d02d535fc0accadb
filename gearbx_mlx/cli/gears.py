"""Flags of the gears, and the settings of a gearbox once the checkpoint is known."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from ..bit_selection.precision import PrecisionManifest, read_precision
from ..errors import GearbxError, about
from ..formats import DEFAULT_FORMAT, FORMATS
from ..gears.ladder import Ladder
from ..gears.manifest import Manifest
from ..gears.names import DEFAULT_ACTIVATIONS, DEFAULT_GROUP_SIZE, DEFAULT_LADDER, GROUP_SIZES, MANAGE, RESIDENCIES
from ..kernels.names import ACTIVATIONS, KERNELS
from .floors import FloorSettings, add_floor_flags
from .settings import Settings, flag_of, name

CODEBOOKS = ("codebook", "codebook-library")
CODEBOOK_LADDER = "4,16"  # they have no 8 bits
QUALITY_LADDER = "2,16"  # a gear of 2 bits has every layer at the bits that were found for it
"""


