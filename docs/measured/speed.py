"""Draw the backends side by side: `python docs/measured/speed.py docs/verified/NAME.json`, to speed.svg.

NAME.json is what docs/verified/speed.py wrote. Each point is a backend's time for forward and backward over that of
native_cudnn in the same run, (1, S, 24, 128), no mask.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STYLE = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="11" fill="#1f2937"'
LEFT, TOP, WIDTH, HEIGHT = 60, 56, 420, 190
SHOWN = {"flash_4": "#059669", "native_cudnn": "#2563eb", "native_flash": "#d97706", "native_efficient": "#9ca3af"}
TICKS = (0.7, 1.0, 1.5, 2.0, 3.0, 4.0)


def text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{said}</text>'


def height(ratio: float) -> float:
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    return TOP + HEIGHT * (1 - (math.log(ratio) - low) / (high - low))


def draw(found: dict[str, Any]) -> str:
    """One line a backend over S, both axes logarithmic."""
    rows = [r for r in found["rows"] if r["head_dim"] == 128 and not r["causal"] and "over_base" in r]
    lengths = sorted({r["tokens"] for r in rows})
    across = {n: LEFT + WIDTH * i / (len(lengths) - 1) for i, n in enumerate(lengths)}
    versions = found["versions"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="620" height="{TOP + HEIGHT + 50}" {STYLE}>',
        '<rect width="100%" height="100%" fill="white"/>',
        text(
            12, 20, "Forward and backward, bfloat16, (1, S, 24, 128): time over that of native_cudnn", 'font-size="13"'
        ),
        text(12, 37, f"{versions['gpu']}, torch {versions['torch']}; below 1 is faster", 'fill="#6b7280"'),
    ]
    for tick in TICKS:
        y, ink = height(tick), "#6b7280" if tick == 1.0 else "#e5e7eb"
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:g}" y2="{y:g}" stroke="{ink}"/>')
        lines.append(text(LEFT - 8, y + 4, f"{tick:g}", 'text-anchor="end"'))
    lines += [text(x, TOP + HEIGHT + 18, f"{n:,}", 'text-anchor="middle"') for n, x in across.items()]
    lines.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, "S, tokens", 'text-anchor="middle"'))
    for name, ink in SHOWN.items():
        own = [(across[r["tokens"]], height(r["over_base"])) for r in rows if r["backend"] == name]
        path = " ".join(f"{x:g},{y:g}" for x, y in own)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{ink}"/>' for x, y in own]
        lines.append(text(own[-1][0] + 10, own[-1][1] + 4, name, f'fill="{ink}"'))
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "speed.svg").write_text(draw(json.loads(Path(sys.argv[1]).read_text("utf-8"))), "utf-8")
