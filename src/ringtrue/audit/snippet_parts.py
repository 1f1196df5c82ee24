"""The pieces of a snippet (snippet.py): helpers as text, masks, and attention in float64, as plain as can be."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from .inputs import VALUES, Case, Inputs
from .patterns import DENSE, KEYS, SEGMENTS, Shape

STORED = '''\
def stored(x, stride, offset):
    """The numbers of x under other strides, NaN between them; where a stride is 0, the first for all."""
    shape = x.shape
    for dim, step in enumerate(stride):
        x = x.narrow(dim, 0, 1) if step == 0 else x
    size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride))
    flat = torch.full((size,), torch.nan, dtype=x.dtype, device=x.device)
    flat.as_strided(x.shape, stride, offset).copy_(x)
    return flat.as_strided(shape, stride, offset)'''
COMPARE = """\
def compare(name, x, right, dtype, bound_2, bound_inf):
    if x is None or (x.shape, x.dtype) != (right.shape, dtype):
        seen = "missing" if x is None else f"{tuple(x.shape)} {x.dtype}"
        print(f"{name:<5} WRONG  {seen}, must be {tuple(right.shape)} {dtype}")
        return
    error = torch.where(x == right, 0.0, x.detach().double() - right).flatten()
    norm, largest = float(error.norm()), float(error.abs().max()) if error.numel() else 0.0
    word = "ok   " if norm <= bound_2 and largest <= bound_inf else "WRONG"
    norms = f"2-norm {norm:.3e} (allowed {bound_2:.3e})  max {largest:.3e} (allowed {bound_inf:.3e})"
    print(f"{name:<5} {word}  {norms}")"""
DRAWN = '''\
def drawn():
    """The dropout mask of the call, (B, H, Sq, Sk), seen through a value that is the identity."""
    keys, width, parts = value.shape[1], value.shape[3], []
    for start in range(0, keys, width):
        eye = torch.eye(keys, device=device)[:, start : start + width]
        eye = torch.nn.functional.pad(eye, (0, width - eye.shape[1])).to(value.dtype)
        out = attend(query, key, eye[None, :, None].expand(value.shape).contiguous(){mask})[0].detach()
        parts.append(out[..., : min(width, keys - start)])
    return (torch.cat(parts, -1).transpose(1, 2) != 0).double() / (1 - {p})'''
POISON = {  # every fresh tensor holds NaN, so that a result nobody wrote is seen
    "cpu": "torch.utils.deterministic.fill_uninitialized_memory = True  # fresh tensors are full of NaN\n"
    "torch.use_deterministic_algorithms(True, warn_only=True)",
    "cuda": "blocks = [torch.full((n,), torch.nan, device='cuda') for n in [1 << 17] * 24 + [3 << 20] * 4]\n"
    "del blocks  # what is freed is given to the call, full of NaN",
}


def sources(case: Case) -> list[str]:
    """The source of every function that draws the numbers and the mask of a case, the called before their callers."""
    wanted: list[Callable[..., Any]] = [VALUES[case.values]] if case.values != "gaussian" else []
    needs_shape = False
    for name, axes in _patterns(case):
        kind = name.removesuffix("_input")
        needs_shape |= kind in SEGMENTS
        wanted.append(DENSE[kind] if axes else SEGMENTS[kind] if kind in SEGMENTS else KEYS[kind][1])
    found: dict[str, str] = {}
    for fn in wanted:
        _collect(fn, found)
    return [*([inspect.getsource(Shape).rstrip()] if needs_shape else []), *found.values()]


def _collect(fn: Callable[..., Any], found: dict[str, str]) -> None:
    assert isinstance(fn, FunctionType)
    if fn.__name__ in found:
        return
    names = _names(fn.__code__)
    for other in (getattr(sys.modules[fn.__module__], name, None) for name in names):
        if isinstance(other, FunctionType) and other.__module__ == fn.__module__:
            _collect(other, found)
    found[fn.__name__] = inspect.getsource(fn).rstrip()


def _names(code: Any) -> list[str]:
    """The global names that a function uses, those of its inner functions and comprehensions too."""
    inner = [name for const in code.co_consts if hasattr(const, "co_names") for name in _names(const)]
    return [*code.co_names, *inner]


def _patterns(case: Case) -> Iterable[tuple[str, str]]:
    for pattern in filter(None, case.mask.split("+")):
        name, _, axes = pattern.partition(":")
        yield name, axes


def mask_parts(case: Case) -> list[str]:
    """Lines that draw a case's mask, each part under its name in contract.Mask."""
    rows = []
    for name, axes in _patterns(case):
        kind, dtype = name.removesuffix("_input"), "dtype" if name.endswith("_input") else "torch.float32"
        if axes:
            rows.append(f"dense = {DENSE[kind].__name__}({case.shape.at(axes)}, {dtype}, draw).to(device)")
        elif kind in SEGMENTS:
            made = f"{SEGMENTS[kind].__name__}(Shape{tuple(case.shape)}, draw)"
            rows.append(f"q_segments, k_segments = (x.to(device) for x in {made})")
        else:
            field, make = KEYS[kind]
            rows.append(f"{field} = {make.__name__}({(case.batch, case.k_len)}, {dtype}, draw).to(device)")
    return rows


def masked(x: Inputs, *, flags: bool, own: bool) -> list[str]:
    """Lines that join the parts: bias, seen (which key each query may attend to) and attn_mask, those that there are.

    flags  the subject's lines have an argument for causal or a window: attn_mask does not hold what is by place
    own    the mask is that of an order, not of a case, and is drawn here
    """
    mask, rows = x.mask, []
    if own and mask.dense is not None:
        made = f"torch.randn({x.q.shape[1]}, {x.k.shape[1]}, generator=torch.Generator().manual_seed(1))[None, None]"
        bias = (
            f"{made}.to(device, {mask.dense.dtype})" if mask.dense.dtype != torch.bool else f"{made}.to(device) > -0.5"
        )
        rows.append(f"dense = {bias}")
    wide = "[:, None, None, :]"
    keep = ["dense"] if mask.dense is not None and mask.dense.dtype == torch.bool else []
    keep += [f"key_keep{wide}"] if mask.key_keep is not None else []
    bias_4 = ""
    if mask.bias is not None:
        name = "key_bias" if mask.bias is mask.key_bias else "dense"
        bias_4 = f"bias{wide}" if name == "key_bias" else "bias"
        rows.append(f"bias = {name}{'.requires_grad_()' if x.wanted.bias else ''}")
    by_place = _places(x)
    if mask.causal is not None or mask.since is not None:
        rows.append(f"row, col = torch.arange({x.q.shape[1]}, device=device)[:, None], "
                    f"torch.arange({x.k.shape[1]}, device=device)")  # fmt: skip
    if keep or by_place:
        rows.append(f"seen = {' & '.join([*keep, *by_place])}")
    passed = " & ".join(keep) if flags else "seen" if keep or by_place else ""
    if passed and bias_4:
        rows.append(f"attn_mask = torch.where({passed}, {bias_4}, -torch.inf)")
    else:
        rows.append(f"attn_mask = {passed or bias_4 or None}")
    return rows if len(rows) > 1 or passed or bias_4 else []


def _places(x: Inputs) -> list[str]:
    mask = x.mask
    found = [f"(col <= row + {mask.causal})[None, None]"] if mask.causal is not None else []
    found += [f"(col >= row + {mask.since})[None, None]"] if mask.since is not None else []
    if mask.q_segments is not None:
        found.append("(q_segments[:, None, :, None] == k_segments[:, None, None, :])")
    return found


def reference(x: Inputs, wanted: list[str]) -> str:
    """A function that gives every quantity in float64, gradients by autograd; of masks, only what the call has."""
    group, cap = x.q.shape[2] // x.k.shape[2] if x.k.shape[2] else 1, x.options.softcap
    bias, hides = x.mask.bias is not None, any(part is not None for part in x.mask.tensors) or bool(_places(x))
    wide = "[:, None, None, :]" if bias and x.mask.bias is x.mask.key_bias else ""
    rows = [
        "def reference():",
        "q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))",
        *(["b = bias.detach().double().requires_grad_()"] if bias else []),
        *([f"keys, values = (x.repeat_interleave({group}, 2) for x in (k, v))"] if group > 1 else []),
        f'scores = {x.options.scale!r} * torch.einsum("bqhd,bkhd->bhqk", q, {"keys" if group > 1 else "k"})',
        *([f"scores = {cap} * torch.tanh(scores / {cap})"] if cap else []),
    ]
    if hides:
        keep = "seen" if _keeps(x) else ""
        shown = f"(b{wide} != -torch.inf)" if bias else ""
        rows += [f"may = ({' & '.join(filter(None, (keep, shown)))}).expand(scores.shape)"]
        rows += [f"scores = scores + b.masked_fill(b == -torch.inf, 0.0){wide}"] if bias else []
        rows += [
            "blind = ~may.any(-1, keepdim=True)  # rows that see nothing: out 0, lse -inf, gradients 0",
            "scores = scores.masked_fill(~may, -torch.inf).masked_fill(blind, 0.0)",
            "weights = scores.softmax(-1).masked_fill(blind, 0.0)",
            "lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)",
        ]
    else:
        rows += ["weights, lse = scores.softmax(-1), scores.logsumexp(-1)"]
    rows += ["weights = weights * drawn()"] if x.options.dropout_p else []
    rows += [f'out = torch.einsum("bhqk,bkhd->bqhd", weights, {"values" if group > 1 else "v"})']
    outputs, upstream = ("(out, lse)", "(grad_out.double(), grad_lse.double())") if x.grad_lse is not None else (
        "out", "grad_out.double()")  # fmt: skip
    leaf = {"dq": "q", "dk": "k", "dv": "v", "dbias": "b"}
    if wanted:
        rows += [f"grads = torch.autograd.grad({outputs}, [{', '.join(leaf[n] for n in wanted)}], {upstream})"]
        rows += [f"return dict(zip({wanted}, grads), out=out.detach(), lse=lse.detach())"]
    else:
        rows += ["return dict(out=out.detach(), lse=lse.detach())"]
    return "\n    ".join(rows)


def _keeps(x: Inputs) -> bool:
    dense = x.mask.dense
    return bool(_places(x)) or x.mask.key_keep is not None or (dense is not None and dense.dtype == torch.bool)
