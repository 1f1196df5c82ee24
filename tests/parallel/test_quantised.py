"""Quantised pairs between ranks: parts of a ring merge right, and gradients of the option come under Ulysses alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draws import Draw, on_twin, verdicts
from draws import on_ranks as ranks_of

import ringtrue as rt
from ringtrue import exact
from ringtrue.audit.inputs import Case, build
from ringtrue.backends import REGISTRY, sage
from ringtrue.contract import ForwardOut, OpPair, Wanted
from ringtrue.edge import edge
from standins import sageattention_2

KERNEL = sage.make_pair("sage", lambda: sageattention_2, sage.TRITON, sage.HALF_CLAIMS)
(MATH,) = (edge(b.pairs["cpu"]) for b in REGISTRY if b.name == "native_math")
TRAINED = exact.with_backward(edge(KERNEL), MATH)
NOTHING = Wanted(False, False, False)


def problem(degrees: tuple[int, int], wanted: Wanted, causal: int | None = None) -> Draw:
    """Keys far from 0, in parts of different lengths."""
    lengths = {2: (57, 39), 4: (30, 1, 44, 21)}[degrees[0] * degrees[1]]
    total = sum(lengths)
    x = build(Case("quantised", total, total, heads=4, head_dim=64, causal=causal, dtype=torch.bfloat16))
    x = replace(x, k=x.k + 3, wanted=wanted, arithmetic="8-bit")
    alignment = None if causal is None else "top_left"
    return Draw(degrees, lengths, lengths, x, alignment, wants=("qkv" if any(wanted) else "",))


@pytest.mark.parametrize("degrees", [(1, 2), (1, 4), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("causal", [None, 0])
def test_a_forward_between_ranks_is_right(degrees: tuple[int, int], causal: int | None) -> None:
    tried = problem(degrees, NOTHING, causal)
    assert all(v.ok for v in verdicts(ranks_of(tried, KERNEL), tried))


def test_an_lse_of_keys_without_their_mean_is_found() -> None:
    def uncorrected(*given: object) -> ForwardOut:
        q, k, _, _, _, options = given
        found = KERNEL.forward(*given)
        off = options.scale * torch.einsum("bqhd,bhd->bhq", q.float(), k.float().mean(1))  # type: ignore[attr-defined]
        return found._replace(lse=found.lse - off)

    tried = problem((1, 2), NOTHING)
    broken = OpPair("sage", uncorrected, KERNEL.backward, KERNEL.claims)
    assert not all(v.ok for v in verdicts(ranks_of(tried, broken), tried))


def test_the_option_trains_under_ulysses_and_is_refused_in_a_ring() -> None:
    tried = problem((2, 1), Wanted(True, True, True))
    assert all(v.ok for v in verdicts(ranks_of(tried, TRAINED), tried))
    with pytest.raises((rt.UnsupportedError, rt.PeerError), match="no-backward-from-lse"):
        on_twin(problem((1, 2), Wanted(True, True, True)), TRAINED)
