"""A call that is remembered is one that would be prepared alike: whatever differs, and matters, is another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import HERE, qkv, recorder
from calls import one_thread as one_thread
from ringtrue import autograd, prepared

FIRST, LAST = HERE[0].name, HERE[-1].name


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    prepared.forget()
    yield
    prepared.forget()


Call = tuple[tuple[Any, ...], dict[str, Any], Callable[[], AbstractContextManager[Any]]]


def call(inputs: tuple[Any, ...] | None = None, scope: Any = nullcontext, **arguments: Any) -> Call:
    return qkv() if inputs is None else inputs, arguments, scope


class _Strict:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def other(place: int, **wish: Any) -> tuple[Any, ...]:
    """q, k, v of which one is otherwise."""
    return tuple(qkv(**wish)[i] if i == place else x for i, x in enumerate(qkv()))


PLAIN = call()
DIFFERENT: dict[str, tuple[Call, Call]] = {
    **{f"head dim of {'qkv'[i]}": (PLAIN, call(other(i, dim=4))) for i in range(3)},
    **{f"dtype of {'qkv'[i]}": (PLAIN, call(other(i, dtype=torch.float64))) for i in range(3)},
    **{f"gradient of {'qkv'[i]}": (PLAIN, call(other(i, grad=True))) for i in range(3)},
    **{f"device of {'qkv'[i]}": (PLAIN, call(tuple(x.to("meta" if j == i else "cpu") for j, x in enumerate(qkv()))))
       for i in range(3)},
    "grad mode": (call(qkv(grad=True)), call(qkv(grad=True), torch.no_grad)),
    "causal": (PLAIN, call(is_causal=True)),
    "scale": (PLAIN, call(scale=0.5)),
    "negative scale": (call(scale=0.5), call(scale=-0.5)),
    "grouped": (call(qkv(kv_heads=2), enable_gqa=True), call(qkv(kv_heads=2))),
    "softcap": (PLAIN, call(softcap=2.0)),
    "lse": (PLAIN, call(return_lse=True)),
    "length of v": (PLAIN, call(other(2, q_len=5))),
    "layout": (call(qkv(6, 5)), call(qkv(6, 5), layout="bhsd")),
    "deterministic": (PLAIN, call(deterministic=True)),
    "determinism of the process": (PLAIN, call(None, _Strict)),
    "backend": (PLAIN, call(backend=LAST)),
    "backend in scope": (PLAIN, call(None, lambda: rt.attention_backend(LAST))),
    # equal to something that was let in, and refused or otherwise all the same
    "a flag that equals True": (call(is_causal=True), call(is_causal=1)),
    "a flag that equals False": (PLAIN, call(return_lse=0)),
    "a number that equals 0": (PLAIN, call(dropout_p=False)),
    "a number that equals 1": (call(scale=1.0), call(scale=True)),
    "no layout": (PLAIN, call(layout=["bshd"])),
    # never remembered
    "mask": (PLAIN, call(attn_mask=rt.Causal())),
    "dropout": (PLAIN, call(dropout_p=0.5, backend=LAST)),
    "autocast": (PLAIN, call(None, lambda: torch.autocast("cpu", dtype=torch.bfloat16))),
    "option": (PLAIN, call(backend_options={"x": 1})),
    "pair": (PLAIN, call(backend=recorder("mine", []))),
    "no tensor": (PLAIN, call((*qkv()[:2], 3))),
}  # fmt: skip


def what_runs(made: Call, monkeypatch: pytest.MonkeyPatch) -> object:
    """All that reaches the bridge but the numbers, or the error."""
    (inputs, arguments, scope), seen = made, []

    def bridge(pair: Any, q: Any, k: Any, v: Any, mask: Any, options: Any, wanted: Any, *rest: Any) -> Any:
        seen.append((pair.name, q.shape, k.shape, v.shape, q.dtype, mask.causal, options, wanted))
        return q, q[..., 0]

    with monkeypatch.context() as patch:
        patch.setattr(autograd, "run", bridge)
        try:
            with scope():
                rt.attention(*inputs, **arguments)
        except rt.RingtrueError as error:
            return str(error)
    return seen


def finds_a_stranger(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the second call of a pair is another after the first than alone."""
    first, second = DIFFERENT[name]
    prepared.forget()
    alone = what_runs(second, monkeypatch)
    prepared.forget()
    assert what_runs(first, monkeypatch) != alone
    return what_runs(second, monkeypatch) != alone


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_call_is_prepared_for_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not finds_a_stranger(name, monkeypatch)


def parts() -> int:
    key = prepared.key_of(*qkv(), "auto", dict.fromkeys(ARGUMENTS) | DEFAULTS)
    assert key is not None
    return len(key)


ARGUMENTS = (
    "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "softcap", "return_lse", "layout", "deterministic",
    "backend_options",
)  # fmt: skip
DEFAULTS = {
    "dropout_p": 0.0, "softcap": 0.0, "is_causal": False, "enable_gqa": False, "return_lse": False, "layout": "bshd",
}  # fmt: skip


@pytest.mark.parametrize("left_out", range(parts()))
def test_a_key_without_one_of_its_parts_is_found_out(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prepared.key_of

    def blind(*args: Any) -> Any:
        key = right(*args)
        return key if key is None else (*key[:left_out], *key[left_out + 1 :])

    monkeypatch.setattr(prepared, "key_of", blind)
    assert any(finds_a_stranger(name, monkeypatch) for name in DIFFERENT)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_second_call_is_found_and_right(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv(grad=True)
    first = rt.attention(*tensors, is_causal=True, layout=layout)
    monkeypatch.setattr(rt.api, "_prepare", lambda *_: pytest.fail("prepared again"))
    second = rt.attention(*tensors, is_causal=True, layout=layout)
    assert torch.equal(first, second)
    grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_not_everything_is_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "LIMIT", 3)
    for length in range(1, 9):
        rt.attention(*qkv(length))
        assert len(prepared._calls) <= 3


def test_compiled_calls_neither_read_nor_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "key_of", lambda *_: pytest.fail("looked"))
    torch._dynamo.reset()
    torch.compile(rt.attention, fullgraph=True, backend="eager")(*qkv())
    torch._dynamo.reset()
