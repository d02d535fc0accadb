"""Colours of gears, in the terminal and in pictures: blue for low, over mauve, to orange for high.

They ascend in lightness, so that they differ in grey and for every colour blindness, and have a contrast of at least 3
against white, black and the grey of dark terminals.
"""

ANCHORS = ((90, 100, 211), (168, 105, 164), (229, 118, 3))
MARKERS = "o^sDvPX"

# Okabe and Ito's colours for what is not a gear. https://jfly.uni-koeln.de/color
BLACK, ORANGE, SKY_BLUE, GREEN, YELLOW, BLUE, VERMILION, PURPLE = SERIES = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)


def gear_color(index: int, gears: int) -> str:
    """#rrggbb of gear `index` (0 is the lowest) in a ladder of `gears`; a single gear has the top gear's colour."""
    place = (index / (gears - 1) if gears > 1 else 1.0) * (len(ANCHORS) - 1)
    left = min(int(place), len(ANCHORS) - 2)
    mix = place - left
    channels = (round(a + (b - a) * mix) for a, b in zip(ANCHORS[left], ANCHORS[left + 1]))
    return "#" + "".join(f"{c:02x}" for c in channels)


def gear_marker(index: int) -> str:
    """matplotlib's marker of gear `index`, so that a picture does not depend on colour alone."""
    return MARKERS[index % len(MARKERS)]
