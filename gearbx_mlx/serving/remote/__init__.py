"""Servers of others, as sources of tokens with log-probabilities."""
