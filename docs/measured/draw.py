"""Draw what historical faults do to a real Flux: `python docs/measured/draw.py`, after (for each PLANT, and without)

    ringtrue demo --json docs/measured/demo-none.json          # exit 0
    ringtrue demo --plant PLANT --json docs/measured/demo-PLANT.json    # exit 1

It keeps the errors that the picture shows in faults.json, and writes faults.svg from that file alone.
"""

from __future__ import annotations

import json
import math
import subprocess
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
PLANTS = ("kv-transposed-twice", "mask-as-bias", "lse-missing", "stale-kv")
COLOURS = (
    (-8.0, (236, 253, 245)),
    (-5.5, (110, 231, 183)),
    (-4.0, (254, 240, 138)),
    (-1.0, (248, 113, 113)),
    (1.0, (127, 29, 29)),
)
STYLE = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="11" fill="#1f2937"'
TITLE = "Relative gradient error of every parameter, against the float64 model"

SUBTITLE = "one real Flux, float32: eager attention and ringtrue's modes; then 2x2 with a historical fault planted"
LEFT, TOP, WIDTH, HEIGHT = 250, 92, 66, 7


def collect() -> dict[str, object]:
    """The relative gradient error of every parameter, per run, from the demo's reports."""
    clean = json.loads((HERE / "demo-none.json").read_text("utf-8"))
    columns = {"eager": clean["one_process"]["eager"]["gradient_errors"]}
    columns |= {mode: run["gradient_errors"] for mode, run in clean["modes"].items()}
    for plant in PLANTS:
        columns[plant] = json.loads((HERE / f"demo-{plant}.json").read_text("utf-8"))["modes"]["2x2"]["gradient_errors"]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=HERE).strip()
    rounded = {name: {p: float(f"{float(e):.3g}") for p, e in errors.items()} for name, errors in columns.items()}
    return {"versions": clean["versions"], "commit": commit, "columns": rounded}


def colour(error: float) -> str:
    """A colour on the scale of log10(error)."""
    x = min(max(math.log10(error) if error > 0 else -9.0, COLOURS[0][0]), COLOURS[-1][0]) if error == error else 1.0
    for (a, low), (b, high) in pairwise(COLOURS):
        if x <= b:
            t = (x - a) / (b - a)
            return "rgb({},{},{})".format(*(round(i + t * (j - i)) for i, j in zip(low, high, strict=True)))
    return "rgb(127,29,29)"


def text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{said}</text>'


def draw(columns: dict[str, dict[str, float]]) -> str:
    """The heat map: a row a parameter, a column a run."""
    parameters = list(columns["eager"])
    right = LEFT + WIDTH * len(columns)
    bottom = TOP + HEIGHT * len(parameters)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 20} {bottom + 50}" {STYLE}>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        text(12, 22, TITLE, 'font-size="15" font-weight="700"'),
        text(12, 42, SUBTITLE),
    ]
    for i, (name, errors) in enumerate(columns.items()):
        x = LEFT + WIDTH * i + WIDTH / 2
        for j, line in enumerate(name.replace("-", "- ").split(" ")):
            parts.append(text(x, 62 + 11 * j, line, 'text-anchor="middle" font-size="10"'))
        for row, parameter in enumerate(parameters):
            place = f'x="{LEFT + WIDTH * i}" y="{TOP + HEIGHT * row}" width="{WIDTH - 2}" height="{HEIGHT}"'
            parts.append(f'<rect {place} fill="{colour(errors[parameter])}"/>')
        worst = max(errors.values(), key=lambda e: e if e == e else math.inf)
        parts.append(text(x, bottom + 16, f"{worst:.0e}", 'text-anchor="middle" font-weight="700"'))
    for row, parameter in enumerate(parameters):
        short = parameter.replace("single_transformer_blocks", "single").replace("transformer_blocks", "double")
        parts.append(text(LEFT - 8, TOP + HEIGHT * row + 6, short, 'text-anchor="end" font-size="6"'))
    parts.append(text(LEFT - 8, bottom + 16, "worst", 'text-anchor="end" font-weight="700"'))
    for i in range(100):
        error = 10 ** (-8 + 9 * i / 99)
        parts.append(f'<rect x="{LEFT + 3 * i}" y="{bottom + 28}" width="3" height="9" fill="{colour(error)}"/>')
    parts.append(text(LEFT - 8, bottom + 36, "1e-8", 'text-anchor="end" font-size="9"'))
    parts.append(text(LEFT + 306, bottom + 36, "10", 'font-size="9"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    kept = HERE / "faults.json"
    if (HERE / "demo-none.json").exists():
        kept.write_text(json.dumps(collect(), indent=0) + "\n", "utf-8")
    (HERE / "faults.svg").write_text(draw(json.loads(kept.read_text("utf-8"))["columns"]), "utf-8")


if __name__ == "__main__":
    main()
