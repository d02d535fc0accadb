"""Conversion of a model to a checkpoint on disk."""
