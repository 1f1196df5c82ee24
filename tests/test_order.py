"""What `auto` tries is data: measured names with their page, told in explain, the same on ranks that cannot talk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import backend_of, qkv, unreachable
from calls import one_thread as one_thread
from ringtrue import api, order, prepared, select
from ringtrue.contract import Backend, Facts, Package, Reason
from ringtrue.order import ROWS, Row
from ringtrue.parallel import agreement
from ringtrue.parallel.context import DeclaredCall
from ringtrue.parallel.twin import Rank, World

ROOT = Path(__file__).parent.parent
PLAIN = Facts("cpu", torch.float32, batch=2, q_len=6, k_len=5, heads=4, kv_heads=4, head_dim=8, value_dim=8)
OFF = "tuned: switched off by RINGTRUE_TUNED"  # as it is in all tests
TOUCHED = Reason("broken", "its package is broken")


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    prepared.forget()
    yield
    prepared.forget()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_names_backends_of_its_device_and_the_page_that_measured_them(row: Row) -> None:
    pairs = {b.name: b.pairs for b in select.REGISTRY}
    assert all(row.device in pairs[name] for name in row.names)
    assert len(set(row.names)) == len(row.names)
    figures = (ROOT / row.page).read_text("utf-8")
    for name in row.names:  # the last takes what no other does, however slow
        assert f"| {name} |" in figures or name == row.names[-1] == "native_math"


def test_every_kind_of_device_has_an_order_for_every_call() -> None:
    for device in {row.device for row in ROWS}:
        last = [row for row in ROWS if row.device == device][-1]
        assert last == Row(device, last.names, last.page, last.on)
    assert order.declared(replace(PLAIN, device="npu")).names == ()


def test_on_other_gpus_nothing_but_what_every_torch_has() -> None:
    facts = replace(PLAIN, device="cuda", dtype=torch.bfloat16)
    names = {name for c in (None, (8, 0), (12, 0)) for name in order.declared(replace(facts, capability=c)).names}
    assert all(not b.packages for b in select.REGISTRY if b.name in names)


@pytest.mark.parametrize(
    ("row", "facts", "holds"),
    [
        (Row("cpu", (), "", ""), {}, True),
        (Row("cuda", (), "", ""), {}, False),
        (Row("cuda", (), "", "", capability=(9, 0)), {"device": "cuda", "capability": (9, 0)}, True),
        (Row("cuda", (), "", "", capability=(9, 0)), {"device": "cuda", "capability": (8, 0)}, False),
        (Row("cuda", (), "", "", capability=(9, 0)), {"device": "cuda"}, False),
        (Row("cpu", (), "", "", at_least=30), {}, True),
        (Row("cpu", (), "", "", at_least=31), {}, False),
        (Row("cpu", (), "", "", causal=True), {}, False),
        (Row("cpu", (), "", "", causal=True), {"causal": 0}, True),
        (Row("cpu", (), "", "", causal=False), {"causal": 0}, False),
        (Row("cpu", (), "", "", masked=True), {"mask_kinds": frozenset({"key_keep"})}, True),
        (Row("cpu", (), "", "", masked=False), {"mask_kinds": frozenset({"key_keep"})}, False),
        (Row("cpu", (), "", "", masked=False), {"causal": 0}, True),
    ],
    ids=str,
)
def test_what_a_row_is_for(row: Row, facts: dict[str, Any], holds: bool) -> None:
    assert row.holds(replace(PLAIN, **facts)) is holds


class Symbol:
    """A length that torch traces: whoever compares it has made another graph of it."""

    def __mul__(self, other: object) -> int:
        raise AssertionError("a length was looked at")

    __rmul__ = __mul__


def test_where_lengths_are_symbols_none_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "ROWS", (Row("cpu", ("long",), "", "", at_least=64), Row("cpu", ("short",), "", "")))
    traced = replace(PLAIN, q_len=Symbol(), k_len=Symbol(), mask_kinds=frozenset({"key_keep"}))  # type: ignore[arg-type]
    assert select.preference(traced, alike=True).names == ("long",)
    assert select.preference(PLAIN).names == ("short",)
    with pytest.raises(AssertionError, match="looked at"):
        select.preference(traced)


def put(monkeypatch: pytest.MonkeyPatch, *backends: Backend, names: tuple[str, ...]) -> None:
    for module in (select, api):
        monkeypatch.setattr(module, "REGISTRY", backends)
    monkeypatch.setattr(order, "ROWS", (Row("cpu", names, "a page", "a machine"),))
    select.survey.cache_clear()


@pytest.mark.parametrize(
    "first",
    [
        backend_of(unreachable("first", causal="none")),
        backend_of(unreachable("first", backward=False)),
        backend_of(unreachable("first", deterministic=False)),
        replace(backend_of(unreachable("first")), unavailable=lambda device: TOUCHED),
        replace(backend_of(unreachable("first")), pairs={"cuda": unreachable("first")}),
        backend_of(unreachable("another name")),
    ],
    ids=["does not fit", "no backward", "not deterministic", "broken", "another device", "not there"],
)
def test_the_order_adds_nothing_that_does_not_fit(first: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the order: its first name cannot take the call, and costs no more than its place."""
    put(monkeypatch, backend_of(unreachable("last")), first, names=("first", "last"))
    facts = replace(PLAIN, causal=0, deterministic=True)
    assert [choice.backend for choice in select.fitting("auto", facts)] == ["last"]
    assert rt.explain(*qkv(), is_causal=True, deterministic=True).backend == "last"


def test_an_optional_package_is_looked_for_only_where_the_claims_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    optional = replace(
        backend_of(unreachable("optional", causal="none")), unavailable=asked.append, packages=(Package("nowhere", ""),)
    )
    put(monkeypatch, optional, backend_of(unreachable("last")), names=("optional", "last"))
    assert [c.backend for c in select.fitting("auto", replace(PLAIN, causal=0))] == ["last"]
    assert asked == []
    assert [c.backend for c in select.fitting("auto", PLAIN)] == ["optional", "last"]
    assert asked == ["cpu"]


def test_explain_says_which_order_it_was_and_only_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, backend_of(unreachable("a")), backend_of(unreachable("b")), names=("b", "a"))
    found = rt.explain(*qkv())
    source = f"declared: a page, measured on a machine; {OFF}"
    assert (found.backend, found.order, found.order_from) == ("b", ("b", "a"), source)
    assert f"auto tries: b, a ({source})" in str(found)
    named = rt.explain(*qkv(), backend="a")
    assert (named.backend, named.order, named.order_from) == ("a", (), "")
    assert "auto tries" not in str(named)


BY_LENGTH = (
    Row("cpu", ("native_math", "native_flash"), "", "", at_least=16),
    Row("cpu", ("native_flash", "native_math"), "", ""),
)


def taken(lengths: tuple[int, int], declared: str, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The backend that each of two ranks takes; how many tokens each holds decides which it would like best."""
    found: dict[int, str] = {}
    plan = DeclaredCall.plan

    def noted(self: DeclaredCall, call: Any, choices: Any) -> Any:
        planned = plan(self, call, choices)
        found[self.context.rank] = planned.choice.backend
        return planned

    monkeypatch.setattr(DeclaredCall, "plan", noted)

    def rank(mesh: Rank) -> None:
        config = rt.ContextParallelConfig(
            1, 2, mesh=mesh, timeout=5.0, lengths="equal" if declared == "equal" else "exchange"
        )
        cp = rt.ContextParallel(config)
        q, k, v = qkv(lengths[cp.rank], grad=True)
        parallel = cp.call(lengths, lengths) if declared else cp
        rt.attention(q, k, v, parallel=parallel).sum().backward()

    World(2).run(rank)
    return found


@pytest.mark.parametrize("declared", ["", "lengths", "equal"])
@pytest.mark.parametrize("lengths", [(5, 3), (3, 5)])
def test_ranks_take_one_backend(lengths: tuple[int, int], declared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a header the order is rank 0's; without one no rank looks at its own length."""
    monkeypatch.setattr(order, "ROWS", BY_LENGTH)
    found = taken(lengths, declared, monkeypatch)
    assert found == dict.fromkeys((0, 1), "native_math" if declared or lengths[0] == 5 else "native_flash")


def test_ranks_that_each_take_their_own_first_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the agreement, and that of an order that looks at lengths where nothing is exchanged."""
    monkeypatch.setattr(order, "ROWS", BY_LENGTH)
    settle = agreement.settle

    def own(config: Any, rank: int, said: Any, call: Any, headers: Any) -> Any:
        plan, _ = settle(config, rank, said, call, headers)
        return plan, headers[rank].own["fits"][0]

    with monkeypatch.context() as planted:
        planted.setattr(agreement, "settle", own)
        assert len(set(taken((5, 3), "", planted).values())) == 2
    with monkeypatch.context() as planted:
        planted.setattr(order, "blind", lambda facts: facts)
        assert len(set(taken((5, 3), "lengths", planted).values())) == 2
