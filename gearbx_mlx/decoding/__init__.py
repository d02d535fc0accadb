"""Decoding: from gears to tokens, with one file per mode or part."""
