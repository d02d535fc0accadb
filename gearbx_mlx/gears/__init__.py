"""Gears, ladders and the gearbox that puts them into a model."""
