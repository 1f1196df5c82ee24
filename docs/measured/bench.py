"""Draw what our layers cost beside the kernel: `python docs/measured/bench.py docs/verified/NAME.json`, to bench.svg.

Two bars a kernel and shape, forward and backward: ringtrue, and the same kernel called through torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STYLE = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="11" fill="#1f2937"'
OURS, TORCHS = "#059669", "#9ca3af"
LEFT, TOP, WIDTH, BAR, GAP = 250, 62, 420, 11, 16


def text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{said}</text>'


def bar(y: float, milliseconds: float, longest: float, colour: str, said: str) -> list[str]:
    width = WIDTH * milliseconds / longest
    rect = f'<rect x="{LEFT}" y="{y:g}" width="{width:g}" height="{BAR}" fill="{colour}"/>'
    return [rect, text(LEFT + width + 5, y + BAR - 1.5, said)]


def draw(found: dict[str, Any]) -> str:
    rows = [m for m in found["bench"]["pair"]["measured"] if m["part"] == "forward+backward"]
    shapes = sorted({tuple(m["shape"]) for m in rows})
    parts, y = [], float(TOP)
    for shape in shapes:
        here = [m for m in rows if tuple(m["shape"]) == shape]
        longest = max(m["ours"]["median_s"] for m in here) * 1e3
        parts.append(text(LEFT, y, f"(B, S, H, D) = {shape}", 'font-weight="600"'))
        y += 8
        for m in here:
            ours, torchs = (m[side]["median_s"] * 1e3 for side in ("ours", "torch"))
            parts.append(text(LEFT - 8, y + BAR + 4, m["backend"], 'text-anchor="end"'))
            parts += bar(y, ours, longest, OURS, f"{ours:.2f} ms, {m['time_ratio']:.3f} x")
            parts += bar(y + BAR + 1, torchs, longest, TORCHS, f"{torchs:.2f} ms")
            y += 2 * BAR + GAP
        y += GAP
    versions = found["versions"]
    title = "Forward and backward: ringtrue (green), and the same kernel called through torch (grey)"
    below = f"{versions['gpus']}, torch {versions['torch']}, cuDNN {versions['cudnn']}, bfloat16; medians, in turn"
    head = [text(16, 22, title, 'font-size="14" font-weight="600"'), text(16, 40, below)]
    size = f'width="{LEFT + WIDTH + 150}" height="{y:g}" viewBox="0 0 {LEFT + WIDTH + 150} {y:g}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {STYLE}>', background, *head, *parts, "</svg>", ""]
    )


if __name__ == "__main__":
    (HERE / "bench.svg").write_text(draw(json.loads(Path(sys.argv[1]).read_text("utf-8"))), "utf-8")
