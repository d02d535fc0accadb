"""From the entropy of tokens to a gear: monitor, gate, thresholds, drafting rules. Numbers only, no models."""
