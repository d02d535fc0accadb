"""Routing from token entropies to a gear: monitor, gates, thresholds, calibration. Numbers only, no models."""
