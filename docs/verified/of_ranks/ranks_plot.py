"""Efficiency over the number of GPUs, against the ideal: an SVG from what ranks.py wrote."""

from __future__ import annotations

from typing import Any

STYLE = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="11" fill="#1f2937"'
COLOURS = {
    "ringtrue Ulysses": "#059669",
    "ringtrue Ring": "#0369a1",
    "ringtrue Ulysses x Ring": "#7c3aed",
    "diffusers Ulysses": "#84cc16",
    "diffusers Ring": "#f59e0b",
    "torch": "#dc2626",
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 160, 60, 84, 56


def kind(way: str) -> str:
    """What is drawn as one line, for any number of ranks."""
    library, mode = way.split()
    if library == "torch":
        return library
    names = {"u": "Ulysses", "r": "Ring"}
    return f"{library} {names.get(mode[0], 'Ulysses x Ring')}"


def lines(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """By kind and GPUs the efficiency; of several ways to mix, the best."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if "efficiency" in row:
            points = found.setdefault(kind(row["way"]), {1: 1.0})
            points[row["ranks"]] = max(row["efficiency"], points.get(row["ranks"], 0.0))
    return found


def text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{said}</text>'


def panel(x: int, y: int, title: str, rows: list[dict[str, Any]], most: int) -> list[str]:
    """Axes, the ideal (dashed), and a line a kind."""
    steps = [n for n in (1, 2, 4, 8) if n <= most]
    across = {n: x + WIDTH * i / max(1, len(steps) - 1) for i, n in enumerate(steps)}
    down = lambda efficiency: y + HEIGHT * (1 - efficiency / 1.2)
    parts = [text(x, y - 8, title, 'font-weight="600"')]
    for share in (0, 0.25, 0.5, 0.75, 1.0):
        dashes = ' stroke-dasharray="5 4" stroke="#111827"' if share == 1 else ' stroke="#e5e7eb"'
        parts.append(f'<path d="M{x} {down(share):g}h{WIDTH}" fill="none"{dashes}/>')
        parts.append(text(x - 6, down(share) + 4, f"{share:g}", 'text-anchor="end"'))
    parts += [text(across[n], y + HEIGHT + 16, str(n), 'text-anchor="middle"') for n in steps]
    for name, points in lines(rows).items():
        places = [(across[n], down(e)) for n, e in sorted(points.items()) if n in across]
        path = "L".join(f"{a:g} {b:g}" for a, b in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:g}" cy="{b:g}" r="3" fill="{COLOURS[name]}"/>' for a, b in places[1:]]
    return parts


def draw(found: dict[str, Any]) -> str:
    """A row of panels a backend, a panel a length. ValueError where no GPU's speed is known."""
    rows = [row for row in found.get("speed", []) if "efficiency" in row]
    if not rows or found["versions"]["device"] != "cuda":
        raise ValueError("there is nothing to draw: no speed was taken on GPUs")
    backends, lengths = (sorted({row[key] for row in rows}) for key in ("backend", "tokens"))
    most, parts = max(row["ranks"] for row in rows), []
    for i, backend in enumerate(backends):
        for j, length in enumerate(lengths):
            here = [row for row in rows if (row["backend"], row["tokens"]) == (backend, length)]
            place = LEFT + j * (WIDTH + GAP), TOP + i * (HEIGHT + GAP)
            parts += panel(*place, f"{backend}, {length} tokens", here, most)
    width = LEFT + len(lengths) * (WIDTH + GAP)
    height = TOP + len(backends) * (HEIGHT + GAP)
    _, _, heads, dim = found["shape"]
    title = "Efficiency over the number of GPUs: one GPU's time / (GPUs x time); dashed: the ideal"
    below = f"{found['versions']['gpu']}, torch {found['versions']['torch']}, bfloat16, {heads} heads of {dim}, "
    head = [text(12, 22, title, 'font-size="14" font-weight="600"')]
    head.append(text(12, 40, below + "forward and backward, not causal; medians, in turn"))
    for i, (name, colour) in enumerate(COLOURS.items()):
        head += [f'<rect x="{12 + 150 * i}" y="50" width="12" height="8" fill="{colour}"/>']
        head.append(text(28 + 150 * i, 58, name))
    width = max(width, 12 + 150 * len(COLOURS))
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {STYLE}>'
    return "\n".join([start, '<rect width="100%" height="100%" fill="#ffffff"/>', *head, *parts, "</svg>", ""])
