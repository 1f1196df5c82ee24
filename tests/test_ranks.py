"""docs/verified/ranks.py: its workers on two gloo ranks, and its arithmetic without any."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gloo import Pool
from ringtrue.cli.pool import WorkerError
from ringtrue.cli.worker import Job

VERIFIED = Path(__file__).parents[1] / "docs" / "verified"
sys.path.insert(0, str(VERIFIED / "of_ranks"))  # not VERIFIED, which has a module with the name of a package

import ranks_page  # noqa: E402
import ranks_plot  # noqa: E402
import ranks_work  # noqa: E402

from ringtrue.cli.demo.settings import Mode  # noqa: E402

BACKEND = "native_math"


def job(rank: int, world: int, said: list[Any]) -> Job:
    return Job(rank, world, torch.device("cpu"), Path(), 30.0, lambda news: said.append(dict(news)))


def drawn(rank: int, world: int, broken: bool) -> list[Any]:
    said: list[Any] = []
    play = ranks_work.play

    def without_dq(*args: Any, **more: Any) -> Any:
        found = play(*args, **more)
        return found._replace(dq=None if found.dq is None else found.dq * 0)

    with patch.object(ranks_work, "play", without_dq if broken else play):
        ranks_work.draws(job(rank, world, said), BACKEND, Mode(2, 1), 3)
    return said


def law(rank: int, world: int) -> list[Any]:
    said: list[Any] = []
    ranks_work.rings(job(rank, world, said), BACKEND)
    return said


def timed(rank: int, world: int, repetitions: int) -> list[Any]:
    said: list[Any] = []
    names = ["ringtrue ulysses2", "ringtrue ring2", "torch ring2", "diffusers ring2"]
    ranks_work.speed(job(rank, world, said), BACKEND, (8,), 4, 8, names, repetitions)
    return said


@pytest.mark.parametrize("broken", [False, True])
def test_random_calls_are_judged(pool: Pool, broken: bool) -> None:
    """Each call is told as it is done; a gradient that is nothing is not right."""
    for said in pool.run(drawn, 2, broken):
        assert [row["right"] + row["wrong"] + row["refused"] for row in said] == [1, 2, 3]
        assert said[-1]["mode"] == "ulysses2"
        assert (said[-1]["wrong"] > 0) == broken == bool(said[-1]["told"])


def test_the_ring_law_over_processes(pool: Pool) -> None:
    for (row,) in pool.run(law, 2):
        rows = [{**row, "ranks": 2, "backend": BACKEND}]
        assert [g.quantity for _, g in ranks_page.growths(rows)] == ["out", "dq", "dk", "dv"]
        assert all(g.ok for _, g in ranks_page.growths(rows))


@pytest.mark.parametrize("repetitions", [0, 1])
def test_calls_are_compared_and_timed(pool: Pool, repetitions: int) -> None:
    """What a rank sends is what is known of Ulysses and Ring; what a library refuses is a row."""
    first, second = pool.run(timed, 2, repetitions)
    assert [news["trying"] for news in first if "trying" in news][:2] == [ranks_page.ONE, "ringtrue ulysses2"]
    assert [row["way"] for row in first[-1]["rows"]] == [row["way"] for row in second[-1]["rows"]]
    rows = {row["way"]: row for row in first[-1]["rows"]}
    shard = 4 * 4 * 8 * 2 / 1e6  # tokens, heads, dim, bytes
    assert rows["ringtrue ulysses2"]["sent_mb"] == pytest.approx(8 * shard / 2)
    assert rows["ringtrue ring2"]["sent_mb"] == pytest.approx(6 * shard)
    for name in (ranks_page.ONE, "ringtrue ulysses2", "ringtrue ring2"):
        assert ("ms" in rows[name]) == bool(repetitions)
        assert rows[name].get("difference", 0.0) < 0.02
    for name in ("torch ring2", "diffusers ring2"):
        assert "NotImplementedError" in rows[name]["error"]
        assert "ms" not in rows[name]
    if repetitions:  # the longest of all ranks, on each
        assert [row.get("ms") for row in first[-1]["rows"]] == [row.get("ms") for row in second[-1]["rows"]]


def test_modes_and_problems() -> None:
    names = {n: [mode.name for mode in ranks_work.modes(n)] for n in (2, 4, 8)}
    assert names[2] == ["ulysses2", "ring2"]
    assert names[4] == ["ulysses4", "ring4", "2x2"]
    assert names[8] == ["ulysses8", "ring8", "2x4", "4x2"]
    assert ranks_work.ways(8)[4:] == ["diffusers ulysses8", "diffusers ring8", "torch ring8"]
    for mode in ranks_work.modes(8):
        told = ranks_work.chosen(mode, 8, backends=[BACKEND])
        assert {(t.ulysses, t.ring, t.dtype) for t in told} == {(mode.ulysses, mode.ring, "bfloat16")}
        counts = ranks_work.tally(told)
        assert counts["uneven"] > 4
        assert (counts["undivided"] > 0) == (mode.ulysses > 1)


def test_the_largest_figure_or_the_first_error() -> None:
    assert ranks_work.agreed([("", {"a": 1.0}), ("", {"a": 2.0})]) == {"a": 2.0}
    assert ranks_work.agreed([("", {"a": 1.0}), ("E: no", {})]) == {"error": "rank 1: E: no"}


SPEED = [
    {"tokens": 8, "way": ranks_page.ONE, "ms": 80.0, "spread": 0.0},
    {"tokens": 8, "way": "ringtrue ulysses4", "ms": 25.0, "spread": 0.0, "sent_mb": 3.0, "difference": 0.003},
    {"tokens": 8, "way": "ringtrue 2x2", "ms": 40.0, "spread": 0.0},
    {"tokens": 8, "way": "torch ring4", "error": "no | such\ncall"},
    {"tokens": 16, "way": "ringtrue ulysses4", "ms": 25.0, "spread": 0.0},
]
ERRORS = [dict.fromkeys(("out", "dq", "dk", "dv"), 1.0)]


def found(device: str) -> dict[str, Any]:
    key = {"ranks": 4, "backend": BACKEND}
    law = {"arithmetic": "16-bit", "one": ERRORS}
    return {
        "versions": {"device": device, "gpu": "G", "torch": "t"},
        "shape": [1, "S", 24, 128],
        "not_here": [],
        "draws": [{**key, "mode": "ring4", "right": 1, "told": ["why"], "error": "ended"}],
        "rings": [
            {**key, **law, "errors": [{**ERRORS[0], "dk": 1.2}]},
            {**key, **law, "ranks": 2, "errors": ERRORS},
        ],
        "speed": [{**key, **row} for row in ranks_page.with_efficiency(SPEED, 4)],
    }


def test_efficiency_and_growth() -> None:
    rows = ranks_page.with_efficiency(SPEED, 4)
    assert [row.get("efficiency") for row in rows] == [None, 0.8, 0.5, None, None]  # of 16 tokens one GPU is unknown
    verdicts = {(*g.ranks, g.quantity): (g.ratio, g.limit, g.ok) for _, g in ranks_page.growths(found("cuda")["rings"])}
    assert verdicts[4, 1, "dk"] == (1.2, 1.35, True)
    assert verdicts[4, 2, "dk"] == (1.2, 1.1, False)
    assert verdicts[2, 1, "dk"] == (1.0, 1.45, True)


def test_the_page_says_what_is_and_what_is_not() -> None:
    text = ranks_page.page("NAME", found("cuda"))
    for line in (
        "| native_math | 8 | 4 | ringtrue ulysses4 | 25.00 | 0.800 | 0.000 |  | 3.0 | 3.0e-03 |  |",
        "| native_math | 8 | 4 | torch ring4 |  |  |  |  |  |  | no / such call |",
        "| native_math | 4 | 2 | dk | 1.200 | 1.1 | NO |",
        "- 4 ranks, native_math: why",
        "Demo: not run.",
    ):
        assert line in text.splitlines(), line
    assert "FSDP2" in text
    assert "of no worth" not in text
    assert "NAME.svg" not in text
    assert "](NAME.svg)" in ranks_page.page("NAME", found("cuda"), picture=True)
    assert "of no worth" in ranks_page.page("NAME", found("cpu"))


def test_the_plot_is_of_gpus_alone() -> None:
    drawing = ranks_plot.draw(found("cuda"))
    assert drawing.count("<circle") == 2
    assert {ranks_plot.kind(way) for n in (2, 4, 8) for way in ranks_work.ways(n)} == set(ranks_plot.COLOURS)
    with pytest.raises(ValueError, match="nothing to draw"):
        ranks_plot.draw(found("cpu"))


def script() -> Any:
    spec = importlib.util.spec_from_file_location("ranks", VERIFIED / "ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeCrew:
    """Processes that end when they try torch's call of 8 tokens."""

    ranks, device = 2, "cpu"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def run(self, fn: str, args: tuple[Any, ...], on_news: Any) -> None:
        _, lengths, *_, names, _ = args
        self.asked.append((lengths, names))
        for n in lengths:
            for name in (ranks_page.ONE, *names):
                on_news(fn, {"tokens": n, "trying": name})
                if (n, name) == (8, "torch ring2"):
                    raise WorkerError("failed in worker 1\nTraceback ...\n  File\nOSError: gone")
            rows = [{"tokens": n, "way": name, "ms": 1.0} for name in (ranks_page.ONE, *names)]
            on_news(fn, {"tokens": n, "rows": rows})


def test_a_way_that_ends_the_processes_is_left_out() -> None:
    asked = argparse.Namespace(lengths=[16, 8, 4], heads=1, dim=8, repetitions=1)
    crew = FakeCrew()
    rows = [row for rows in script().speed(crew, asked, BACKEND) for row in rows]
    assert [lengths for lengths, _ in crew.asked] == [(4, 8, 16), (8, 16)]
    assert "torch ring2" not in crew.asked[1][1]
    errors = {row["tokens"]: row["error"] for row in rows if "error" in row}
    assert errors == {8: "failed in worker 1; OSError: gone", 16: "as above"}
    assert {row["tokens"] for row in rows if row.get("efficiency") == 0.5} == {4, 8, 16}
