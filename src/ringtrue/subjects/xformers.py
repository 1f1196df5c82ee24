"""xformers' memory_efficient_attention: as it chooses, and with each pair of operators.

Its operators list their own reasons against inputs (not_supported_reasons): these are their claims, beside what its
documentation says of all. Causal is LowerTriangularMask or its bottom-right sibling; a float mask is a tensor of
query's dtype in full size; segments are a BlockDiagonalMask over the samples put one after the other, where they can be
written so. Grouped heads are documented for the forward pass alone. lse is that of
memory_efficient_attention_forward_requires_grad, a call of its own.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..audit.subject import Call, Plain, Says, Subject
from ._installed import why_not
from ._torch_calls import dense_kinds, given, other_dtype, seeded, unsupported

LOOKED_AT = ("0.0.35", "0.0.35")
PAIRS = {
    "cutlass": "MemoryEfficientAttentionCutlassOp",
    "cutlass-blackwell": "MemoryEfficientAttentionCutlassBlackwellOp",
    "cutlass-flash": "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "flash": "MemoryEfficientAttentionFlashAttentionOp",
    "ck": "MemoryEfficientAttentionCkOp",
}
DOCUMENTED = Says(
    masks=frozenset({"float", "key_float"}),
    causal="any",  # the two that there are, see `against`
    segments=True,
    value_dim=True,
    head_dims=(1 << 30, 1),
    dropout=True,
    lse=True,
    mask_grad=True,
    deterministic=False,
)


def found(device: str) -> Iterator[Subject]:
    """As it chooses, and each pair; one subject that says why, where xformers cannot be audited."""
    missing = why_not("xformers", *LOOKED_AT) or why_not_ops()
    if missing:
        yield Plain("xformers", lambda call: call.query, about="xformers", missing=missing)
        return
    fmha = importlib.import_module("xformers.ops.fmha")
    about = f"xformers {importlib.import_module('xformers').__version__}, torch {torch.__version__}"
    pairs = {name: getattr(fmha, attribute) for name, attribute in PAIRS.items()}
    reasons = {name: _reasons(pair, _probe(fmha, device)) for name, pair in pairs.items()}
    nothing = "" if any(not r for r in reasons.values()) else f"none of its operators: {reasons['cutlass']}"
    yield MemoryEfficient("auto", None, about, nothing)
    for name, pair in pairs.items():
        yield MemoryEfficient(name, pair, about, reasons[name])


def why_not_ops() -> str:
    """Why its operators do not load."""
    try:
        importlib.import_module("xformers.ops.fmha")
    except Exception as error:  # whatever a library raises while it loads
        return f"xformers.ops is broken: {type(error).__name__}: {error}"
    return ""


def _probe(fmha: Any, device: str) -> Any:
    tensors = (torch.zeros(1, 128, 1, 64, dtype=torch.float16, device=device) for _ in range(3))
    return fmha.Inputs(*tensors)


def _reasons(pair: Any, inputs: Any) -> str:
    """The library's own reasons against inputs, of both operators of a pair."""
    found = [reason for op in pair for reason in op.not_supported_reasons(inputs)]
    return "; ".join(dict.fromkeys(found))


class MemoryEfficient(Plain):
    """memory_efficient_attention with a pair of operators, or its choice."""

    def __init__(self, name: str, pair: Any, about: str, missing: str) -> None:
        super().__init__(f"xformers/{name}", self.attend_call, DOCUMENTED, about, missing=missing, text=self.lines)
        object.__setattr__(self, "operators", pair)

    operators: Any

    def against(self, call: Call) -> str:
        try:
            bias = attn_bias(call)
        except NotImplementedError as error:
            return "; ".join(filter(None, (self.says.against(call), str(error))))
        fmha = importlib.import_module("xformers.ops.fmha")
        inputs = fmha.Inputs(*_tensors(call), attn_bias=bias, p=call.dropout_p, scale=_scale(call))
        every = [self.operators] if self.operators else [getattr(fmha, name) for name in PAIRS.values()]
        reasons = [_reasons(pair, inputs) for pair in every]
        own = "" if "" in reasons else reasons[0]
        return "; ".join(filter(None, (self.says.against(call), other_dtype(call), own)))

    def attend_call(self, call: Call) -> tuple[Tensor, Tensor]:
        ops = importlib.import_module("xformers.ops")
        bias, tensors, words = attn_bias(call), _tensors(call), {"p": call.dropout_p, "scale": _scale(call)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seeded(call)
            out = ops.memory_efficient_attention(*tensors, bias, op=self.operators, **words)
            seeded(call)
            forward = None if self.operators is None else self.operators[0]
            with torch.no_grad():
                _, lse = ops.memory_efficient_attention_forward_requires_grad(*tensors, bias, op=forward, **words)
        batch, length = call.query.shape[:2]
        lse = lse[..., : out.shape[1]]  # some pad it
        if call.mask.q_segments is not None:
            lse = lse.reshape(-1, batch, length).transpose(0, 1)
        return out.reshape(batch, length, *out.shape[2:]), lse

    def lines(self, call: Call) -> str:
        mask = call.mask
        square = f"attn_mask.expand({call.query.shape[0]}, {call.query.shape[2]}, -1, -1)"
        bias = "None"
        if mask.q_segments is not None:
            q_lengths, k_lengths = block_lengths(call)
            bias = f"fmha.attn_bias.BlockDiagonalMask.from_seqlens({q_lengths}, {k_lengths})"
        elif mask.causal is not None:
            bias = f"fmha.attn_bias.{type(attn_bias(call)).__name__}()"
        elif dense_kinds(call):
            bias = square
        arguments = given(
            (
                (f"p={call.dropout_p}", call.dropout_p > 0),
                (f"scale={call.scale!r}", not call.default_scale),
                (f"op=fmha.{PAIRS.get(self.name.partition('/')[2], '')}", self.operators is not None),
            )
        )
        flat = ".flatten(0, 1).unsqueeze(0)" if mask.q_segments is not None else ""
        tensors = ", ".join(f"{name}{flat}" for name in ("query", "key", "value"))
        back = f".view({', '.join(map(str, call.grad_out.shape))})" if flat else ""
        return (
            f"from xformers.ops import fmha\nout = fmha.memory_efficient_attention({tensors}, {bias}{arguments}){back}"
        )


def _scale(call: Call) -> float | None:
    return None if call.default_scale else call.scale


def _tensors(call: Call) -> list[Tensor]:
    """query, key, value; with segments as one sample, one after the other."""
    tensors = [call.query, call.key, call.value]
    return tensors if call.mask.q_segments is None else [x.flatten(0, 1).unsqueeze(0) for x in tensors]


def attn_bias(call: Call) -> Any:
    """The mask as xformers writes it. NotImplementedError where it has no form for it."""
    mask, ahead = call.mask, call.key.shape[1] - call.query.shape[1]
    unsupported(call, "window", "softcap")
    if call.group > 1:
        raise NotImplementedError("grouped heads are for the forward pass alone")
    kinds = sum((dense_kinds(call), mask.causal is not None, mask.q_segments is not None))
    if kinds > 1:
        raise NotImplementedError("there is no form for several masks at once")
    if mask.causal is not None and mask.causal not in (0, ahead):
        raise NotImplementedError("causal is top-left or bottom-right")
    forms: Any = importlib.import_module("xformers.ops.fmha.attn_bias")
    if mask.causal is not None:
        return forms.LowerTriangularMask() if mask.causal == 0 else forms.LowerTriangularFromBottomRightMask()
    if mask.q_segments is not None:
        return forms.BlockDiagonalMask.from_seqlens(*block_lengths(call))
    dense = call.dense()
    if dense is None:
        return None
    if dense.dtype == torch.bool:
        raise NotImplementedError("there is no bool mask")
    sizes = (call.query.shape[0], call.query.shape[2], call.query.shape[1], call.key.shape[1])
    return dense.expand(sizes)


def block_lengths(call: Call) -> tuple[list[int], list[int]]:
    """Lengths of the blocks of queries and of keys, sample after sample.

    NotImplementedError where ids come twice, or those of queries and of keys are not the same ones in one order.
    """
    q_ids, k_ids = call.mask.q_segments, call.mask.k_segments
    assert q_ids is not None
    assert k_ids is not None
    lengths: tuple[list[int], list[int]] = ([], [])
    for q_row, k_row in zip(q_ids, k_ids, strict=True):
        (q_seen, q_counts), (k_seen, k_counts) = (
            torch.unique_consecutive(r, return_counts=True) for r in (q_row, k_row)
        )
        if not torch.equal(q_seen, k_seen) or len(q_seen.unique()) < len(q_seen):
            raise NotImplementedError("these segments are no diagonal of blocks")
        lengths[0].extend(q_counts.tolist())
        lengths[1].extend(k_counts.tolist())
    return lengths
