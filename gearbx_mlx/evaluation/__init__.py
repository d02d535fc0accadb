"""Evaluation of quality and cost: a text in each gear and mode, compared with the top gear."""
