"""A record of `bench adaptive` as a picture: plain SVG, a panel for each load, requests to the right."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

# Paul Tol's bright scheme, which colour-blind readers can tell apart; the last is for the adaptive engine.
COLOURS = ("#bbbbbb", "#4477aa", "#ccbb44", "#66ccee", "#aa3377")
ADAPTIVE_COLOUR = "#228833"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 300, 200, 44, 56, 30  # of a panel; pixels left of, above and below its plot
_COLUMNS = 3
_LOWEST = 0.5  # share of the best at the bottom; what is lower is drawn there


def draw(results: Sequence[Mapping[str, Any]], gate: float, adaptive: str) -> str:
    """Each engine's tokens a second over the best one's of those with a fixed number of drafts; text of an SVG file.

    Args:
        results: of the record; at least one.
        gate: the share that the adaptive engine is to reach, drawn as a line.
        adaptive: that engine's name.
    """
    names = list(results[0]["engines"])
    others = [name for name in names if name != adaptive]
    colours = dict(zip(others, COLOURS * len(others), strict=False)) | {adaptive: ADAPTIVE_COLOUR}
    loads = list(dict.fromkeys(str(each["load"]) for each in results))
    counts = sorted({each["requests"] for each in results})
    shares = {(str(r["load"]), r["requests"]): _shares(r, others) for r in results}
    highest = max(1.05, *(share for each in shares.values() for share in each.values())) + 0.02
    width = _WIDTH * min(len(loads), _COLUMNS)
    height = _TOP + _HEIGHT * -(-len(loads) // _COLUMNS)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18">output tokens/s over the best engine with a fixed number of drafts, by requests</text>',
    ]
    x = _LEFT
    for name in names:
        out.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{colours[name]}"/>')
        out.append(f'<text x="{x + 17}" y="38">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    for i, load in enumerate(loads):
        of_load = {count: shares[load, count] for count in counts if (load, count) in shares}
        place = f"translate({_WIDTH * (i % _COLUMNS)} {_TOP + _HEIGHT * (i // _COLUMNS)})"
        out += [
            f'<g class="panel" transform="{place}">',
            *_panel(load, counts, of_load, colours, gate, highest),
            "</g>",
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


def _shares(result: Mapping[str, Any], others: Sequence[str]) -> dict[str, float]:
    rates = {name: each["tokens_per_s"] for name, each in result["engines"].items()}
    best = max(rates[name] for name in others)
    return {name: rate / best for name, rate in rates.items()}


def _panel(
    load: str,
    counts: Sequence[int],
    shares: Mapping[int, Mapping[str, float]],
    colours: Mapping[str, str],
    gate: float,
    highest: float,
) -> list[str]:
    right, bottom = _WIDTH - 16, _HEIGHT - _BOTTOM

    def x_of(count: int) -> float:
        return _LEFT + (right - _LEFT) * (counts.index(count) + 0.5) / len(counts)

    def y_of(share: float) -> float:
        return bottom - (bottom - 20) * (max(share, _LOWEST) - _LOWEST) / (highest - _LOWEST)

    title = load if not load[0].isdigit() else f"length {load}"
    out = [f'<text x="{_LEFT}" y="12">{escape(title)}</text>']
    for line, stroke in ((_LOWEST, "#dddddd"), (1.0, "#888888"), (gate, "#ee6677")):
        level = f"{y_of(line):.1f}"
        out.append(f'<path d="M{_LEFT} {level}H{right}" stroke="{stroke}"/>')
        if line != gate:  # too near the line of the best for a label of its own
            out.append(
                f'<text x="{_LEFT - 4}" y="{level}" text-anchor="end" dominant-baseline="middle">{line:g}</text>'
            )
    out += [f'<text x="{x_of(n):.1f}" y="{bottom + 16}" text-anchor="middle">{n}</text>' for n in counts]
    for name, colour in colours.items():
        points = [(x_of(n), y_of(each[name]), each[name]) for n, each in shares.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        out.append(
            f'<polyline class="{escape(name)}" points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        for x, y, share in points:
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}">'
            out.append(f"{dot}<title>{escape(name)}: {share:.3f}</title></circle>")
    return out
