"""Curves as SVG text: small, without a library, the same in a saved notebook as in a running one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 30
TICKS = 4

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Curve:
    """Points from left to right; a None is a gap. dots: only the points, without a line."""

    name: str
    points: Sequence[Point]
    colour: str
    dots: bool = False


def chart(curves: Sequence[Curve], *, title: str, last_x: float = 0.0) -> str:
    """An SVG element. last_x: where the axis ends, if the points do not reach it yet."""
    finite = [(curve, [(x, _finite(y)) for x, y in curve.points]) for curve in curves]
    right = max([last_x, 1.0, *(x for _, points in finite for x, _ in points)])
    low, high = _range([y for _, points in finite for _, y in points if y is not None])

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / right

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%"'
    font = 'font-family="sans-serif" font-size="11"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label="{escape(title)}">']
    for index in range(TICKS + 1):
        value = low + (high - low) * index / TICKS
        y = up(value)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884" />',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#888">{value:.3g}</text>',
        ]
    for value in sorted({0, round(right / 2), round(right)}):
        parts.append(f'<text x="{across(value):.1f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#888">{value}</text>')
    for curve, points in finite:
        parts += _drawn(curve, [(across(x), None if y is None else up(y)) for x, y in points])
    parts += _legend(curves)
    return "".join([*parts, "</svg>"])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From 0 to 1 at least for what lies in there, as rewards do; else what there is, with some air."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.0
    low, high = min(values), max(values)
    air = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - air, high + air


def _drawn(curve: Curve, places: Sequence[Point]) -> list[str]:
    if curve.dots:
        return [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{curve.colour}" />' for x, y in places if y is not None
        ]
    lines: list[list[str]] = [[]]
    for x, y in places:
        if y is None:
            lines.append([])
        else:
            lines[-1].append(f"{x:.1f},{y:.1f}")
    return [
        f'<polyline points="{" ".join(line)}" fill="none" stroke="{curve.colour}" stroke-width="2" />'
        for line in lines
        if line
    ]


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, x = [], LEFT + 8.0
    for curve in curves:
        parts += [
            f'<circle cx="{x:.0f}" cy="{TOP - 5}" r="4" fill="{curve.colour}" />',
            f'<text x="{x + 8:.0f}" y="{TOP - 1}" fill="#888">{escape(curve.name)}</text>',
        ]
        x += 26 + 6.5 * len(curve.name)
    return parts
