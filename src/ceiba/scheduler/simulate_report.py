"""Draws simulations: queue, running requests, hit rate and first-token times over time, one line per variant.

Owns the drawing and nothing else: figures come in as ``simulate`` gives them (with ``detail``), one self-contained SVG
or HTML text goes out. No script, no font, no file from elsewhere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5a2b", "#7a7a7a", "#000000")
"""Told apart by colour-blind readers too (Okabe and Ito 2008); dashes repeat the difference."""
DASHES = ("", "6 3", "2 3", "9 3 2 3")

CHARTS: tuple[tuple[str, str, str, bool], ...] = (
    # column, title, unit, logarithmic
    ("queue", "Waiting requests", "", False),
    ("running", "Running requests", "", False),
    ("hit_rate", "Cache hit rate of the prompts admitted lately", "%", False),
    ("ttft_p50", "Time to first token, median of arrivals", "s", True),
    ("ttft_p99", "Time to first token, 99th percentile of arrivals", "s", True),
)

WIDTH, HEIGHT = 900, 190
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 26
LEGEND = 24

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333; } .title { font-weight: 600; font-size: 13px; }
.axis { stroke: #bbb; } .grid { stroke: #e6e6e6; } .paper { fill: #fff; } .line { fill: none; stroke-width: 1.8; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } .axis { stroke: #666; } .grid { stroke: #333; }
 .paper { fill: #16181c; } .line[stroke="#000000"] { stroke: #fff; } }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 940px; padding: 0 1rem; color: #222;
 background: #fff; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }}
th, td {{ text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
.best {{ font-weight: 700; }} .scroll {{ overflow-x: auto; }}
svg {{ margin-top: 1.2rem; max-width: 100%; height: auto; }}
p {{ color: #555; }} code {{ font-size: 13px; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #ddd; }} p {{ color: #aaa; }}
 th, td {{ border-color: #333; }} }}
</style></head><body>
<h1>{title}</h1>
<p>{subtitle}</p>
<div class="scroll">{table}</div>
{chart}
<p>One simulated run of the real scheduler per line. Points are means over equal stretches of simulated time.</p>
</body></html>
"""

COLUMNS: tuple[tuple[str, str, bool], ...] = (
    # heading, key path, whether larger is better
    ("hit rate %", "hit_rate", True),
    ("TTFT p50 ms", "ttft_s.p50", False),
    ("TTFT p99 ms", "ttft_s.p99", False),
    ("TPOT p50 ms", "tpot_s.p50", False),
    ("output tok/s", "output_tokens_per_s", True),
    ("queue max", "queue_length.max", False),
    ("time s", "simulated_s", False),
)


def cell(figures: Figures, path: str) -> float:
    """A figure by its path, in the unit of its heading."""
    value: Any = figures
    for part in path.split("."):
        value = value[part]
    scale = 100 if path == "hit_rate" else 1000 if path.startswith(("ttft", "tpot")) else 1
    return float(value) * scale


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def table(runs: Mapping[str, Figures]) -> list[list[str]]:
    """Rows of text, headings first."""
    rows = [["", *(heading for heading, _, _ in COLUMNS)]]
    for name, figures in runs.items():
        rows.append([name, *(shown(cell(figures, path)) for _, path, _ in COLUMNS)])
    return rows


def tenant_table(runs: Mapping[str, Figures]) -> list[list[str]]:
    """First-token times per tenant, for traces with several; no rows otherwise."""
    tenants = sorted({tenant for figures in runs.values() for tenant in figures["by_tenant"]})
    if not tenants:
        return []
    rows = [["", *(f"{tenant} TTFT {p} ms" for tenant in tenants for p in ("p50", "p99"))]]
    for name, figures in runs.items():
        found = figures["by_tenant"]
        rows.append([name, *(shown(found[tenant][p] * 1000) for tenant in tenants for p in ("p50", "p99"))])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def page(runs: Mapping[str, Figures], title: str, subtitle: str) -> str:
    """The HTML report."""
    tables = _html_table(runs)
    more = tenant_table(runs)
    if more:
        tables += "<h2>By tenant</h2>" + _plain_table(more)
    return PAGE.format(title=html.escape(title), subtitle=html.escape(subtitle), table=tables, chart=svg(runs, title))


def _plain_table(rows: list[list[str]]) -> str:
    head, *body = rows
    text = "<table><tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"
    for row in body:
        text += "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>"
    return text + "</table>"


def _html_table(runs: Mapping[str, Figures]) -> str:
    text = "<table><tr><th></th>" + "".join(f"<th>{heading}</th>" for heading, _, _ in COLUMNS) + "</tr>"
    best = {
        path: (max if larger else min)(cell(figures, path) for figures in runs.values()) for _, path, larger in COLUMNS
    }
    for name, figures in runs.items():
        text += f"<tr><td>{html.escape(name)}</td>"
        for _, path, _ in COLUMNS:
            value = cell(figures, path)
            mark = ' class="best"' if len(runs) > 1 and shown(value) == shown(best[path]) else ""
            text += f"<td{mark}>{shown(value)}</td>"
        text += "</tr>"
    return text + "</table>"


def svg(runs: Mapping[str, Figures], title: str) -> str:
    """All charts below each other, with a legend, as one SVG element."""
    names = list(runs)
    legend, rows = _legend(names)
    top = LEGEND * rows + 8
    height = top + HEIGHT * len(CHARTS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{html.escape(title)}</title><style>{STYLE}</style>',
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        legend,
    ]
    end = max(max(figures["timeline"]["t"]) for figures in runs.values())
    for i, (column, heading, unit, log) in enumerate(CHARTS):
        lines = {name: (runs[name]["timeline"]["t"], runs[name]["timeline"][column]) for name in names}
        parts.append(_chart(lines, heading, unit, log, end, top + HEIGHT * i))
    return "".join([*parts, "</svg>"])


def _legend(names: list[str]) -> tuple[str, int]:
    x, row, text = float(LEFT), 0, ""
    for i, name in enumerate(names):
        width = 44 + 7.2 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, row = LEFT, row + 1
        y = 16 + LEGEND * row
        text += f'<line x1="{x:.0f}" x2="{x + 24:.0f}" y1="{y}" y2="{y}" {_stroke(i)}/>'
        text += f'<text x="{x + 30:.0f}" y="{y + 4}">{html.escape(name)}</text>'
        x += width
    return text, row + 1


def _stroke(i: int) -> str:
    dash = DASHES[i // len(COLORS) % len(DASHES)] or DASHES[i % len(DASHES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="line" stroke="{COLORS[i % len(COLORS)]}"{pattern}'


def _chart(
    lines: dict[str, tuple[list[float], list[float | None]]],
    heading: str,
    unit: str,
    log: bool,
    end: float,
    y0: int,
) -> str:
    factor = 100.0 if unit == "%" else 1.0
    values = [value * factor for _, column in lines.values() for value in column if value is not None]
    ticks = _log_ticks(values) if log else _ticks(max(values, default=1.0), 100.0 if unit == "%" else None)
    low, high = (math.log10(ticks[0]), math.log10(ticks[-1])) if log else (ticks[0], ticks[-1])
    bottom, inner = y0 + HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        place = math.log10(max(value, ticks[0])) if log else value
        return bottom - inner * (place - low) / (high - low)

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * t / end

    text = f'<text class="title" x="{LEFT}" y="{y0 + 18}">{heading}{f" ({unit})" if unit else ""}</text>'
    for tick in ticks:
        at = y(tick)
        text += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        text += f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:,g}</text>'
    text += f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    for tick in _ticks(end, None)[:-1]:
        text += f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,g} s</text>'
    for i, (times, column) in enumerate(lines.values()):
        points = [f"{x(t):.1f},{y(v * factor):.1f}" for t, v in zip(times, column, strict=True) if v is not None]
        if points:
            text += f'<polyline {_stroke(i)} points="{" ".join(points)}"/>'
    return text


def _ticks(top: float, limit: float | None) -> list[float]:
    """Round numbers from 0 to at least ``top``, about five of them."""
    if limit is not None:
        return [limit * i / 4 for i in range(5)]
    top = max(top, 1e-9)
    step = 10 ** math.floor(math.log10(top / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * 5 >= top)
    return [round(step * i, 10) for i in range(math.ceil(top / step - 1e-9) + 1)]


def _log_ticks(values: list[float]) -> list[float]:
    """Powers of ten around all positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(math.ceil(math.log10(max(positive))), low + 1)
    return [10.0**i for i in range(low, high + 1)]
