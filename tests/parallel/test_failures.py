"""A rank that goes its own way, raises, stalls or is killed: every other rank raises, in time. Real processes.

What ranks may pass differently to one call is in test_refusals.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from gloo import Failure, Pool
from ringtrue.parallel import context as parallel_context
from ringtrue.parallel.comm import TorchComm

TIMEOUT = 3.0  # of a context
WITHIN = 10.0  # every rank has raised; where nothing happened, the pool would say so after 60
LOST = 1  # the rank that does something else
DEGREES = {"ulysses": (4, 1), "ring": (1, 4), "both": (2, 2)}
Told = tuple[str, float]  # "ErrorType: text", or "nothing raised", and after how many seconds


def context(ulysses: int, ring: int, **options: object) -> rt.ContextParallel:
    return rt.ContextParallel(rt.ContextParallelConfig(ulysses, ring, timeout=TIMEOUT, **options))  # type: ignore[arg-type]


def tensors(length: int = 3, heads: int = 4, seed: int = 0) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn((2, length, heads, 8), generator=numbers, requires_grad=True) for _ in "qkv"]


def told(act: Callable[[], object]) -> Told:
    """What `act` raised on this rank."""
    start = monotonic()
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}", monotonic() - start
    return "nothing raised", monotonic() - start


def check(results: list[Told], kind: str, said: str, own: str = "", own_said: str = "") -> None:
    """Every rank raised in time: `kind` with `said`; the lost rank `own`, where that is given."""
    for rank, (text, seconds) in enumerate(results):
        lost = bool(own) and rank == LOST
        assert text.startswith(own if lost else kind), (rank, text)
        assert (own_said if lost else said) in text, (rank, text)
        assert seconds < WITHIN, (rank, seconds)


# ---- a rank that does something else


def another_call(cp: rt.ContextParallel, lost: bool, how: str) -> None:
    q, k, v = tensors()
    with cp:
        if how == "grad mode":
            with torch.set_grad_enabled(not lost):
                rt.attention(q, k, v)
        elif how == "gather against attention":
            cp.gather(q, 1) if lost else rt.attention(q, k, v)
        elif how == "one call fewer":
            for _ in range(2 if lost else 3):
                q = rt.attention(q, k, v)
            cp.gather(q, 1)
        elif how == "own mistake":
            rt.attention(q, k, v[:, :2] if lost else v)
        elif how == "not a context":
            rt.attention(q, k, v, parallel="cp" if lost else None)  # type: ignore[arg-type]
        elif how == "a backend that does not exist":
            rt.attention(q, k, v, backend="native_mth" if lost else None)
        elif how == "user code":
            q = rt.attention(q, k, v)
            if lost:
                raise ZeroDivisionError("an empty batch")
            rt.attention(q, k, v)
        elif how == "nothing but user code":
            if lost:
                raise ZeroDivisionError("an empty batch")
            rt.attention(q, k, v)
        elif how == "user code, wrapped":
            try:
                rt.attention(q, k, v[:, :2] if lost else v)
            except rt.ArgumentError as error:
                raise RuntimeError("in my model") from error


ANOTHER = {
    "grad mode": ("DisagreementError", "rank 1: grad mode off"),
    "gather against attention": ("DisagreementError", "what: ranks 0,2-3 attention, rank 1 gather"),
    "one call fewer": ("DisagreementError", "what: ranks 0,2-3 attention, rank 1 gather"),
    "own mistake": (
        "PeerError",
        "rank 1: ArgumentError: key and value differ",
        "ArgumentError",
        "key and value differ",
    ),
    "not a context": ("PeerError", "rank 1: ArgumentError: parallel is not a context", "ArgumentError", "value:  'cp'"),
    "a backend that does not exist": ("PeerError", "rank 1: ArgumentError", "ArgumentError", "native_mth"),
    "user code": ("PeerError", "rank 1: ZeroDivisionError: an empty batch", "ZeroDivisionError", "an empty batch"),
    "user code, wrapped": ("PeerError", "rank 1: ArgumentError: key and value", "RuntimeError", "in my model"),
}


def other_calls(rank: int, world: int, degrees: tuple[int, int]) -> list[Told]:
    """All of them in one context: such an error leaves it usable."""
    cp = context(*degrees)
    found = [told(partial(another_call, cp, rank == LOST, how)) for how in ANOTHER]
    with cp:
        found.append(told(lambda: rt.attention(*tensors()).sum().backward()))
    return found


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
def test_a_rank_that_does_something_else_is_named_on_every_rank(pool: Pool, degrees: tuple[int, int]) -> None:
    results = pool.run(other_calls, 4, degrees)
    for i, how in enumerate(ANOTHER):
        check([ranks[i] for ranks in results], *ANOTHER[how])
    assert {ranks[-1][0] for ranks in results} == {"nothing raised"}


def raise_everywhere(rank: int, world: int) -> list[Told]:
    """The same exception on all ranks, and one that nobody waits for: neither costs the others a call."""
    cp = context(2, 1)

    def fail(here: bool) -> None:
        with cp:
            if here:
                raise ZeroDivisionError

    found = [told(partial(fail, True))]
    with cp:
        found.append(told(lambda: rt.attention(*tensors())))
    return found


def test_an_exception_on_all_ranks_leaves_the_context_usable(pool: Pool) -> None:
    for raised, after in pool.run(raise_everywhere, 2):
        assert raised[0].startswith("ZeroDivisionError")
        assert after[0] == "nothing raised"


def come_late(rank: int, world: int, over: Path) -> list[Told]:
    """The others reach their next header only after rank 1 gave up waiting for them, and caught its exception."""
    cp = context(2, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_context, "GRACE", 0.2)
        if rank != LOST:
            stall(over, 1)
        found = [told(partial(another_call, cp, rank == LOST, "nothing but user code"))]
    (over / str(rank)).touch()
    with cp:
        found.append(told(lambda: rt.attention(*tensors()).sum().backward()))
    return found


def test_an_exception_reaches_ranks_that_come_late(pool: Pool, tmp_path: Path) -> None:
    (late, after), (own, own_after) = pool.run(come_late, 2, tmp_path)
    assert late[0].startswith("PeerError")
    assert "rank 1: ZeroDivisionError: an empty batch" in late[0]
    assert own[0].startswith("ZeroDivisionError")
    assert after[0] == own_after[0] == "nothing raised"


def declare(rank: int, world: int, degrees: tuple[int, int], kind: str) -> Told:
    """Rank 1 holds 4 tokens; the others believe 3, and were told so by nobody."""
    lost = rank == LOST
    lengths = [3, 4, 3, 3] if lost and kind != "wrong on its own rank" else [3] * 4
    cp = context(*degrees, lengths="equal" if kind == "equal" else "exchange")
    call = cp if kind == "equal" else cp.call(lengths, lengths)
    return told(lambda: rt.attention(*tensors(3 + lost), parallel=call).sum().backward())


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("kind", ["wrong on its own rank", "unlike the others'", "equal"])
def test_other_declared_lengths(pool: Pool, degrees: tuple[int, int], kind: str) -> None:
    """gloo by itself ends a process that gets more bytes than it expects, and fills a part where it gets fewer."""
    results = pool.run(declare, 4, degrees, kind)
    if kind == "wrong on its own rank":
        check(results, "CommunicationError", "a peer did not take part", "ArgumentError", "other lengths than declared")
    else:
        check(results, "CommunicationError", "lengths that were declared must be alike on all ranks")
    assert any("bytes were to come from rank" in text for text, _ in results)


# ---- faults in the above


def with_a_fault(rank: int, world: int, fault: str) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "an exception is not told":
            patch.setattr(rt.ContextParallel, "_tell", lambda self, error: None)
            return told(partial(another_call, context(2, 1), rank == LOST, "user code"))
        patch.setattr(TorchComm, "_tag", lambda self, direction, peer, tag, size: tag)
        return told(lambda: rt.attention(*tensors(3 + rank), parallel=context(2, 1, lengths="equal")))


def test_a_rank_that_tells_nobody_is_seen(pool: Pool) -> None:
    results = pool.run(with_a_fault, 2, "an exception is not told")
    with pytest.raises(AssertionError):
        check(results, *ANOTHER["user code"])


def test_why_sizes_are_in_tags(pool: Pool) -> None:
    """gloo by itself ends the process that is sent more than it expects."""
    results = pool.run(with_a_fault, 2, "sizes are in no tag", check=False)
    assert isinstance(results[0], Failure)
    assert results[0].text == str(-signal.SIGABRT)


# ---- a rank that stalls or is killed

PLACES = ("before the header", "between header and payload", "in backward")
LOSSES = [("both", place) for place in PLACES] + [("ulysses", PLACES[1]), ("ring", PLACES[1])]


def intercept(patch: pytest.MonkeyPatch, header: bool, act: Callable[[], None]) -> None:
    """This rank acts before its next header, or its next payload."""

    def acting(go_on: Callable[..., object]) -> Callable[..., object]:
        def first(comm: TorchComm, *args: object, **named: object) -> object:
            if comm.name.startswith("header") == header:
                act()
            return go_on(comm, *args, **named)

        return first

    patch.setattr(TorchComm, "exchange", acting(TorchComm.exchange))
    patch.setattr(TorchComm, "shift", acting(TorchComm.shift))


def step(cp: rt.ContextParallel, place: str, act: Callable[[], None] | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if act is not None and place != PLACES[2]:
            intercept(patch, place == PLACES[0], act)
        out = rt.attention(*tensors(), parallel=cp)
        if act is not None and place == PLACES[2]:
            intercept(patch, False, act)
        out.sum().backward()


def lose(rank: int, world: int, degrees: tuple[int, int], place: str, act: Callable[[], None], over: Path) -> Told:
    cp = context(*degrees)
    step(cp, "nowhere", None)
    found = told(lambda: step(cp, place, act if rank == LOST else None))
    (over / str(rank)).touch()
    return found


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall(over: Path, others: int) -> None:
    """Until all others have given up."""
    while len(list(over.iterdir())) < others:
        sleep(0.05)


@pytest.mark.parametrize(("degrees", "place"), LOSSES)
def test_a_killed_rank(pool: Pool, degrees: str, place: str, tmp_path: Path) -> None:
    results = pool.run(lose, 4, DEGREES[degrees], place, kill, tmp_path, check=False)
    killed = results.pop(LOST)
    assert isinstance(killed, Failure)
    assert killed.text == str(-signal.SIGKILL)
    check(results, "CommunicationError", "a peer did not take part")


@pytest.mark.parametrize(("degrees", "place"), LOSSES)
def test_a_stalled_rank(pool: Pool, degrees: str, place: str, tmp_path: Path) -> None:
    results = pool.run(lose, 4, DEGREES[degrees], place, partial(stall, tmp_path, 3), tmp_path)
    results.pop(LOST)
    check(results, "CommunicationError", f"timeout {TIMEOUT:g} s")


def leave(rank: int, world: int) -> Told:
    cp = context(2, 2)
    if rank == LOST:
        raise ZeroDivisionError("nobody is told: no scope, and the process goes on")
    return told(lambda: rt.attention(*tensors(), parallel=cp))


def test_a_rank_that_raises_outside_of_any_scope(pool: Pool) -> None:
    results = pool.run(leave, 4, check=False)
    assert results.pop(LOST).type_name == "ZeroDivisionError"
    check(results, "CommunicationError", "a peer did not take part")


# ---- calls that interleave, sizes that change

MODELS = (4, 6)  # heads


def outputs(order: str, cps: list[rt.ContextParallel], at_once: bool) -> dict[str, list[Tensor]]:
    """Out and gradients of models A and B, whose forwards run in this order; backwards run after all, or after each."""
    outs, found = {}, {}
    for name in order:
        model = "AB".index(name)
        q, k, v = tensors(10, MODELS[model], model)
        cp = cps[model % len(cps)]
        out = cp.gather(rt.attention(*(cp.shard(x, 1) for x in (q, k, v)), is_causal=name == "B", parallel=cp), 1)
        outs[name] = out, (q, k, v)
        if at_once:
            found[name] = [out, *torch.autograd.grad(cp.loss(out.square().sum()), (q, k, v))]
    for name, (out, inputs) in outs.items() if not at_once else ():
        cp = cps["AB".index(name) % len(cps)]
        found[name] = [out, *torch.autograd.grad(cp.loss(out.square().sum()), inputs)]
    return found


def interleaved(rank: int, world: int, contexts: int) -> dict[str, list[Tensor]]:
    cps = [context(2, 2), context(4, 1)][:contexts]
    alone = {**outputs("A", cps, True), **outputs("B", cps, True)}
    for order in ("AB", "BA"):
        for name, values in outputs(order, cps, False).items():
            assert all(torch.equal(a, b) for a, b in zip(values, alone[name], strict=True)), (order, name)
    return {name: [x.detach() for x in values] for name, values in alone.items()}


@pytest.mark.parametrize("contexts", [1, 2])
def test_two_models_interleave(pool: Pool, contexts: int) -> None:
    results = pool.run(interleaved, 4, contexts)
    for model, name in enumerate("AB"):
        q, k, v = tensors(10, MODELS[model], model)
        out = rt.attention(q, k, v, is_causal=name == "B")
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        torch.testing.assert_close(results[0][name][0], out.detach())
        for i, grad in enumerate(grads):
            torch.testing.assert_close(sum(ranks[name][1 + i] for ranks in results), grad)


def interleaved_otherwise(rank: int, world: int, contexts: int) -> Told:
    cps = [context(2, 2), context(4, 1)][:contexts]
    return told(lambda: outputs("BA" if rank == LOST else "AB", cps, False))


@pytest.mark.parametrize(
    ("contexts", "kind", "said"),
    [(1, "DisagreementError", "heads: ranks 0,2-3 4, rank 1 6"), (2, "CommunicationError", "timeout 3 s")],
)
def test_two_models_in_another_order_on_one_rank(pool: Pool, contexts: int, kind: str, said: str) -> None:
    """An error on every rank, never one model's tensors in the other's call."""
    check(pool.run(interleaved_otherwise, 4, contexts), kind, said)


LENGTHS = (1, 7, 4, 64, 3, 2, 19, 8, 0, 33, 5, 12)


def many_lengths(rank: int, world: int, degrees: tuple[int, int]) -> list[list[Tensor]]:
    """Calls of every length one after another, then in another order: the same numbers, bit by bit."""
    cp = context(*degrees)

    def run(length: int) -> list[Tensor]:
        q, k, v = (cp.shard(x, 1).detach().requires_grad_() for x in tensors(length))
        out = rt.attention(q, k, v, parallel=cp)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    first = {length: run(length) for length in LENGTHS}
    for length in sorted(LENGTHS, key=lambda n: (n * 7) % 13):
        assert all(torch.equal(a, b) for a, b in zip(run(length), first[length], strict=True)), length
    return list(first.values())


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
def test_no_memory_of_sizes(pool: Pool, degrees: tuple[int, int]) -> None:
    results = pool.run(many_lengths, 4, degrees)
    for i, length in enumerate(LENGTHS):
        q, k, v = tensors(length)
        out = rt.attention(q, k, v)
        expected = [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
        for j, whole in enumerate(expected):
            torch.testing.assert_close(torch.cat([ranks[i][j] for ranks in results], 1), whole, msg=f"{length}")
