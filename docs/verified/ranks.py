"""Several GPUs of one host, by one script for any number of them: `python docs/verified/ranks.py NAME`.

For 2, 4 and 8 ranks, as far as there are GPUs (`--ranks` to choose), every mode and backend: random calls and the demo
in bfloat16, the ring law's errors at real ranks, the speed of forward and backward beside diffusers' and torch's own
context parallelism. Writes NAME.json and NAME.md after every step; `--only` and `--ranks` add to a NAME that is there.

    python docs/verified/ranks.py NAME --only speed --ranks 8     one step on eight GPUs
    python docs/verified/ranks.py NAME --ranks 4                  on fewer GPUs: ranks share them, and no time is taken
    python docs/verified/ranks.py NAME --device cpu --ranks 2 --lengths 256 --heads 4 --dim 32     of this script itself
    python docs/verified/ranks.py --plot NAME                     NAME.svg from NAME.json, and a page that shows it
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "of_ranks"))
with suppress(ValueError):
    sys.path.remove(str(HERE))  # a neighbour has the name of a package that backends look for

from ranks_page import page, with_efficiency  # noqa: E402
from ranks_plot import draw  # noqa: E402
from ranks_work import modes, ways  # noqa: E402

import ringtrue as rt  # noqa: E402
from ringtrue.bench.environment import environment  # noqa: E402
from ringtrue.cli.pool import Pool, Task, WorkerError  # noqa: E402

BACKENDS = ("native_flash", "native_cudnn", "flash_4")
Row = dict[str, Any]
News = Callable[[str, Any], None]


class Crew:
    """The processes of the ranks, kept from task to task, and started anew after a task that failed or hung."""

    def __init__(self, ranks: int, device: str, timeout: float) -> None:
        self.ranks, self.device, self.timeout = ranks, device, timeout
        self._pool: Pool | None = None

    def run(self, fn: str, args: tuple[Any, ...], on_news: News) -> None:
        """Raises WorkerError: also after `timeout` seconds without news."""
        try:
            if self._pool is None:
                self._pool = Pool(self.ranks, "ranks_work", self.device, self.timeout)
                self._pool.ready()
            self._pool.run([Task(fn, f"ranks_work:{fn}", args, self.ranks)], on_news)
        except WorkerError:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def shortly(error: Exception) -> str:
    """What processes said, without their stacks."""
    lines = [line for line in str(error).splitlines() if re.match(r"\S", line) and not line.startswith("Traceback")]
    return "; ".join(lines)[:800]


def draws(crew: Crew, asked: argparse.Namespace, backend: str) -> Iterator[list[Row]]:
    for mode in modes(crew.ranks):
        rows: dict[str, Row] = {}
        try:
            crew.run("draws", (backend, mode, asked.draws), lambda _, row, rows=rows: rows.update(last=row))
        except WorkerError as error:
            rows["last"] = {"mode": mode.name, **rows.get("last", {}), "error": shortly(error)}
        yield [rows["last"]]


def rings(crew: Crew, asked: argparse.Namespace, backend: str) -> Iterator[list[Row]]:
    rows: list[Row] = []
    try:
        crew.run("rings", (backend,), lambda _, row: rows.append(row))
    except WorkerError as error:
        rows.append({"error": shortly(error)})
    yield rows


def demo(crew: Crew, asked: argparse.Namespace, backend: str) -> Iterator[list[Row]]:
    """`ringtrue demo`, in processes of its own."""
    crew.close()  # their GPUs' memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "ringtrue.cli", "demo", "--device", crew.device, "--dtype", "bfloat16"]
        command += ["--modes", ",".join(mode.name for mode in modes(crew.ranks)), "--backend", backend]
        command += ["--timeout", str(crew.timeout), "--json", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5 * crew.timeout)
            told = re.findall(r"(?m)^(?:\w+\.)*\w*Error: .*", done.stdout + done.stderr)
            said = (told or (done.stderr or done.stdout).strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired as error:
            said = str(error)
        found = json.loads(path.read_text("utf-8"))["modes"] if path.exists() else {}
    keep = ("gradient_error", "times_yardstick", "forward_error", "within", "loss_differences")
    rows = [
        {"mode": mode, **({k: run[k] for k in keep} if run["ran"] else {"error": run["reason"]})}
        for mode, run in found.items()
    ]
    yield rows or [{"error": said[:800]}]


def speed(crew: Crew, asked: argparse.Namespace, backend: str) -> Iterator[list[Row]]:
    """A way that ends or hangs the processes is left out, and the rest goes on without it.

    Ranks that share a GPU have no speed: the shortest calls are looked at, and nothing is timed.
    """
    shared = crew.device == "cuda" and crew.ranks > torch.cuda.device_count()
    lengths, names = sorted(asked.lengths)[: 1 if shared else None], ways(crew.ranks)
    while lengths:
        last: Row = {}
        done: list[Row] = []

        def news(_: str, told: Row, last: Row = last, done: list[Row] = done) -> None:
            last.update(told)
            done += told.get("rows", [])

        args = (backend, tuple(lengths), asked.heads, asked.dim, tuple(names), 0 if shared else asked.repetitions)
        error = ""
        try:
            crew.run("speed", args, news)
        except WorkerError as raised:
            error = shortly(raised)
        yield with_efficiency(done, crew.ranks)
        left = [n for n in lengths if n not in {row["tokens"] for row in done}]
        if error and (culprit := last.get("trying")) in names:
            names.remove(culprit)
            yield [{"tokens": n, "way": culprit, "error": error if n == left[0] else "as above"} for n in left]
        elif error:  # one GPU's call, or the clock: this length is lost, and if nothing began, all are
            lost, left = (left[:1], left[1:]) if last else (left, [])
            yield [{"tokens": n, "way": "all", "error": error} for n in lost]
        lengths = left


STEPS: dict[str, Callable[[Crew, argparse.Namespace, str], Iterator[list[Row]]]]
STEPS = {"draws": draws, "rings": rings, "demo": demo, "speed": speed}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: [word for word in text.split(",") if word]
    numbers = lambda text: [int(word) for word in words(text)]
    parser.add_argument("name")
    parser.add_argument("--plot", action="store_true", help="draw what NAME.json holds, run nothing")
    parser.add_argument("--ranks", type=numbers, help="default: 2,4,8 as far as there are GPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backends", type=words, default=list(BACKENDS))
    parser.add_argument("--only", type=words, default=list(STEPS), help=",".join(STEPS))
    parser.add_argument("--draws", type=int, default=12, help="random calls a mode")
    parser.add_argument("--lengths", type=numbers, default=[16384, 65536, 131072])
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=240, help="seconds without news that end a task")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def run(asked: argparse.Namespace, found: dict[str, Any], write: Callable[[], None]) -> None:
    """Every step asked for; what `found` had of the same step, ranks and backend gives way."""
    gpus = torch.cuda.device_count() if asked.device == "cuda" else 0
    here = {s.name for s in rt.backends() if s.device == asked.device and s.unavailable is None}
    names = [name for name in asked.backends if name in here]
    found["versions"] = environment(asked.device, asked.commit) | {"gpus": str(gpus)}
    if gpus:
        found["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["shape"], found["not_here"] = [1, "S", asked.heads, asked.dim], sorted({*asked.backends} - here)
    for ranks in asked.ranks or [n for n in (2, 4, 8) if n <= gpus]:
        over = "gloo, CPUs" if not gpus else "NCCL" if ranks <= gpus else f"{gpus} GPU, over the host's memory"
        found.setdefault("over", {})[str(ranks)] = over
        crew = Crew(ranks, asked.device, asked.timeout)
        for step in asked.only:
            for backend in names:
                key, start = {"ranks": ranks, "backend": backend}, time.monotonic()
                for kind in (step, "seconds"):
                    old = found.setdefault(kind, [])
                    found[kind] = [r for r in old if not (key.items() <= r.items() and r.get("step", step) == step)]
                for rows in STEPS[step](crew, asked, backend):
                    found[step] += [key | row for row in rows]
                    write()
                found["seconds"].append({**key, "step": step, "seconds": round(time.monotonic() - start, 1)})
                print(ranks, step, backend, f"{time.monotonic() - start:.0f} s", flush=True)
                write()
        crew.close()


def main() -> int:
    asked = options()
    path = asked.out / f"{asked.name}.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    picture = path.with_suffix(".svg")

    def write() -> None:
        path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        path.with_suffix(".md").write_text(page(asked.name, found, picture.exists()), "utf-8")

    if asked.plot:
        picture.write_text(draw(found), "utf-8")
        write()
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    run(asked, found, write)
    print(path.with_suffix(".md").read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
