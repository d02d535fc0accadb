"""Colours of gears: anyone can tell them apart, on any background."""

import itertools

import numpy as np
import pytest

from gearbx_mlx.telemetry.trace import LOOKUP_COLOR, draw_trace, gear_color, get_pyplot

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE_POINT = np.array([0.95047, 1.0, 1.08883])


def linear(color: str) -> np.ndarray:
    """sRGB to linear RGB (IEC 61966-2-1)."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear RGB to CIE L*a*b*, in which distances match what eyes see (about 2.3 is just visible)."""
    t = XYZ @ np.clip(rgb, 0, 1) / WHITE_POINT
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), t * 24389 / 27 / 116 + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: str, b: str) -> float:
    """WCAG 2: 3 is enough for signs and large text."""
    low, high = sorted(XYZ[1] @ linear(color) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


def ladder(gears: int) -> list[str]:
    return [gear_color(i, gears) for i in range(gears)]


def least_distance(colors: list[str], seen: object) -> float:
    points = [lab(np.array(seen) @ linear(color)) for color in colors]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(points, 2))


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize(("gears", "distance"), [(2, 90), (3, 30), (4, 19), (5, 14), (6, 11)])
def test_any_two_gears_differ_for_every_eye(gears, distance, blindness):
    assert least_distance(ladder(gears), BLINDNESS[blindness]) >= distance


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_lookup_color_differs_from_lossless_gears(blindness):
    assert least_distance([*ladder(2), LOOKUP_COLOR], BLINDNESS[blindness]) >= 24


@pytest.mark.parametrize("gears", [2, 3, 4, 5])
def test_lightness_ascends_and_gears_differ_in_gray(gears):
    lightness = [lab(linear(color))[0] for color in ladder(gears)]
    assert min(np.diff(lightness)) >= 9 / (gears - 1)


@pytest.mark.parametrize("background", ["#ffffff", "#000000", "#1e1e1e"])
def test_every_gear_is_readable_on_light_and_dark(background):
    assert min(contrast(color, background) for color in (*ladder(9), LOOKUP_COLOR)) >= 3


def test_green_and_red_would_fail():
    """The measure itself: for deuteranopes red and green are much closer than for others."""
    red_and_green = ["#2e9e6b", "#d0453b"]
    assert least_distance(red_and_green, BLINDNESS["deuteranopia"]) < 30
    assert least_distance(red_and_green, BLINDNESS["none"]) > 90


def test_markers_of_gears_differ_in_shape_too():
    figure, axes = get_pyplot().subplots()
    entry = {"prompt": 0, "mean_entropy": 1.0, "entropy": 1.0}
    gears = {name: gear_color(i, 4) for i, name in enumerate(("low", "mid1", "mid2", "high"))}
    draw_trace(axes, [entry | {"gear": name} for name in gears], gears, [])
    shapes = {markers.get_label(): markers.get_paths()[0].vertices.tobytes() for markers in axes.collections}
    assert list(shapes) == list(gears)
    assert len(set(shapes.values())) == len(gears)
    get_pyplot().close(figure)
