"""Charts as inline SVG: stacked areas, bars, rows of spans and curves, with the numbers in their tooltips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 110, 20, 12, 34

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455", "#004488", "#997700")
"""Paul Tol's bright scheme, which people who do not see all colours can tell apart (sronpersonalpages.nl/~pault)."""


def stacked_areas(
    xs: Sequence[float], series: Mapping[str, Sequence[float]], unit: str, x_label: str, limit: float | None = None
) -> str:
    """One area for each of `series` over `xs`, steps to the right of each value; a line at `limit`."""
    height = 260
    totals = [sum(values[index] for values in series.values()) for index in range(len(xs))]
    top = 1.05 * max([*totals, limit or 0.0, 1e-30])
    x, y = _scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT), _scale(0.0, top, height - BOTTOM, TOP)
    floor = [0.0] * len(xs)
    parts = [_axes(height, xs[0], xs[-1], 0.0, top, unit, x_label)]
    for place, (name, values) in enumerate(series.items()):
        if not any(values):
            continue
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        path = _steps(xs, ceiling, x, y) + _steps(xs, floor, x, y)[::-1]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in path)
        tip = f"{name}: at most {max(values):.3g} {unit}"
        parts.append(f'<polygon points="{points}" fill="{_color(place)}"><title>{escape(tip)}</title></polygon>')
        floor = ceiling
    if totals:
        best = max(range(len(totals)), key=totals.__getitem__)
        parts.append(
            f'<circle class="peak" cx="{x(xs[best]):.1f}" cy="{y(totals[best]):.1f}" r="4">'
            f"<title>peak {totals[best]:.3g} {escape(unit)}</title></circle>"
        )
    if limit is not None:
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit):.1f}" y2="{y(limit):.1f}">'
            f"<title>capacity {limit:.4g} {escape(unit)}</title></line>"
        )
    return _svg(height, parts) + legend([name for name in series if any(series[name])], list(series))


def bars(values: Mapping[str, float], unit: str) -> str:
    """One horizontal bar for each of `values`, with its part of their sum."""
    names = [name for name, value in values.items() if value > 0]
    total, largest = sum(values[name] for name in names), max([values[name] for name in names], default=1.0)
    height, parts = 24 * len(names) + 8, []
    for row, name in enumerate(names):
        length = (WIDTH - 420) * values[name] / largest
        top = 24 * row + 4
        parts.append(
            f'<text x="200" y="{top + 14}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="210" y="{top}" width="{max(length, 1):.1f}" height="18" fill="{_color(row)}">'
            f"<title>{escape(name)}: {values[name]:.4g} {escape(unit)}</title></rect>"
            f'<text x="{218 + length:.1f}" y="{top + 14}">{values[name]:.3g} {escape(unit)}, '
            f"{values[name] / total:.1%}</text>"
        )
    return _svg(height, parts)


def span_rows(rows: Mapping[str, Sequence[tuple[float, float, str, str]]], kinds: Sequence[str], x_label: str) -> str:
    """A row of spans (start, end, kind, tooltip) for each name; kinds have colours."""
    height = 22 * len(rows) + BOTTOM + TOP
    end = max([span[1] for spans in rows.values() for span in spans], default=1.0)
    x = _scale(0.0, end, LEFT, WIDTH - RIGHT)
    parts = [_axes(height, 0.0, end, None, None, "", x_label)]
    for place, (name, spans) in enumerate(rows.items()):
        top = TOP + 22 * place
        parts.append(f'<text x="{LEFT - 6}" y="{top + 14}" text-anchor="end">{escape(name)}</text>')
        for start, stop, kind, tip in spans:
            parts.append(
                f'<rect x="{x(start):.2f}" y="{top}" width="{max(x(stop) - x(start), 0.3):.2f}" height="18" '
                f'fill="{_color(kinds.index(kind))}" class="span"><title>{escape(tip)}</title></rect>'
            )
    return _svg(height, parts) + legend(kinds, kinds)


def curves(xs: Sequence[float], series: Mapping[str, Sequence[float]], unit: str, x_label: str) -> str:
    """A line with a mark at each value for each of `series`; `xs` are shown as they are, evenly apart."""
    height = 240
    top = 1.08 * max([value for values in series.values() for value in values], default=1.0)
    x = _scale(0, max(1, len(xs) - 1), LEFT + 20, WIDTH - RIGHT - 20)
    y = _scale(0.0, top, height - BOTTOM, TOP)
    parts = [_axes(height, None, None, 0.0, top, unit, x_label)]
    for place, value in enumerate(xs):
        parts.append(f'<text x="{x(place):.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{value:g}</text>')
    for row, (name, values) in enumerate(series.items()):
        points = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_color(row)}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(place):.1f}" cy="{y(value):.1f}" r="4" fill="{_color(row)}">'
            f"<title>{escape(f'{name} at {xs[place]:g}: {value:,.4g} {unit}')}</title></circle>"
            for place, value in enumerate(values)
        ]
    return _svg(height, parts) + legend(list(series), list(series))


def legend(shown: Sequence[str], order: Sequence[str]) -> str:
    """The names of colours, which are those of their places in `order`."""
    marks = (
        f'<span class="key"><i style="background:{_color(list(order).index(name))}"></i>{escape(name)}</span>'
        for name in shown
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def _color(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


class _Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.start, self.rate = low, start, (end - start) / ((high - low) or 1.0)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.rate


_scale = _Scale


def _steps(xs: Sequence[float], values: Sequence[float], x: _Scale, y: _Scale) -> list[tuple[float, float]]:
    """Corners of a line that stays at each value until the next."""
    corners = []
    for place, value in enumerate(values):
        corners.append((x(xs[place]), y(value)))
        corners.append((x(xs[min(place + 1, len(xs) - 1)]), y(value)))
    return corners


def _axes(
    height: int, first: float | None, last: float | None, low: float | None, high: float | None, unit: str, label: str
) -> str:
    bottom = height - BOTTOM
    parts = [
        f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>',
        f'<text x="{(LEFT + WIDTH) / 2}" y="{height - 4}" text-anchor="middle">{escape(label)}</text>',
    ]
    if low is not None and high is not None:
        y = _scale(low, high, bottom, TOP)
        for step in range(5):
            value = low + (high - low) * step / 4
            parts.append(
                f'<line class="grid" x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}"/>'
                f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_short(value)} {escape(unit)}</text>'
            )
    if first is not None and last is not None:
        parts += [
            f'<text x="{place}" y="{bottom + 14}" text-anchor="{anchor}">{value:.3g}</text>'
            for place, value, anchor in ((LEFT, first, "start"), (WIDTH - RIGHT, last, "end"))
        ]
    return "".join(parts)


def _short(value: float) -> str:
    """Three digits, with K or M for thousands and millions, so that it fits beside an axis."""
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
