"""Answers that fit a schema."""
