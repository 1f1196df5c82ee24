"""Random calls under context parallelism: every rank plays its part, and the whole is judged against the truth.

python tests/parallel/draws.py --draws 5000 --from 0                     through the in-process ranks
python tests/parallel/draws.py --replay '{"ulysses": 2, "q": [3, 0]}'    what a failure printed
torchrun --nproc-per-node 2 tests/parallel/draws.py --device cuda --backend native_flash --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from playing import Result, context, generators, play
from problems import Draw, build, places
from recipes import recipe, reduced, replayed
from torch import Tensor

import ringtrue as rt
from ringtrue.audit.judge import Verdict, judge, truth_of
from ringtrue.audit.truth import Quantities
from ringtrue.audit.yardstick import yardstick
from ringtrue.parallel.twin import World

__all__ = [
    "Draw",
    "Result",
    "build",
    "context",
    "draw",
    "failures",
    "joined",
    "on_ranks",
    "on_twin",
    "play",
    "verdicts",
]


CHANCES: list[Draw] = []  # right with other numbers only


def draw(seed: int, **limits: Any) -> Draw:
    """The problem of a seed; `limits` are those of recipes.recipe."""
    return build(recipe(Random(seed), **limits))


def on_ranks(problem: Draw, backend: object = None, device: torch.device | str = "cpu") -> list[Result]:
    """Every rank's result, through the in-process ranks."""
    with generators():
        return World(problem.size).run(play, problem, backend, device)


def on_twin(problem: Draw, backend: object = None, device: str = "cpu") -> Quantities:
    return joined(on_ranks(problem, backend, device), problem)


def verdicts(results: Sequence[Result], problem: Draw) -> list[Verdict]:
    """Each quantity on its own, against one process in float64; dropout by the mask that was drawn."""
    inputs = problem.inputs
    if inputs.options.dropout_p:
        inputs = replace(inputs, dropout=_rows([r.drawn for r in results], problem, 2, "masks of dropout"))
        problem = replace(problem, inputs=inputs)
    right = truth_of(inputs)
    return judge(joined(results, problem, right.values), right, yardstick(inputs), inputs)


def failures(problem: Draw, backend: object = None, device: str = "cpu") -> list[str]:
    """What is wrong about a problem on the in-process ranks; empty where all is right."""
    return confirmed(problem, lambda tried: on_ranks(tried, backend, device))


def confirmed(problem: Draw, run: Callable[[Draw], Sequence[Result]]) -> list[str]:
    """The verdicts that fail, in 16 bits only if some do with other numbers too.

    The rule compares the worst elements of two roundings; with the few elements here one call in some hundred is beyond
    it by chance, where a part of a gradient is rounded at each of three stops. A fault is there with any numbers.
    """
    failed = [str(v) for v in verdicts(run(problem), problem) if not v.ok]
    told = problem.recipe
    if not failed or told is None or told.dtype in ("float64", "float32"):
        return failed
    others = (build(replace(told, seed=told.seed + 2**16 * n)) for n in (1, 2))
    if any(not v.ok for other in others for v in verdicts(run(other), other)):
        return failed
    CHANCES.append(problem)
    return []


def joined(results: Sequence[Result], problem: Draw, right: Quantities | None = None) -> Quantities:
    """The ranks' results as one: parts of a gradient add up, the outputs of the prefix are equal on all ranks.

    Where a rank did not want a gradient that others did, its place is taken by what is `right`.
    """
    x, ranks = problem.inputs, range(problem.size)
    rows, cols = zip(*(places(problem, rank) for rank in ranks), strict=True)
    bias, rows_of_bias = x.mask.bias, [torch.arange(1)] * problem.size
    if bias is not None and bias.dim() == 4 and bias.shape[2] == x.q.shape[1]:
        rows_of_bias = list(rows)
    by_key = bias is not None and bias.dim() == 2
    table = (
        ("dq", "q", x.q, rows, 1),
        ("dk", "k", x.k, cols, 1),
        ("dv", "v", x.v, cols, 1),
        ("dbias", "b", bias, cols if by_key else rows_of_bias, 1 if by_key else 2),
    )
    grads: dict[str, Tensor] = {}
    for (name, short, like, where, dim), wanted in zip(table, x.wanted, strict=True):
        if not wanted or like is None:
            continue
        total = torch.zeros(like.shape, dtype=torch.float64)
        for rank in ranks:
            part = getattr(results[rank], name)
            assert (part is not None) == problem.wanted(rank, short), f"rank {rank}: {name} wanted and missing, or not"
            if part is None:
                part = getattr(right, name).index_select(dim, where[rank])
            else:
                assert part.dtype == like.dtype, f"rank {rank}: {name} is {part.dtype}"
            total.index_add_(dim, where[rank], part.double())
        grads[name] = total.to(like.dtype)
    out = _rows([r.out for r in results], problem, 1, "outputs")
    return Quantities(out, _rows([r.lse for r in results], problem, 2, "log-sum-exps"), **grads)


def _rows(parts: Sequence[Tensor | None], problem: Draw, dim: int, what: str) -> Any:
    """What belongs to queries, in global order."""
    first = parts[0]
    if first is None:
        return None
    shape = list(first.shape)
    shape[dim] = problem.inputs.q.shape[1]
    whole = first.new_full(shape, torch.nan)
    for rank, part in enumerate(parts):
        assert part is not None
        whole.index_copy_(dim, places(problem, rank)[0], part)
        shared = [x.narrow(dim, 0, problem.prefix) for x in (part, first)]
        assert torch.equal(*shared), f"{what} of the prefix differ between rank 0 and rank {rank}"
    return whole


def over_processes(problem: Draw, device: torch.device) -> list[Result]:
    """The ranks' results under torchrun, on every rank."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, play(None, problem, device=device))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="how many seeds")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--replay", help="the recipe of one problem instead")
    parser.add_argument("--reduce", action="store_true", help="look for a simpler one that fails too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: under torchrun over NCCL")
    parser.add_argument("--backend", help="of every call (default: any that can take it)")
    parser.add_argument("--dtype", action="append", help="of the tensors; may be repeated")
    parser.add_argument("--most", type=int, default=5, help="tokens per rank, at most")
    asked = parser.parse_args(arguments)
    here = [s for s in rt.backends() if s.device == asked.device and s.unavailable is None]
    names = ["auto", *(s.name for s in here)] if asked.device == "cpu" else ["auto"]  # there not all take all masks
    limits: dict[str, Any] = {"backends": [asked.backend] if asked.backend else names}
    limits |= {"dtypes": asked.dtype} if asked.dtype else {}
    limits |= {"claims": next(s.claims for s in here if s.name == asked.backend)} if asked.backend else {}
    device, talks = torch.device(asked.device), True
    ranks: Callable[[Draw], Sequence[Result]] = lambda problem: on_ranks(problem, None, device)
    if asked.device == "cuda" and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        limits["worlds"] = [dist.get_world_size()]
        talks, ranks = dist.get_rank() == 0, lambda problem: over_processes(problem, device)
    run = lambda problem: confirmed(problem, ranks)
    seeds = range(asked.first, asked.first + asked.draws)
    told = [replayed(asked.replay)] if asked.replay else [recipe(Random(s), most=asked.most, **limits) for s in seeds]
    if asked.reduce:
        told = [reduced(t, lambda tried: "wrong" in _one(build(tried), run, talks=False)) for t in told]
    count: Counter[str] = Counter()
    for problem in map(build, told):
        count.update(_one(problem, run, talks))
    if talks:
        print(", ".join(f"{n} {what}" for what, n in count.most_common()))
        print(*(f"with other numbers only: {problem}" for problem in CHANCES), sep="\n", end="\n" * bool(CHANCES))
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(count["wrong"] > 0)


def _one(problem: Draw, run: Callable[[Draw], list[str]], talks: bool) -> Iterator[str]:
    """right, wrong or refused; what is not right is told with its recipe."""
    try:
        found = run(problem)
        word = "wrong" if found else "right"
    except rt.UnsupportedError as error:
        found, word = [str(error)], "refused"
    except Exception as error:
        if dist.is_initialized():
            raise  # what the ranks would do next is not known
        found, word = [f"{type(error).__name__}: {error}"], "wrong"
    if found and talks:
        print(word, problem, *found, sep="\n    ", flush=True)
    yield word


if __name__ == "__main__":
    sys.exit(main())
