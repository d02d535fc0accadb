"""Flags and the frozen settings that they become; terminal, progress, summary tables and prompts."""
