"""What every rank of ranks.py does: random calls, the ring law's problem, and calls that are timed beside others'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

sys.path[:0] = [str(Path(__file__).parents[3] / "tests" / "parallel")]

from draws import CHANCES, build, confirmed, joined, play  # noqa: E402
from recipes import Recipe, recipe  # noqa: E402
from rings import errors, off, problems  # noqa: E402

import ringtrue as rt  # noqa: E402
from ringtrue.audit.subject import Ranks  # noqa: E402
from ringtrue.bench.pair import TORCH  # noqa: E402
from ringtrue.bench.timing import Work, extra_peak, in_turn  # noqa: E402
from ringtrue.cli.demo.settings import Mode, parse_mode  # noqa: E402
from ringtrue.cli.worker import Job  # noqa: E402
from ringtrue.parallel.comm import Comm, Groups  # noqa: E402
from ringtrue.parallel.parcel import describe, payload  # noqa: E402

BF16 = torch.bfloat16
ONE = "one GPU"
Attend = Callable[..., Any]  # q, k, v of one rank -> out
LEAST_S = 0.1  # of a measurement: ranks leave the exchange before it some 0.1 ms apart


def modes(ranks: int) -> list[Mode]:
    """Every way to split so many ranks that is asked for."""
    mixed = [Mode(2, ranks // 2), Mode(ranks // 2, 2)] if ranks >= 4 else []
    return list(dict.fromkeys([Mode(ranks, 1), Mode(1, ranks), *mixed]))


class Together:
    """What the ranks of a job tell each other beside what is measured: over gloo, whatever else they use."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")

    def all(self, own: Any) -> list[Any]:
        """Every rank's, in rank order."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self.group)
        return found

    def most(self, own: float) -> float:
        """The largest of all ranks."""
        value = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return float(value)


# random calls


def chosen(mode: Mode, count: int, **limits: Any) -> list[Recipe]:
    """The first `count` random problems of one mode, by seed."""
    found: list[Recipe] = []
    seed = 0
    while len(found) < count:
        told = recipe(Random(seed), worlds=[mode.ranks], dtypes=["bfloat16"], **limits)
        found += [told] if (told.ulysses, told.ring) == (mode.ulysses, mode.ring) else []
        seed += 1
    return found


def tally(told: Sequence[Recipe]) -> dict[str, int]:
    """How many of them have uneven lengths, and heads that Ulysses cannot divide."""
    uneven = sum(len({*t.q}) > 1 or len({*(t.k or t.q)}) > 1 for t in told)
    return {"uneven": uneven, "undivided": sum(t.kv_heads * t.group % t.ulysses > 0 for t in told)}


def draws(job: Job, backend: str, mode: Mode, count: int) -> None:
    """`count` random calls of one backend in one mode; reports the row again after each."""
    together = Together()
    claims = next(s.claims for s in rt.backends() if (s.name, s.device) == (backend, job.device.type))
    told = chosen(mode, count, backends=[backend], claims=claims)
    row: dict[str, Any] = {"mode": mode.name, "asked": count, "right": 0, "wrong": 0, "refused": 0, "by_chance": 0}
    row |= {**tally(told), "told": []}
    for problem in map(build, told):
        before = len(CHANCES)
        try:
            failed = confirmed(problem, lambda tried: together.all(play(None, tried, device=job.device)))
            row["wrong" if failed else "right"] += 1
        except rt.UnsupportedError as error:  # ranks refuse together
            failed = [str(error)]
            row["refused"] += 1
        row["by_chance"] += len(CHANCES) - before
        row["told"] += [f"{problem}: {'; '.join(failed)}"] if failed else []
        job.report(row)


# the ring law


def rings(job: Job, backend: str) -> None:
    """Errors of one rank alone and of a ring of all, six seeds; reports one row."""
    together, pair = Together(), rt.op_pair(backend, job.device.type)
    # in-process ranks are threads, and a thread's own GPU is the first
    one = together.all(None if job.rank else errors(pair, 1, BF16, str(job.device)))[0]
    found = []
    for problem in problems(job.world, BF16, backend):
        results = together.all(play(None, problem, device=job.device))
        found.append(joined(results, problem))
    job.report({"arithmetic": pair.claims.arithmetic, "one": one, "errors": off(found, BF16)})


# speed


class Way(NamedTuple):
    """A call (B, S, H, D) of this rank's tokens; what its measurements are to be inside of; our context, if it is."""

    attend: Attend
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    context: rt.ContextParallel | None = None


def ways(ranks: int) -> list[str]:
    """Everything that is compared: whose, and in which mode."""
    theirs = [f"diffusers {mode.name}" for mode in modes(ranks)[:2]]
    return [*(f"ringtrue {mode.name}" for mode in modes(ranks)), *theirs, f"torch ring{ranks}"]


def way(job: Job, backend: str, name: str) -> Way:
    """Raises where the library has no such call."""
    library, mode = name.split()
    return {"ringtrue": ours, "diffusers": diffusers, "torch": torchs}[library](job, backend, parse_mode(mode))


def ours(job: Job, backend: str, mode: Mode) -> Way:
    """Equal lengths are declared, as the others take them for granted."""
    config = rt.ContextParallelConfig(mode.ulysses, mode.ring, lengths="equal", timeout=job.timeout)
    cp = rt.ContextParallel(config)
    return Way(partial(rt.attention, backend=backend, parallel=cp), context=cp)


def diffusers(job: Job, backend: str, mode: Mode) -> Way:
    """Its dispatcher, under what `enable_parallelism` makes."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    from ringtrue.subjects.diffusers.parallel import config_of

    if backend not in TORCH:
        raise NotImplementedError(f"no {backend} from an installed package under context parallelism")
    config = config_of(Ranks(mode.ulysses, mode.ring), job.device)
    own = AttentionBackendName(f"_{backend}")
    return Way(lambda q, k, v: dispatch_attention_fn(q, k, v, backend=own, parallel_config=config))


def torchs(job: Job, backend: str, mode: Mode) -> Way:
    """torch.distributed.tensor.experimental.context_parallel, as it is by default but for the balance of causal."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    if backend not in TORCH:
        raise NotImplementedError(f"F.scaled_dot_product_attention has no {backend}")
    mesh = dist.device_mesh.init_device_mesh(job.device.type, (mode.ring,))
    _attention._cp_options.enable_load_balance = False  # else it refuses what is not causal

    @contextmanager
    def around() -> Iterator[None]:
        sharded = torch.zeros(2 * mode.ring, device=job.device)  # it needs one
        kernel = sdpa_kernel([TORCH[backend]])
        with kernel, context_parallel(mesh, buffers=[sharded], buffer_seq_dims=[0]):
            yield

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(*seen).transpose(1, 2)  # looked up: it is replaced

    return Way(attend, around)


class Counted:
    """A communicator that counts the bytes it sends to others."""

    def __init__(self, comm: Comm) -> None:
        self.name, self.rank, self.size, self.bytes, self._comm = comm.name, comm.rank, comm.size, 0, comm

    def exchange(self, parcels: Sequence[Any], forms: Sequence[Any], device: torch.device) -> Any:
        self.bytes += sum(payload(describe(parcel)) for to, parcel in enumerate(parcels) if to != self.rank)
        return self._comm.exchange(parcels, forms, device)

    def shift(self, parcel: Any, to: int | None, *rest: Any, **more: Any) -> Any:
        self.bytes += payload(describe(parcel)) if to is not None and to != self.rank else 0
        return self._comm.shift(parcel, to, *rest, **more)


def sent(cp: rt.ContextParallel, call: Work) -> int:
    """Bytes that this rank sends in one call, headers left out; counted where they are sent."""
    whole = cp.groups
    counted = [Counted(comm) for comm in whole[:3]]
    cp.groups = Groups(*counted, whole.header)
    try:
        call()
    finally:
        cp.groups = whole
    return sum(comm.bytes for comm in counted)


def speed(
    job: Job, backend: str, lengths: Sequence[int], heads: int, dim: int, names: Sequence[str], repetitions: int
) -> None:
    """Forward and backward of (1, S, heads, dim) in every way, in turn; reports what is tried, and the rows of an S.

    repetitions  0: nothing is timed
    """
    together, made = Together(), dict[str, Way]()
    for length in lengths:
        rows, works = _tried(job, together, backend, (1, length, heads, dim), names, made)
        job.report({"tokens": length, "trying": ""})
        around = {name: one.around for name, one in made.items()}
        times = {}
        if works and repetitions:
            times = in_turn(works, job.device.type, repetitions, LEAST_S, together.most, around, warm_up=1)
        for name, found in times.items():
            figures = {"ms": found.median * 1e3, "spread": found.spread, "calls": found.calls}
            rows[name] |= {**figures, "seconds": found.seconds}
        job.report({"tokens": length, "rows": list(rows.values())})
        del works  # and the tensors they hold


def _tried(
    job: Job, together: Together, backend: str, shape: tuple[int, ...], names: Sequence[str], made: dict[str, Way]
) -> tuple[dict[str, dict[str, Any]], dict[str, Work]]:
    """Each way once: its row with what any rank saw at most, or the first error; and what is to be timed."""
    draw = torch.Generator(job.device).manual_seed(0)
    whole = [torch.randn(shape, generator=draw, device=job.device, dtype=BF16) for _ in range(4)]
    mine = _share(job, whole)
    alone = Way(partial(rt.attention, backend=backend, parallel=False))
    right: list[Tensor] = []
    rows: dict[str, dict[str, Any]] = {}
    works: dict[str, Work] = {}
    for name in (ONE, *names):
        job.report({"tokens": shape[1], "trying": name})
        error, seen = "", {}
        try:
            if name == ONE:  # rank 0 works alone, but all ranks know its results
                right = _share(job, results(alone.attend, whole))
                works[name] = (lambda: None) if job.rank else _work(alone.attend, whole)
                seen = _seen(job, alone, works[name], [], [])
            else:
                made[name] = made.get(name) or way(job, backend, name)
                works[name] = _work(made[name].attend, mine)
                with made[name].around():
                    seen = _seen(job, made[name], works[name], results(made[name].attend, mine), right)
        except Exception as raised:  # what a library says of a call is its row
            error = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
        everybody = together.all((error, seen))
        rows[name] = {"tokens": shape[1], "way": name, **agreed(everybody)}
        if "error" in rows[name]:
            works.pop(name, None)
    return rows, works


def agreed(everybody: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, Any]:
    """The largest of each figure over the ranks; or the first error, by rank."""
    for rank, (error, _) in enumerate(everybody):
        if error:
            return {"error": f"rank {rank}: {error}"}
    return {key: max(seen[key] for _, seen in everybody) for key in everybody[0][1]}


def _seen(job: Job, made: Way, call: Work, found: Sequence[Tensor], right: Sequence[Tensor]) -> dict[str, float]:
    """What this rank sees of a call: the worst of out and the gradients against one GPU's, bytes sent, extra memory."""
    seen = {}
    if found:
        off_by = ((x.float() - ref.float()).norm() / ref.float().norm() for x, ref in zip(found, right, strict=True))
        seen["difference"] = max(map(float, off_by))
    if made.context is not None:
        seen["sent_mb"] = sent(made.context, call) / 1e6
    peak = extra_peak(call, job.device.type)
    return seen if peak is None else {**seen, "extra_mb": peak / 1e6}


def _share(job: Job, whole: Sequence[Tensor]) -> list[Tensor]:
    """A rank's own tokens, contiguous and as many for all, as the other libraries cut them."""
    return [x.chunk(job.world, dim=1)[job.rank].clone() for x in whole]


def results(attend: Attend, given: Sequence[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of q, k, v and the upstream gradient."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def _work(attend: Attend, given: Sequence[Tensor]) -> Work:
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, given[3])
