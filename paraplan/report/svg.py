"""Inline SVG without libraries: the timeline of a rank's streams, and its memory over time.

Colours are CSS variables set by `html`, so that both follow a light or a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.cost_models.simulator.timeline import Span
from paraplan.ir.execution.streams import StreamKind
from paraplan.report.units import show_bytes, show_seconds

WIDTH, LEFT, ROW, AXIS = 860, 118, 24, 20
_MAX_RECTS = 1500

Point = tuple[float, float]


def timeline_svg(trace: RankTrace) -> str:
    """One row per stream; each stretch in its phase's colour, titles on hover."""
    streams = list(dict.fromkeys(["compute", *(span.stream for span in trace.spans)]))
    total = max(trace.step_s, 1e-12)
    height = ROW * len(streams) + AXIS
    parts = [_open(height, "timeline of the busiest rank")]
    for row, stream in enumerate(streams):
        y = row * ROW
        parts.append(f'<text class="pp-label" x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(stream)}</text>')
        parts.append(f'<rect class="pp-lane" x="{LEFT}" y="{y + 3}" width="{WIDTH - LEFT}" height="{ROW - 6}" rx="2"/>')
        for span in merge_spans([span for span in trace.spans if span.stream == stream], total):
            parts.append(_span_rect(span, y, total))
    parts.extend(_time_axis(total, ROW * len(streams)))
    return "".join([*parts, "</svg>"])


def merge_spans(spans: Sequence[Span], total_s: float) -> list[Span]:
    """Neighbours of one phase drawn as one once there are more than can be told apart."""
    if len(spans) <= _MAX_RECTS:
        return list(spans)
    grain = total_s / _MAX_RECTS
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.phase == span.phase and span.start_s - last.end_s < grain:
            merged[-1] = Span(
                stream=last.stream,
                start_s=last.start_s,
                end_s=span.end_s,
                label=f"{last.phase} ...",
                action=last.action,
                segment=-1,
                microbatch=last.microbatch,
                phase=last.phase,
                busy_s=last.busy_s + span.busy_s,
            )
        else:
            merged.append(span)
    return merged


def _span_rect(span: Span, y: float, total: float) -> str:
    scale = (WIDTH - LEFT) / total
    x, width = LEFT + span.start_s * scale, max((span.end_s - span.start_s) * scale, 0.4)
    kind = "comm" if span.stream.kind is StreamKind.COMMUNICATION else {"F": "fwd", "B": "bwd"}.get(span.phase, "upd")
    where = f", segment {span.segment}" if span.segment >= 0 else ""
    when = f"{show_seconds(span.start_s)} to {show_seconds(span.end_s)}, busy {show_seconds(span.busy_s)}"
    title = escape(f"{span.label}: {span.action}{where}, {when}")
    place = f'x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="{ROW - 6}"'
    return f'<rect class="pp-{kind}" {place}><title>{title}</title></rect>'


def memory_svg(trace: RankTrace, memory_bytes: int) -> str:
    """Bytes alive after every step, the peak inside it as a lighter crest, and the device's limit where near."""
    total, top = max(trace.step_s, 1e-12), max(trace.peak_bytes, 1)
    high = memory_bytes if memory_bytes < 1.6 * top else top
    chart, scale = 120, (WIDTH - LEFT) / total
    parts = [_open(chart + AXIS + 8, "memory of a rank over the step")]

    def y(nbytes: float) -> float:
        return 8 + chart * (1 - nbytes / (high * 1.04))

    live: list[Point] = [(0.0, trace.start_bytes)]
    crest: list[Point] = []
    before, begin = trace.start_bytes, 0.0
    for point in trace.memory:
        crest.extend(((begin, max(point.peak_bytes, before)), (point.end_s, max(point.peak_bytes, point.live_bytes))))
        live.append((point.end_s, point.live_bytes))
        before, begin = point.live_bytes, point.end_s
    for name, points in (("crest", crest), ("live", live)):
        if points:
            line = " ".join(f"{LEFT + t * scale:.1f},{y(b):.1f}" for t, b in _thin(points, total))
            end = LEFT + points[-1][0] * scale
            parts.append(f'<polygon class="pp-{name}" points="{LEFT},{y(0):.1f} {line} {end:.1f},{y(0):.1f}"/>')
    for nbytes, label in (
        (top, f"peak {show_bytes(top)}"),
        (trace.start_bytes, f"at rest {show_bytes(trace.start_bytes)}"),
    ):
        parts.append(f'<line class="pp-rule" x1="{LEFT}" x2="{WIDTH}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}"/>')
        parts.append(f'<text class="pp-label" x="{LEFT - 8}" y="{y(nbytes) + 4:.1f}" text-anchor="end">{label}</text>')
    if high == memory_bytes:
        parts.append(f'<line class="pp-limit" x1="{LEFT}" x2="{WIDTH}" y1="{y(high):.1f}" y2="{y(high):.1f}"/>')
        parts.append(
            f'<text class="pp-label" x="{WIDTH}" y="{y(high) + 12:.1f}" text-anchor="end">'
            f"device {show_bytes(high)}</text>"
        )
    parts.extend(_time_axis(total, chart + 8))
    return "".join([*parts, "</svg>"])


def _thin(points: Sequence[Point], total: float) -> list[Point]:
    """At most a few points per pixel: of those within one, the lowest and the highest."""
    if len(points) < 4 * WIDTH:
        return list(points)
    grain, group = total / WIDTH, [points[0]]
    found: list[Point] = []
    for point in points[1:]:
        if point[0] - group[0][0] < grain:
            group.append(point)
            continue
        found.extend(
            dict.fromkeys((group[0], min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1]), group[-1]))
        )
        group = [point]
    return [*found, *group]


def _open(height: float, title: str) -> str:
    return f'<svg class="pp-svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg">'


def _time_axis(total: float, y: float) -> list[str]:
    parts = []
    for tick in range(6):
        x = LEFT + (WIDTH - LEFT) * tick / 5
        anchor = "start" if tick == 0 else "end" if tick == 5 else "middle"
        parts.append(
            f'<text class="pp-tick" x="{x:.1f}" y="{y + 14}" text-anchor="{anchor}">'
            f"{show_seconds(total * tick / 5)}</text>"
        )
    return parts
