"""The colours of pages and figures: readable in both schemes, distinct, the same everywhere."""

import itertools
import math

import pytest

from dfca.algorithms import ALGORITHMS
from dfca.report.drawing import palette

WHITE_ENOUGH = {"#e69f00", "#56b4e9", "#44aa99", "#999933", "#ff50ff", "#b795fa"}  # between 2.1 and 3 on the light page


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def oklab(colour):
    """Ottosson's space, in which equal distances look equally large (2020)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    to_cones = ((0.41222, 0.53633, 0.05145), (0.21190, 0.68070, 0.10740), (0.08830, 0.28172, 0.62998))
    to_lab = ((0.21045, 0.79362, -0.00407), (1.97800, -2.42859, 0.45059), (0.02590, 0.78277, -0.80868))
    cones = [sum(a * b for a, b in zip(row, rgb, strict=True)) ** (1 / 3) for row in to_cones]
    return [sum(a * b for a, b in zip(row, cones, strict=True)) for row in to_lab]


EVERY = sorted({*palette.CLUSTERS, *palette.ALGORITHMS.values(), *palette.OTHERS, palette.GREY})


@pytest.mark.parametrize("colour", EVERY)
def test_every_colour_stands_out_from_the_page_in_both_schemes(colour):
    assert contrast(colour, palette.DARK["page"]) >= 3, "unreadable in the dark"
    assert contrast(colour, palette.LIGHT["page"]) >= (2.1 if colour in WHITE_ENOUGH else 3)


@pytest.mark.parametrize("scheme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_text_is_readable_on_its_ground(scheme):
    for ink, ground in itertools.product(("text", "soft"), ("page", "panel")):
        assert contrast(scheme[ink], scheme[ground]) >= 4.5
    assert contrast(scheme["on-warning"], scheme["warning"]) >= 4.5


def test_every_algorithm_that_comes_with_dfca_has_a_colour_of_its_own_except_the_two_bounds():
    assert set(ALGORITHMS) <= set(palette.ALGORITHMS)
    methods = [palette.ALGORITHMS[name] for name in ALGORITHMS if name not in ("local", "oracle")]
    assert len(set(methods)) == len(methods)
    assert not set(palette.OTHERS) & set(palette.ALGORITHMS.values())


def test_no_two_lines_of_a_page_look_alike():
    """About 0.02 is just seen side by side; in thin lines it takes more."""
    colours = {*palette.ALGORITHMS.values(), *palette.OTHERS}
    near = [(a, b) for a, b in itertools.combinations(colours, 2) if math.dist(oklab(a), oklab(b)) < 0.09]
    assert near == []


def test_an_algorithm_has_the_same_colour_in_any_company():
    alone = palette.algorithm_colours(["mine"])
    crowd = palette.algorithm_colours(["dfca-auto", "mine", "ifca"])
    assert alone["mine"] == crowd["mine"] == palette.algorithm_colour("mine")
    many = palette.algorithm_colours([f"own-{i}" for i in range(len(palette.OTHERS))])
    assert len(set(many.values())) == len(palette.OTHERS), "two of them look alike"


def test_the_schemes_as_css_name_the_same_variables():
    assert set(palette.LIGHT) == set(palette.DARK)
    assert palette.css_variables().count("--page: ") == 2
