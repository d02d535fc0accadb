"""From a model to a checkpoint on disk."""
