import colorsys
from itertools import combinations

import pytest

from megatron.quantscope.analysis.roles import FAMILIES
from megatron.quantscope.formats import FORMATS
from megatron.quantscope.report.style import (
    FAMILY_COLORS,
    FAMILY_LINES,
    FORMAT_COLORS,
    FORMAT_MARKERS,
    SHOWN_FORMATS,
    format_color,
    format_title,
    range_format,
    shown_format,
)


def rgb(color):
    return [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def test_every_format_and_family_has_its_own_colour_and_mark():
    assert set(FORMAT_COLORS) == set(FORMAT_MARKERS) == set(FORMATS)
    assert set(FAMILY_COLORS) == set(FAMILY_LINES) == set(FAMILIES)
    colors = [*FORMAT_COLORS.values(), *FAMILY_COLORS.values()]
    assert len(set(colors)) == len(colors)
    assert len(set(FORMAT_MARKERS.values())) == len(FORMATS)


def test_bf16_is_grey():
    assert colorsys.rgb_to_hsv(*rgb(FORMAT_COLORS["bf16"]))[1] == 0


# Vienot, Brettel and Mollon 1999: what a protanope and a deuteranope see, on linear RGB.
BLINDNESS = {
    "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deuteranopia": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


@pytest.mark.parametrize("kind", BLINDNESS)
def test_formats_that_share_a_figure_stay_apart_for_the_colour_blind(kind):
    def seen(color):
        linear = [channel**2.2 for channel in rgb(color)]
        return [max(0.0, sum(w * c for w, c in zip(row, linear, strict=True))) ** (1 / 2.2) for row in BLINDNESS[kind]]

    for one, other in combinations(SHOWN_FORMATS, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(FORMAT_COLORS[one]), seen(FORMAT_COLORS[other]), strict=True))
        assert distance**0.5 > 0.12, (one, other)


def test_aliases_and_unknown_types():
    assert format_color("mxfp8_e4m3") == format_color("mxfp8")
    assert format_title("hifp8") == "HiF8"
    assert format_title("custom") == "custom"
    assert shown_format("custom").name == shown_format("bf16").name == "mxfp8"
    assert shown_format("hifp8").name == "hifp8"
    assert range_format("fp8_e4m3").name == range_format("nvfp4").name == "mxfp8"
