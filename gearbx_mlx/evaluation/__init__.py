"""Evaluation of quality and cost: text in each gear and mode, compared with the top gear."""
