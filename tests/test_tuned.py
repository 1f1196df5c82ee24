"""What was measured on this machine: taken where its key matches, told in explain, no crash, alike on all ranks."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import backend_of, qkv, unreachable
from calls import one_thread as one_thread
from ringtrue import api, order, prepared, select, tuned
from ringtrue.contract import Facts
from ringtrue.order import Order, Row
from ringtrue.parallel import agreement
from ringtrue.parallel.context import DeclaredCall
from ringtrue.parallel.twin import Rank, World
from ringtrue.tuned import Found, Measured

PLAIN = Facts("cpu", torch.float32, batch=2, q_len=6, k_len=6, heads=4, kv_heads=4, head_dim=8, value_dim=8)
DECLARED = Order(("a", "b", "c"), "declared: a page, measured on a machine")
SHAPE = Measured("torch.float32", 6, 6, 8, False, ("native_math", "native_flash"))


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file that a process reads which starts now; it is not there yet."""
    path = tmp_path / "cache" / "tuned.json"
    monkeypatch.setenv("RINGTRUE_TUNED", str(path))
    read = tuned.found
    read.cache_clear()
    prepared.forget()
    yield path
    read.cache_clear()
    prepared.forget()


def remember(path: Path, *shapes: Measured) -> None:
    assert tuned.remember(path, "cpu", "2026-12-01", shapes)


def changed(path: Path, **key: Any) -> None:
    """The same file from a machine whose key says this otherwise (None: nothing)."""
    whole = json.loads(path.read_text("utf-8"))
    for entry in whole["entries"]:
        entry["key"] = {name: said for name, said in (entry["key"] | key).items() if said is not None}
    path.write_text(json.dumps(whole), "utf-8")


def test_what_was_measured_is_taken_and_told(file: Path) -> None:
    before = rt.explain(*qkv())
    assert before.backend == "native_flash"
    assert f"RINGTRUE_TUNED names {file}, which is not there" in before.order_from
    remember(file, SHAPE)
    assert rt.explain(*qkv()).backend == "native_flash"  # read once
    tuned.forget()
    after = rt.explain(*qkv())
    assert (after.backend, after.order) == ("native_math", ("native_math", "native_flash"))
    assert after.order_from == f"tuned: {file}, 2026-12-01, at 6 x 6 tokens, head dim 8"
    assert [c.backend for c in select.fitting("auto", PLAIN)] == ["native_math", "native_flash"]
    assert [c.backend for c in select.fitting("native_flash", PLAIN)] == ["native_flash"]


def test_it_can_be_switched_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(file, SHAPE)
    monkeypatch.setenv("RINGTRUE_TUNED", "off")
    tuned.forget()
    found = rt.explain(*qkv())
    assert found.backend == "native_flash"
    assert found.order_from.endswith("; tuned: switched off by RINGTRUE_TUNED")
    assert tuned.place() is None


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for unset in (None, ""):
        monkeypatch.setenv("RINGTRUE_TUNED", "") if unset == "" else monkeypatch.delenv("RINGTRUE_TUNED")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert tuned.place() == tmp_path / "ringtrue" / "tuned.json"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert tuned.place() == tmp_path / "home" / ".cache" / "ringtrue" / "tuned.json"
    assert rt.explain(*qkv()).order_from == order.declared(PLAIN).source  # nobody asked for a file: nothing to tell


KEY = ("device", "ringtrue", "torch", "name")


@pytest.mark.parametrize("part", KEY)
def test_what_was_measured_with_something_else_is_not_taken(part: str, file: Path) -> None:
    assert set(KEY) <= tuned.key("cpu").keys()
    remember(file, SHAPE)
    changed(file, **{part: "another"})
    found = rt.explain(*qkv())
    assert found.backend == "native_flash"
    if part != "device":  # that is another machine's entry
        assert f"tuned: {file} is not used, it was measured with {part} another (here " in found.order_from


@pytest.mark.parametrize("there", ["1.0", "2.0", None])
def test_a_packages_version_is_in_the_key(
    there: str | None, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = rt.optional.Package("ringtrue_odd", "", "ringtrue-odd")
    monkeypatch.setattr(tuned, "REGISTRY", (replace(backend_of(unreachable()), packages=(package,)),))
    info = tmp_path / "ringtrue_odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ringtrue-odd\nVersion: 1.0\n")
    assert tuned.key("cpu")["ringtrue-odd"] == "1.0"
    remember(file, SHAPE)
    changed(file, **{"ringtrue-odd": there})
    found = rt.explain(*qkv())
    assert found.backend == ("native_math" if there == "1.0" else "native_flash")
    if there != "1.0":
        assert f"ringtrue-odd {there or 'absent'} (here 1.0)" in found.order_from


def test_the_key_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found = tuned.key("cuda")
    assert (found["name"], found["capability"], found["cuDNN"]) == ("NVIDIA X1", [9, 0], 91900)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuned.found("cuda") == Found()  # judged for another machine: nothing is asked of a GPU


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"format": 2, "entries": []}', '{"format": 1}', '{"format": 1, "entries": [{}]}',
        '{"format": 1, "entries": [{"key": {}, "date": "", "shapes": [{"order": []}]}]}',
        '{"format": 1, "entries": [{"key": [], "date": "", "shapes": 3}]}',
        json.dumps({"format": 1, "entries": [{"key": {}, "date": "", "shapes": [{**SHAPE._asdict(), "q_len": 0}]}]}),
        json.dumps({"format": 1, "entries": [{"key": {}, "date": "", "shapes": [{**SHAPE._asdict(), "order": [1]}]}]}),
        json.dumps({"format": 1, "entries": [{"key": {}, "date": "", "shapes": [{**SHAPE._asdict(), "wrong": [1]}]}]}),
        *(
            json.dumps({"format": 1, "entries": [{"key": {}, "date": "", "shapes": [{**SHAPE._asdict(), **other}]}]})
            for other in ({"wrong": ["a"]}, {"failed": "a"}, {"wrong": {"a": 1}}, {"order": "a"}, {"q_len": 10**400},
                          {"causal": "no"})
        ),
        "[" * 100_000,
    ],
    ids=range(19),
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_said_once_and_costs_nothing_else(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text, "utf-8")
    with pytest.warns(UserWarning, match="cannot be read and is not used"):
        rt.attention(*qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rt.attention(*qkv(5))
        found = rt.explain(*qkv())
    assert found.backend == "native_flash"
    assert f"tuned: {file} cannot be read and is not used" in found.order_from
    assert not tuned.remember(file, "cpu", "today", [SHAPE])  # and it is written anew
    tuned.forget()
    assert rt.explain(*qkv()).backend == "native_math"


def test_bytes_that_are_no_text_and_a_folder(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="cannot be read"):
        rt.attention(*qkv())
    file.unlink()
    file.mkdir()
    tuned.forget()
    with pytest.warns(UserWarning, match="cannot be read"):
        rt.attention(*qkv(7))


def test_what_was_there_stays_beside_what_is_new(file: Path) -> None:
    remember(file, SHAPE, SHAPE._replace(q_len=64))
    changed(file, name="another machine")
    remember(file, SHAPE, SHAPE._replace(causal=True))
    remember(file, SHAPE._replace(order=("native_flash",)))
    other, mine = tuned.read(file)
    assert (other["key"]["name"], [s.q_len for s in other["shapes"]]) == ("another machine", [6, 64])
    assert [(s.causal, s.order) for s in mine["shapes"]] == [(False, ("native_flash",)), (True, SHAPE.order)]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("facts", "near"),
    [
        ({}, True),
        ({"q_len": 24, "k_len": 24}, True),
        ({"q_len": 25}, False),
        ({"k_len": 1}, False),
        ({"head_dim": 32}, True),
        ({"head_dim": 64}, False),
        ({"q_len": 0}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"causal": 0}, False),
        ({"mask_kinds": frozenset({"key_keep"})}, False),
    ],
    ids=str,
)
def test_which_calls_are_like_a_measured_one(facts: dict[str, Any], near: bool, file: Path) -> None:
    remember(file, SHAPE._replace(order=("c",)))
    found = tuned.order(replace(PLAIN, **facts), DECLARED)
    assert found.names == (("c", "a", "b") if near else DECLARED.names)
    assert found.source.startswith("tuned: " if near else "declared: ")
    assert bool(found.notes) is not near
    assert near or "has no shape like this call's" in found.notes[0]


def test_the_nearest_shape_is_taken(file: Path) -> None:
    remember(file, *(SHAPE._replace(q_len=n, k_len=n, order=(str(n),)) for n in (4, 7, 20)))
    for tokens, nearest in ((2, "4"), (6, "7"), (16, "20")):
        assert tuned.order(replace(PLAIN, q_len=tokens, k_len=tokens), DECLARED).names[0] == nearest


def test_what_was_wrong_is_left_out_and_what_failed_comes_last(file: Path) -> None:
    remember(file, SHAPE._replace(order=("c",), wrong={"b": "dq is far off"}, failed={"a": "no memory"}))
    found = tuned.order(PLAIN, Order(("a", "b", "c", "d"), ""))
    assert found.names == ("c", "d", "a")
    assert found.notes == ("b is left out, it was wrong here: dq is far off", "a comes last, it failed here: no memory")


def test_a_call_for_which_none_is_left_says_who_was_left_out(file: Path) -> None:
    remember(file, SHAPE._replace(order=(), wrong={"native_flash": "far off", "native_math": "farther"}))
    with pytest.raises(rt.UnsupportedError, match="native_flash is left out, it was wrong here: far off"):
        rt.attention(*qkv())


def test_it_adds_nothing_that_does_not_fit_or_has_no_backward(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the file: names that cannot take the call, first of all."""
    wrong = [unreachable("unfit", causal="none"), unreachable("forward_only", backward=False)]
    backends = tuple(backend_of(pair) for pair in (*wrong, unreachable("last")))
    for module in (select, api):
        monkeypatch.setattr(module, "REGISTRY", backends)
    monkeypatch.setattr(order, "ROWS", (Row("cpu", ("last",), "", ""),))
    names = ("nobody", "forward_only", "unfit")
    remember(file, SHAPE._replace(causal=True, order=names))
    for facts in (replace(PLAIN, causal=0), replace(PLAIN, causal=0, wanted=rt.Wanted(True, True, True))):
        assert select.preference(facts).names == (*names, "last")
        assert [c.backend for c in select.fitting("auto", facts)] == ["last"]


def test_no_file_is_read_while_torch_traces(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where ranks exchange nothing: both ask for an order that is alike everywhere."""
    remember(file, SHAPE)
    monkeypatch.setattr(tuned, "found", lambda device: pytest.fail("the file was read"))
    assert select.preference(PLAIN, alike=True) == order.declared(order.blind(PLAIN))
    torch._dynamo.reset()
    compiled = torch.compile(rt.attention, fullgraph=True, backend="eager")
    q, k, v = qkv()
    torch.testing.assert_close(compiled(q, k, v), rt.attention(q, k, v, backend="native_flash"))


# ---- ranks with different files --------------------------------------------------------------------------------------

MINE = threading.local()


def taken(
    orders: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch, lengths: str = "exchange"
) -> dict[int, str]:
    """The backend that each rank takes, each with its own file; every rank also goes backward."""
    found: dict[int, str] = {}
    plan = DeclaredCall.plan

    def noted(self: DeclaredCall, call: Any, choices: Any) -> Any:
        planned = plan(self, call, choices)
        found[self.context.rank] = planned.choice.backend
        return planned

    def own(device: str) -> Found:
        return Found((SHAPE._replace(q_len=4, k_len=4, order=orders[MINE.rank]),), f"tuned: rank {MINE.rank}")

    def rank(mesh: Rank) -> torch.Tensor:
        MINE.rank = mesh.rank
        config = rt.ContextParallelConfig(1, len(orders), mesh=mesh, timeout=5.0, lengths=lengths)  # type: ignore[arg-type]
        cp = rt.ContextParallel(config)
        q, k, v = qkv(4, grad=True)
        out = rt.attention(q, k, v, parallel=cp)
        out.sum().backward()
        assert q.grad is not None
        said = rt.explain(q, k, v, parallel=cp)
        assert ("tuned: rank" in said.order_from) is (lengths == "exchange")
        assert ("that of rank 0 counts" in said.order_from) is (lengths == "exchange")
        return out.detach()

    monkeypatch.setattr(DeclaredCall, "plan", noted)
    monkeypatch.setattr(tuned, "found", own)
    World(len(orders)).run(rank)
    return found


FLASH, MATH = ("native_flash", "native_math"), ("native_math", "native_flash")


@pytest.mark.parametrize("orders", [(FLASH, MATH), (MATH, FLASH), (MATH, FLASH, MATH)], ids=str)
def test_ranks_with_different_files_take_that_of_rank_0(
    orders: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(taken(orders, monkeypatch).items()) == {(rank, orders[0][0]) for rank in range(len(orders))}


@pytest.mark.parametrize("orders", [(FLASH, MATH), (MATH, FLASH)], ids=str)
def test_where_nothing_is_exchanged_no_file_counts(
    orders: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert taken(orders, monkeypatch, "equal") == {0: "native_flash", 1: "native_flash"}


def test_what_one_rank_found_wrong_no_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "ROWS", (Row("cpu", (), "", ""),))
    assert taken((FLASH, ("native_math",)), monkeypatch) == {0: "native_math", 1: "native_math"}


def test_ranks_that_follow_their_own_files_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a rank that takes its own first; a file that counts where nothing is exchanged."""
    settle, preference = agreement.settle, select.preference

    def own(config: Any, rank: int, said: Any, call: Any, headers: Any) -> Any:
        return settle(config, rank, said, call, headers)[0], headers[rank].own["fits"][0]

    with monkeypatch.context() as planted:
        planted.setattr(agreement, "settle", own)
        assert taken((FLASH, MATH), planted) == {0: "native_flash", 1: "native_math"}
    with monkeypatch.context() as planted, pytest.raises(AssertionError):
        planted.setattr(select, "preference", lambda facts, alike=False: preference(facts))
        taken((FLASH, MATH), planted, "equal")
