"""Bits for every layer: by quality (floors, a memory budget) or by measured sensitivity (manifest, allocation)."""
