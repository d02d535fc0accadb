"""Runs of several processes that share one model: their places, agreement, connections and common end."""
