"""From a signal per token to a gear: entropy, monitor, gate, thresholds. Knows numbers, no models."""
