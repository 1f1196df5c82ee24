"""How long the other ranks wait for one that is lost: prints the table of docs/failures.md.

    PYTHONPATH=tests:tests/parallel python docs/measured/lost_rank.py

Four gloo processes on this machine, a context of Ulysses 2 x Ring 2 with a timeout of 10 s; the worst of three others.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import test_failures as failures

from gloo import Pool

TIMEOUT = 10.0


def lose(rank: int, world: int, place: str, act: object, over: Path) -> failures.Told:
    failures.TIMEOUT = TIMEOUT
    return failures.lose(rank, world, (2, 2), place, act, over)  # type: ignore[arg-type]


def leave(rank: int, world: int) -> failures.Told:
    failures.TIMEOUT = TIMEOUT
    return failures.leave(rank, world)


def raise_inside(rank: int, world: int) -> failures.Told:
    cp = failures.context(2, 2)
    return failures.told(partial(failures.another_call, cp, rank == failures.LOST, "user code"))


def main() -> None:
    pool = Pool(4)
    rows = {"raises inside `with cp:`": pool.run(raise_inside, 4, check=False)}
    rows["raises elsewhere, its groups end"] = pool.run(leave, 4, check=False)
    for place in failures.PLACES:
        with tempfile.TemporaryDirectory() as folder:
            over = Path(folder)
            rows[f"is killed {place}"] = pool.run(lose, 4, place, failures.kill, over, check=False)
        with tempfile.TemporaryDirectory() as folder:
            over = Path(folder)
            rows[f"stalls {place}"] = pool.run(lose, 4, place, partial(failures.stall, over, 3), over, check=False)
    pool.close()
    for what, results in rows.items():
        told = [result for rank, result in enumerate(results) if rank != failures.LOST]
        kinds = {text.partition(":")[0] for text, _ in told}
        print(f"| {what} | {', '.join(sorted(kinds))} | {max(seconds for _, seconds in told):.2f} |")


if __name__ == "__main__":
    main()
