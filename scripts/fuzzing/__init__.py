"""The parts of scripts/fuzz_commands.py: inputs, flags, damaged files, rounds, and a process for each command."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))  # mutations, which damage JSON
