"""torch's own attention as a subject: what it is handed, what it claims, and what a reader is told to paste."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS, REFUSED
from ringtrue.subjects import found, torch_sdpa
from subjects.asking import call, told

ON_CPU = ["torch/default", "torch/flash", "torch/math"]


def test_each_kernel_of_the_device_is_found() -> None:
    assert sorted(s.name for s in found("torch", "cpu")) == ON_CPU
    assert {s.name for s in found("torch", "cuda")} == {*ON_CPU, "torch/efficient", "torch/cudnn"}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("asked", ["length-33", "causal-wide", "bool-blind", "all-of-them", "gqa", "float-of-input"])
def test_right(name: str, asked: str) -> None:
    (subject,) = found(name, "cpu")
    outcome = examine(subject, Check(case(asked)))
    assert outcome.verdict == PASS, outcome


@pytest.mark.parametrize(
    ("name", "asked"),
    [("flash", "dropout"), ("flash", "wide-values"), ("math", "window"), ("math", "softcap"), ("default", "segments")],
)
def test_refused(name: str, asked: str) -> None:
    (subject,) = found(f"torch/{name}", "cpu")
    assert examine(subject, Check(case(asked))).verdict == REFUSED


@pytest.mark.parametrize(
    ("asked", "flag", "dense"),
    [("causal", True, None), ("causal-negative", False, torch.bool), ("causal-float", False, torch.float32)],
)
def test_torch_is_handed_views_and_one_form_of_mask(
    asked: str, flag: bool, dense: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, **_: Any) -> Tensor:
        seen.extend([query, mask, causal])
        return value

    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", spy)
    x = call(asked)
    torch_sdpa.Sdpa("math", torch_sdpa.DOCUMENTED, "").attend_call(x)
    query, mask, causal = seen
    assert query.data_ptr() == x.query.data_ptr()
    assert query.stride() == x.query.transpose(1, 2).stride()
    assert (causal, None if mask is None else mask.dtype) == (flag, dense)


@pytest.mark.parametrize("asked", ["causal", "causal-keep", "scale-negative", "gqa", "dropout"])
@pytest.mark.parametrize("name", ["torch/default", "torch/math"])
def test_the_lines_of_a_bug_report_compute_the_same(name: str, asked: str) -> None:
    (subject,) = found(name, "cpu")
    x = call(asked)
    assert torch.equal(told(subject, x), subject.run(x).out)  # type: ignore[arg-type]


def test_a_mask_of_another_dtype_is_not_claimed() -> None:
    (subject,) = found("torch/math", "cpu")
    assert "float32 mask beside torch.bfloat16" in subject.against(call("float-qk", torch.bfloat16))
    assert subject.against(call("float-of-input", torch.bfloat16)) == ""
