"""Telemetry: the trace, pictures of it, and the summary of a run. Records only, no models."""
