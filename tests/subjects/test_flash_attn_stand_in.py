"""The stand-in for flash_attn's kernels is right, and what is imported on top of it leaves no trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS
from ringtrue.audit.subject import Call, Plain, Says
from ringtrue.subjects import _flash_attn

SAYS = Says(
    frozenset({"float32"}), causal="any", window=True, gqa=True, dropout=True, softcap=True, blind=True,
    head_dims=(1 << 30, 1), value_dim=True,
)  # fmt: skip
ASKED = ["length-33", "gqa", "causal-bottom-right", "window", "softcap", "dropout", "wide-values"]


def window(call: Call) -> tuple[int, int]:
    ahead = call.key.shape[1] - call.query.shape[1]
    since, until = call.mask.since, call.mask.causal
    return (-1 if since is None else ahead - since, -1 if until is None else until - ahead)


def batched(call: Call) -> Tensor:
    torch.manual_seed(0)
    return _flash_attn.flash_attn_func(
        call.query, call.key, call.value, call.dropout_p, call.scale, False, window(call), call.softcap
    )


@pytest.mark.parametrize("name", ASKED)
def test_right(name: str) -> None:
    outcome = examine(Plain("stand-in", batched, SAYS), Check(case(name)))
    assert outcome.verdict == PASS, outcome


def test_packed_sequences_are_the_samples_one_after_the_other() -> None:
    """Forward and backward, of lengths that differ between queries and keys."""
    draw = torch.Generator().manual_seed(0)
    ends_q, ends_k = torch.tensor([0, 3, 8]), torch.tensor([0, 5, 11])
    q, k, v, dout = (torch.randn(n, 2, 4, generator=draw) for n in (8, 11, 11, 8))
    options = (0.0, 0.5, True)
    out, lse, _, _ = _flash_attn._flash_attn_varlen_forward(q, k, v, ends_q, ends_k, 5, 6, *options)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, ends_q, ends_k, 5, 6, *options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = [
        _flash_attn.flash_attn_func(*(x[None, a:b] for x, (a, b) in zip(leaves, ends, strict=True)), 0.0, 0.5, True)[0]
        for ends in ([(0, 3), (0, 5), (0, 5)], [(3, 8), (5, 11), (5, 11)])
    ]
    whole = torch.cat(parts)
    torch.testing.assert_close(out, whole.detach())
    for found, right in zip(grads, torch.autograd.grad(whole, leaves, dout), strict=True):
        torch.testing.assert_close(found, right)


def test_a_library_is_imported_on_top_of_it_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "needs_flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from flash_attn.flash_attn_interface import _flash_attn_forward\nfrom .adapters import anything\n"
    )
    (package / "adapters.py").write_text("raise ImportError('needs more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    library = _flash_attn.imported("needs_flash_attn", ("needs_flash_attn.adapters",))
    assert library._flash_attn_forward is _flash_attn._flash_attn_forward
    assert not [name for name in sys.modules if name.startswith(("needs_flash_attn", "flash_attn"))]
