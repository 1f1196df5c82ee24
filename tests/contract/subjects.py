"""Every registered pair on every device that is here, edge included: enumerated, never named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import pytest
import torch

from calls import SLOW
from contract.bridges import operator_pair, through_autograd
from ringtrue.audit.cases import CASES
from ringtrue.audit.drawn import drawn_mask
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.judge import Verdict, judge, judged, truth_of
from ringtrue.audit.laws import chunk_law, whole
from ringtrue.audit.truth import Quantities, Truth
from ringtrue.audit.yardstick import yardstick
from ringtrue.backends import REGISTRY
from ringtrue.contract import Arithmetic, Facts, OpPair, Wanted
from ringtrue.edge import edge
from ringtrue.select import composed, reasons_against
from standins import STANDINS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Subject(NamedTuple):
    """A pair with its edge, and the device it is tried on."""

    pair: OpPair
    device: str
    standin: bool = False  # glue around a module of our own: tests/standins

    def __str__(self) -> str:
        where = {"cpu": "standin", "cuda": "standin-cuda"} if self.standin else {}
        return f"{self.pair.name}-{where.get(self.device, self.device)}"


class Reference(NamedTuple):
    """What a case's results are held against."""

    truth: Truth
    yard: Quantities | None


def _here(device: str) -> bool:
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())


SUBJECTS = tuple(
    Subject(composed(backend, device), device)
    for backend in REGISTRY
    for device in backend.pairs
    if _here(device) and backend.unavailable(device) is None
)
KERNELS = SUBJECTS  # what is planted outside of a pair, or what a kernel may keep, needs no stand-in to be found
PLANTED = tuple(s for s in KERNELS if s.pair.name not in SLOW)
SUBJECTS += tuple(Subject(edge(s.pair), s.device, standin=True) for s in STANDINS if _here(s.device))


def parameters(subject: Subject) -> object:
    return pytest.param(subject, id=str(subject), marks=() if subject.device == "cpu" else pytest.mark.gpu)


EVERY_SUBJECT = pytest.mark.parametrize("subject", [parameters(s) for s in SUBJECTS])
EVERY_THAT_TRAINS = pytest.mark.parametrize("subject", [parameters(s) for s in SUBJECTS if s.pair.claims.backward])


@cache
def cases_for(
    subject: Subject, dtypes: tuple[torch.dtype, ...] = DTYPES, *, in_parts: bool = False
) -> tuple[Case, ...]:
    """Every case, in every dtype, that the subject's claims allow; `in_parts`: also under the chunk law."""
    typed = (replace(case, dtype=dtype) for dtype in dtypes for case in CASES)
    found = tuple(c for c in typed if (c.splits or not in_parts) and takes(subject.pair, c, in_parts))
    if subject.device == "cpu" or subject.pair.name not in SLOW:
        return found
    first = {_compiled_for(c): c for c in reversed(found)}
    return tuple(c for c in found if first[_compiled_for(c)] is c)


def _compiled_for(c: Case) -> object:
    """What a pair that compiles kernels compiles one for; in float32 and float16 the first few of them will do."""
    if c.dtype != torch.bfloat16:
        return c.dtype, c.mask[:4], c.causal is None
    return c.mask, c.causal is None, c.since is None, c.softcap, c.grad_lse, c.heads == c.kv_heads


def takes(pair: OpPair, case: Case, in_parts: bool) -> bool:
    inputs = inputs_for(pair, case)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.mask.bias
    facts = Facts(
        device=q.device.type, dtype=q.dtype, batch=q.shape[0], q_len=q.shape[1], k_len=k.shape[1], heads=q.shape[2],
        kv_heads=k.shape[2], head_dim=q.shape[3], value_dim=v.shape[3], mask_kinds=inputs.mask.kinds,
        bias_dtype=None if bias is None else bias.dtype, causal=inputs.mask.causal, wanted=inputs.wanted,
        dropout=case.dropout != 0, softcap=case.softcap != 0, needs_lse=True, from_lse=in_parts,
    )  # fmt: skip
    return not reasons_against(pair.claims, facts) and (pair.claims.dlse or not case.grad_lse)


def inputs_for(pair: OpPair, case: Case, device: str = "cpu") -> Inputs:
    """The case's tensors; the gradient of a float mask is wanted from the pairs that give one."""
    made = build(case, device, dbias=pair.claims.dbias)
    wanted = made.wanted if pair.claims.backward else Wanted(False, False, False)
    return replace(made, wanted=wanted, arithmetic=pair.claims.arithmetic)


@cache
def reference(case: Case, device: str, arithmetic: Arithmetic) -> Reference:
    inputs = replace(build(case, device), arithmetic=arithmetic)
    return Reference(truth_of(inputs), yardstick(inputs))


def cuts(case: Case) -> list[int]:
    """Parts of different lengths, one of them a single key and one of them empty."""
    middle = case.k_len // 2
    return [min(1, middle), middle, middle]


Bridge = Literal["eager", "compiled"]


def verdicts(
    pair: OpPair, case: Case, device: str, *, in_parts: bool = False, bridge: Bridge = "eager"
) -> list[Verdict]:
    """How a pair does on one case, as one call or under the chunk law: its functions, or the operators around it."""
    inputs = inputs_for(pair, case, device)
    if case.dropout:  # right is only what belongs to the mask that this pair draws
        inputs = replace(inputs, dropout=drawn_mask(pair, inputs))
    compiled = bridge == "compiled"
    if in_parts:
        result = chunk_law(operator_pair(pair) if compiled else pair, inputs, cuts(case))
    else:
        result = through_autograd(pair, inputs) if compiled else whole(pair, inputs)
    if case.dropout:
        return judged(result, inputs)
    return judge(result, *reference(case, device, pair.claims.arithmetic), inputs)
