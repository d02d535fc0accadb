"""One rank's part of the study `ranks`: mlx.launch starts this file."""

import json

from gearbx_mlx.ranks.place import place_here
from research.processes import timed_here

if __name__ == "__main__" and (place := place_here()) is not None:
    found = timed_here(place)
    if place.rank == 0:
        print(json.dumps(found), flush=True)
