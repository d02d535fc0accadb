"""Policies against chance, answers to problems, and the turns of two models: what the studies of these names share."""
