"""Curves as SVG: every point is there, a gap is a gap, and text is never markup."""

import math
import xml.etree.ElementTree as ET

import pytest

from trainer_env.display.chart import HEIGHT, WIDTH, Curve, chart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves: Curve, **options) -> ET.Element:
    return ET.fromstring(chart(curves, title="reward", **options))


def lines(root: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_a_line_rises_with_its_values_inside_the_frame():
    ((first, second, third),) = lines(drawn(Curve("a", [(1, 0.0), (2, 0.5), (3, 1.0)], "red")))
    assert first[0] < second[0] < third[0] <= WIDTH
    assert HEIGHT > first[1] > second[1] > third[1] > 0


def test_dots_are_as_many_as_the_points_that_have_a_value():
    root = drawn(Curve("a", [(1, 0.1), (2, None), (3, 0.3)], "red", dots=True))
    assert len([dot for dot in root.iter(f"{SVG}circle") if dot.attrib["r"] == "2.6"]) == 2


def test_a_missing_value_is_a_gap():
    assert [len(line) for line in lines(drawn(Curve("a", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)], "red")))] == [1, 2]


@pytest.mark.parametrize("points", [[], [(1, None)], [(1, 5.0)], [(1, -3.0), (2, -3.0)], [(1, 1e9), (2, -1e9)]])
def test_any_values_give_a_picture_inside_its_frame(points):
    for line in lines(drawn(Curve("a", points, "red"))):
        for x, y in line:
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_the_axis_ends_where_the_run_will():
    ((_, half),) = lines(drawn(Curve("a", [(0, 0.0), (5, 0.5)], "red"), last_x=10))
    ((_, whole),) = lines(drawn(Curve("a", [(0, 0.0), (10, 0.5)], "red"), last_x=10))
    assert half[0] < whole[0]


def test_a_name_is_text():
    root = drawn(Curve("<script>x</script>&", [(1, 1.0)], "red"))
    assert any(text.text == "<script>x</script>&" for text in root.iter(f"{SVG}text"))


def test_what_is_not_finite_does_not_spoil_the_scale():
    (line,) = lines(drawn(Curve("a", [(1, 0.2), (2, math.nan), (3, 0.4)], "red")))[:1]
    assert all(math.isfinite(y) for _, y in line)
