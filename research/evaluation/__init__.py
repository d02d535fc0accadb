"""Shared code of studies: policies against a random baseline, answers to problems, and alternating models."""
