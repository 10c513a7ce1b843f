"""A step log as a picture: plain SVG, time to the right, a lane of steps on top and one lane for each request below."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from bench.step.step_log import Step

# Paul Tol's bright scheme, which colour-blind readers can tell apart.
COLOURS = {"prefill": "#4477aa", "own": "#ccbb44", "accepted": "#228833"}
MEANINGS = {"prefill": "prompt tokens", "own": "the target's own tokens", "accepted": "accepted drafts"}
STEP_COLOURS = ("#888888", "#bbbbbb")  # in turn, so that steps of less than a pixel still show as a texture
_ALIVE_COLOUR = "#e4e4e4"
_LABELS, _RIGHT, _TOP, _AXIS = 120, 24, 56, 34  # pixels around the lanes
_STEP_HEIGHT = 12
_TICKS = 12
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass
class _Lane:
    """Of one request: pieces [x, width] by (colour, top and height as parts of the lane's)."""

    pieces: dict[tuple[str, float, float], list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    first: float = math.inf
    last: float = -math.inf
    prompt: int = 0
    emitted: int = 0
    accepted: int = 0

    def add(self, colour: str, top: float, height: float, x: float, width: float) -> None:
        run = self.pieces[colour, top, height]
        if run and width < 1 and x - sum(run[-1]) < 0.05:
            run[-1][1] = x + width - run[-1][0]  # too small to tell apart, and many: one piece keeps the file small
        else:
            # A hair's breadth between steps that are wide enough to be seen.
            run.append([x, width - 0.5 if width > 3 else width])
        self.first, self.last = min(self.first, x), max(self.last, x + width)


def draw(steps: Sequence[Step], begin: float, end: float, width: int = 1600) -> str:
    """The picture of the time from `begin` to `end`, in seconds as the steps have them; text of an SVG file.

    A cell is one request's part in one step. The yellow part of a decode is the target's own token, the green part the
    drafts that were accepted with it: the greener, the more tokens a step.

    Args:
        steps: those that are at least partly in that time, at least one.
        width: of the whole picture in pixels.
    """
    plot = width - _LABELS - _RIGHT
    scale = plot / max(end - begin, 1e-9)

    def x_of(seconds: float) -> float:
        return _LABELS + (min(max(seconds, begin), end) - begin) * scale

    lanes: dict[str, _Lane] = defaultdict(_Lane)
    for step in steps:
        x, right = x_of(step.begin), x_of(step.end)
        for row in step.rows:
            lane = lanes[row.request]
            if row.prompt_tokens:
                lane.add("prefill", 0, 1, x, right - x)
            elif row.emitted:
                green = row.accepted / row.emitted
                if green:
                    lane.add("accepted", 0, green, x, right - x)
                if green < 1:
                    lane.add("own", green, 1 - green, x, right - x)
            lane.prompt += row.prompt_tokens
            lane.emitted += row.emitted
            lane.accepted += row.accepted
    # Few requests get lanes to look at, many ones lanes that still fit a screen or two.
    pitch = min(max(1200 / max(len(lanes), 1), 4), 18)
    top = _TOP + _STEP_HEIGHT + 10
    bottom = top + pitch * len(lanes)
    height = math.ceil(bottom + _AXIS)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *_legend(),
        *_axis(begin, end, x_of, bottom),
        *_step_lane(steps, x_of),
    ]
    for index, (request, lane) in enumerate(lanes.items()):
        out += _lane(request, lane, top + index * pitch, pitch)
    return "\n".join([*out, "</svg>"]) + "\n"


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))


def _num(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _legend() -> list[str]:
    out, x = ['<g class="legend">'], _LABELS
    for name, colour in COLOURS.items():
        out.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 17}" y="22">{MEANINGS[name]}</text>')
        x += 40 + 6 * len(MEANINGS[name])
    for i, colour in enumerate(STEP_COLOURS):
        out.append(f'<rect x="{x + 12 * i}" y="12" width="12" height="12" fill="{colour}"/>')
    out.append(f'<text x="{x + 29}" y="22">steps (the bucket of each: point at it)</text>')
    return [*out, "</g>"]


def _axis(begin: float, end: float, x_of, bottom: float) -> list[str]:
    """Grid lines at round numbers of milliseconds."""
    rough = 1000 * max(end - begin, 1e-9) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(tick) + 1e-9))
    out = ['<g class="axis" text-anchor="middle">']
    for i in range(math.ceil(1000 * begin / tick - 1e-9), math.floor(1000 * end / tick + 1e-9) + 1):
        x = _num(x_of(i * tick / 1000))
        out.append(f'<path d="M{x} {_TOP - 6}V{_num(bottom + 4)}" stroke="#dddddd"/>')
        out.append(f'<text x="{x}" y="{_num(bottom + 16)}">{i * tick:.{digits}f}</text>')
    out.append(f'<text x="{_LABELS - 60}" y="{_num(bottom + 16)}">ms</text>')
    return [*out, "</g>"]


def _step_lane(steps: Sequence[Step], x_of) -> list[str]:
    out = ['<g class="steps">', f'<text x="4" y="{_TOP + 10}">steps</text>']
    for i, step in enumerate(steps):
        x = x_of(step.begin)
        parts = [f"step {step.number}: {step.bucket}", f"{1000 * (step.end - step.start):.2f} ms"]
        parts += [
            f"{name} {ms:.2f} ms" for name, ms in (("host", step.host_ms), ("device", step.device_ms)) if ms is not None
        ]
        parts.append(f"{step.waiting} waiting")
        out.append(
            f'<rect x="{_num(x)}" y="{_TOP}" width="{_num(x_of(step.end) - x)}" height="{_STEP_HEIGHT}" '
            f'fill="{STEP_COLOURS[i % 2]}"><title>{_text("; ".join(parts))}</title></rect>'
        )
    return [*out, "</g>"]


def _lane(request: str, lane: _Lane, y: float, pitch: float) -> list[str]:
    height = pitch - 1 if pitch < 10 else pitch - 3
    drafted = f" ({lane.accepted} of them drafted)" if lane.accepted else ""
    title = f"{request}: {lane.prompt} prompt tokens, {lane.emitted} tokens{drafted}"
    out = [f'<g class="lane" data-request={quoteattr(_NOT_XML.sub("�", request))} transform="translate(0 {_num(y)})">']
    out.append(f"<title>{_text(title)}</title>")
    if pitch >= 10:
        # Of a long id the end tells more than the beginning.
        label = request if len(request) <= 18 else "…" + request[-17:]
        out.append(f'<text x="4" y="{_num(height - 2)}">{_text(label)}</text>')
    if lane.pieces:
        alive = f"M{_num(lane.first)} {_num(height / 2)}H{_num(lane.last)}"
        out.append(f'<path class="alive" d="{alive}" stroke="{_ALIVE_COLOUR}" stroke-width="{_num(height)}"/>')
    # Thick strokes: a piece is then a dozen bytes of one path.
    for (colour, top, part), run in lane.pieces.items():
        middle = _num(height * (top + part / 2))
        path = "".join(f"M{_num(x)} {middle}h{_num(w)}" for x, w in run)
        stroke = f'stroke="{COLOURS[colour]}" stroke-width="{_num(height * part)}"'
        out.append(f'<path class="{colour}" d="{path}" {stroke}/>')
    return [*out, "</g>"]
