"""The ring law's problem: 16-bit, Gaussian, non-causal, S = 512, equal shards, on 1, 2 and 16 in-process ranks.

python tests/parallel/rings.py      writes docs/measured/ring-law.md: all errors, on 4 and 8 ranks too
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from draws import Draw, on_twin

import ringtrue as rt
from ringtrue.audit.inputs import Inputs
from ringtrue.audit.judge import relative_errors, truth_of
from ringtrue.audit.laws import Growth, ring_law
from ringtrue.audit.rule import RULE
from ringtrue.audit.truth import Quantities, Truth
from ringtrue.contract import Mask, OpPair, Options, Wanted

SEEDS = range(6)
LENGTH, HEADS, DIM = 512, 2, 64


@cache
def gaussian(seed: int, dtype: torch.dtype, length: int = LENGTH) -> Inputs:
    numbers = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (torch.randn((2, length, HEADS, DIM), generator=numbers).to(dtype) for _ in range(4))
    return Inputs(q, k, v, Mask(), Options(scale=DIM**-0.5, return_lse=True), grad_out, None, Wanted(True, True, True))


@cache
def exact(seed: int, dtype: torch.dtype) -> Truth:
    return truth_of(gaussian(seed, dtype))


def problems(ranks: int, dtype: torch.dtype, backend: str = "auto") -> list[Draw]:
    """One a seed, over a ring of `ranks`."""
    lengths = (LENGTH // ranks,) * ranks
    return [Draw((1, ranks), lengths, lengths, gaussian(seed, dtype), backend=backend) for seed in SEEDS]


def off(found: Sequence[Quantities], dtype: torch.dtype) -> list[dict[str, float]]:
    """Per seed, the relative errors of out, dq, dk and dv."""
    return [relative_errors(got, exact(seed, dtype)) for seed, got in zip(SEEDS, found, strict=True)]


def errors(pair: OpPair, ranks: int, dtype: torch.dtype, device: str = "cpu") -> list[dict[str, float]]:
    """Those of a pair over a ring of `ranks`, in-process."""
    return off([on_twin(problem, pair, device) for problem in problems(ranks, dtype)], dtype)


@cache
def right(pair: OpPair, ranks: int, dtype: torch.dtype, device: str = "cpu") -> list[dict[str, float]]:
    """The errors of the unbroken ring, computed once for all tests of a process."""
    return errors(pair, ranks, dtype, device)


def growths(
    pair: OpPair, dtype: torch.dtype, sixteen: list[dict[str, float]] | None = None, device: str = "cpu"
) -> list[Growth]:
    """The ring law's verdicts; `sixteen` replaces the errors at 16 ranks (those of a mutant)."""
    one, two = right(pair, 1, dtype, device), right(pair, 2, dtype, device)
    return ring_law(one, two, sixteen or right(pair, 16, dtype, device), pair.claims.arithmetic)


TABLE = Path(__file__).parents[2] / "docs" / "measured" / "ring-law.md"
HEAD = """# Errors of a ring against those of one device

Each number is an error against float64, divided by the error of the same kernel on one device: the worst of six seeds.
bfloat16, Gaussian, non-causal, 512 tokens, 2 heads of 64, equal shards, in-process ranks, torch {torch}.
The law limits {limits}.
`python tests/parallel/rings.py` makes this page; the tests hold the law at 2 and 16 ranks.

| kernel | quantity | 2 ranks | 4 | 8 | 16 |
| -- | -- | -- | -- | -- | -- |
"""


def page() -> str:
    """The table as a page."""
    pairs = [rt.op_pair(s.name, s.device) for s in rt.backends() if s.device == "cpu" and s.unavailable is None]
    limits = "; ".join(
        f"a kernel of {arithmetic} arithmetic to {law.two_to_one} at 2 ranks and {law.sixteen_to_one} at 16"
        for arithmetic, law in RULE.ring.items()
    )
    rows = []
    for pair in pairs:
        one = right(pair, 1, torch.bfloat16)
        found = {ranks: right(pair, ranks, torch.bfloat16) for ranks in (2, 4, 8, 16)}
        for name in ("out", "dq", "dk", "dv"):
            worst = [max(a[name] / b[name] for a, b in zip(e, one, strict=True)) for e in found.values()]
            rows.append(f"| {pair.name} | {name} | " + " | ".join(f"{x:.2f}" for x in worst) + " |")
    return HEAD.format(torch=torch.__version__.split("+")[0], limits=limits) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    TABLE.write_text(page(), encoding="utf-8")
    print(TABLE.read_text("utf-8"))
