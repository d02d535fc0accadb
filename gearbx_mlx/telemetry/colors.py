"""One colour per gear, in the terminal and in pictures: green for low over amber to red for high."""

ANCHORS = ((46, 158, 107), (217, 154, 32), (208, 69, 59))


def gear_color(index: int, gears: int) -> str:
    """#rrggbb of gear `index` in a ladder of so many; a ladder of one is all top gear."""
    place = (index / (gears - 1) if gears > 1 else 1.0) * (len(ANCHORS) - 1)
    left = min(int(place), len(ANCHORS) - 2)
    mix = place - left
    channels = (round(a + (b - a) * mix) for a, b in zip(ANCHORS[left], ANCHORS[left + 1]))
    return "#" + "".join(f"{c:02x}" for c in channels)
