"""Draw who computes what in a causal ring of four ranks: `python docs/measured/balance.py` writes balance.svg."""

from __future__ import annotations

from pathlib import Path

import torch

from ringtrue.parallel.layout import Layout, contiguous, head_tail, positions
from ringtrue.parallel.schedule import Schedule

RANKS, LENGTH, CELL = 4, 32, 9
COLOURS = ("#0369a1", "#15803d", "#a16207", "#be123c")
STYLE = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12" fill="#1f2937"'


def computed(places: Layout) -> list[list[tuple[int, int]]]:
    """Per rank, the (query, key) positions that its blocks show, from the schedule that a ring follows."""
    schedule, found = Schedule(places, places, causal=0), []
    for worker in range(RANKS):
        cells, rows = [], positions(places[worker])
        for owner in range(RANKS):
            cols = positions(places[owner])
            for block in schedule.blocks(worker, owner, joined=True):
                q, k = rows[block.rows], cols[block.cols]
                i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
                seen = torch.ones(len(q), len(k), dtype=torch.bool)
                seen = seen if block.causal is None else seen & (j <= i + block.causal)
                cells += [(int(q[a]), int(k[b])) for a, b in seen.nonzero().tolist()]
        found.append(cells)
    return found


def panel(x: int, title: str, places: Layout) -> list[str]:
    """The triangle of scores, a colour a rank, and under it how much each rank has to do."""
    side, work = LENGTH * CELL, computed(places)
    lines = [f'<text x="{x}" y="24" font-weight="600">{title}</text>']
    for rank, cells in enumerate(work):
        squares = "".join(f"M{x + k * CELL} {36 + q * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z" for q, k in cells)
        lines.append(f'<path d="{squares}" fill="{COLOURS[rank]}"/>')
    most = max(map(len, work))
    for rank, cells in enumerate(work):
        y = 36 + side + 18 + rank * 20
        width = round(170 * len(cells) / most)
        share = len(cells) * RANKS / sum(map(len, work))
        lines += [
            f'<text x="{x}" y="{y + 12}">rank {rank}</text>',
            f'<rect x="{x + 48}" y="{y}" width="{width}" height="15" fill="{COLOURS[rank]}"/>',
            f'<text x="{x + 54 + width}" y="{y + 12}">{share:.2f} of the mean</text>',
        ]
    return lines


def main() -> None:
    contiguous_places = contiguous((LENGTH // RANKS,) * RANKS)
    lines = panel(20, 'load_balance="none"', contiguous_places)
    lines += panel(40 + LENGTH * CELL + 40, 'load_balance="head_tail"', head_tail(LENGTH, 1, RANKS))
    width, height = 2 * LENGTH * CELL + 120, 36 + LENGTH * CELL + 18 + 20 * RANKS + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {STYLE}>'
    page = [head, '<rect width="100%" height="100%" rx="10" fill="#ffffff"/>', *lines, "</svg>", ""]
    Path(__file__).with_name("balance.svg").write_text("\n".join(page), "utf-8")


if __name__ == "__main__":
    main()
