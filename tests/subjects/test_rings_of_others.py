"""ring-flash-attn and yunchang as subjects, without either: what is said of them, and how a call is cut."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import NOT_RUN
from ringtrue.audit.subject import Quantities, Ranks
from ringtrue.subjects import _flash_attn, found, ring_flash_attn, yunchang
from subjects.asking import call

FAMILIES = [("ring-flash-attn", ring_flash_attn), ("yunchang", yunchang)]


@pytest.mark.parametrize(("name", "module"), FAMILIES)
@pytest.mark.parametrize(
    ("version", "word"), [("", "not installed"), ("0.0.1", "nobody looked at"), (None, "cannot be imported")]
)
def test_what_is_not_there_says_so(
    name: str, module: Any, version: str | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(package: str) -> str:
        if not version and version is not None:
            raise metadata.PackageNotFoundError(package)
        return version or str(module.RELEASES[0])

    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    monkeypatch.setattr(metadata, "version", asked)
    for subject in found(name, "cpu"):
        if not subject.unavailable().startswith("torch has no such kernel"):
            assert word in subject.unavailable() or "flash_attn" in subject.unavailable()
        assert examine(subject, Check(case("length-5"))).verdict == NOT_RUN


class Library:
    """A right ring for anybody who looks at the whole call: each rank attends with all keys."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def ring(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor, None]:
        out = _flash_attn.flash_attn_func(
            query, self.whole.key, self.whole.value, softmax_scale=options["softmax_scale"], causal=False
        )
        lse = torch.zeros(out.shape[0], out.shape[2], out.shape[1])
        return out, lse, None


@pytest.mark.parametrize("order", ["ring", "zigzag", "stripe"])
def test_the_parts_of_all_ranks_are_the_call(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(call("length-16"), ranks=Ranks(ring=2), wanted=frozenset({"query"}))
    library = ModuleType("ring_flash_attn")
    setattr(library, ring_flash_attn.FUNCTIONS[order], Library(asked).ring)
    monkeypatch.setattr(ring_flash_attn, "_library", lambda stand_in: library)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda *_, rank=rank: rank)
        parts.append(ring_flash_attn.Ring("ring", order, "").run(asked))
    leaf = asked.query.clone().requires_grad_()
    right = _flash_attn.flash_attn_func(leaf, asked.key, asked.value)
    (grad,) = torch.autograd.grad(right, leaf, asked.grad_out)
    whole = Quantities(*(None if a is None or b is None else a + b for a, b in zip(*parts, strict=True)))
    torch.testing.assert_close(whole.out, right.detach())
    torch.testing.assert_close(whole.dq, grad)


@pytest.mark.parametrize(
    ("order", "name", "ranks", "word"),
    [
        ("ring", "length-16", Ranks(), "one process"),
        ("ring", "length-16", Ranks(ulysses=2), "ulysses"),
        ("zigzag", "length-16", Ranks(ring=2), "causal alone"),
        ("llama3", "cross-longer-keys", Ranks(ring=2), "another number of keys"),
        ("ring", "bool-qk", Ranks(ring=2), "a mask"),
    ],
)
def test_what_is_not_claimed(order: str, name: str, ranks: Ranks, word: str) -> None:
    subject = ring_flash_attn.Ring("ring", order, "", stand_in=True)
    asked = replace(call(name, torch.bfloat16), ranks=ranks)
    assert word in subject.against(asked)
    if word != "causal alone":
        with pytest.raises(NotImplementedError):
            subject.run(asked)
