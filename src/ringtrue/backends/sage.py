"""SageAttention: query and key quantised to int8, forward only; releases 1 and 2, by their package or from the hub.

Read in 1.0.6 (PyPI), 2.2.0 (its repository; not on PyPI) and version 3 of the hub's kernel, which has release 2's
`sageattn` alone. All take (B, S, H, D) as "NHD", and subtract from the keys their mean over the sequence, which changes
every score of a query by the same amount: the weights stay, lse does not. What is done here, and why:

- The mean is subtracted here, in float32, and `scale * q . mean` added to lse in float32. 1.0.6 subtracts it in the
  caller's own key tensor, and returns no lse; 2.x adds it to lse rounded to the inputs' dtype, and for grouped heads
  may not be able to. Release 2's `sageattn` drops `smooth_k` and does it once more, on keys whose mean is then 0.
- The Triton kernels count keys that are missing in the last block of 64 as keys with a score of 0. They are put there
  as such, and taken out of the result again: see `_without_zeros`. `sageattn_varlen` counts them in each sequence, and
  takes one mean over all of them, which may put all scores of a sequence far below 0: there too the mean is subtracted
  here, each sequence's own, and a second call with values of 1 gives the share of the keys that are there.
- Causal is right for as many queries as keys only: keys that no query sees are cut off, queries that see all keys go
  without. The Triton kernels read scales behind the last block of 128: tokens are added that no query sees.
- 2.x makes the device of its arguments the current one: put back.

- The Triton parts of all kernels count elements in 32 bits: what reaches further is copied, or refused.

Values and weights are float16, or with the "fp8" kernels 8-bit floats. Values above 65504 are inf in float16.
"backward" of `backend_options` names an exact backend for the gradients: see exact.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason
from ..errors import UnsupportedError, message
from ..optional import loaded, why_not
from . import _hub
from ._packed import packing

BLOCK, KEYS = 128, 64  # of causal tokens, and of keys, in the Triton kernels
FAR = 2**31

INSTALL = 'pip install --no-build-isolation "git+https://github.com/thu-ml/SageAttention@v2.2.0"'
PACKAGE = Package(
    "sageattention", f"{INSTALL} (or, without lse and so without rings, pip install sageattention==1.0.6)",
    at_least="1.0.6", below="3", attributes=("sageattn",),
)  # fmt: skip
VARLEN = replace(PACKAGE, attributes=("sageattn_varlen",))
TRITON, HALF, FLOAT8, HOPPER = (
    "sageattn_qk_int8_pv_fp16_triton", "sageattn_qk_int8_pv_fp16_cuda", "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
)  # fmt: skip
RELEASE_2 = Package(
    "sageattention", INSTALL, at_least="2.1.1", below="3", attributes=(TRITON, HALF, FLOAT8, HOPPER, "core")
)
HUB = _hub.Kernel("SageAttention/sage-attention", version=3, attributes=("sageattn",), part="")

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    causal="top_left",
    min_capability=(8, 0),
    head_dims=frozenset({64, 128}),
    any_scale=False,
    stride_multiple=8,
    backward=False,
    arithmetic="8-bit values",
    options=frozenset({"backward"}),
)
HALF_CLAIMS = replace(CLAIMS, arithmetic="8-bit")
RELEASE_1_CLAIMS = replace(HALF_CLAIMS, lse=False)
VARLEN_CLAIMS = replace(
    RELEASE_1_CLAIMS,
    masks=frozenset({"key_keep", "segments"}),
    causal="none",  # for as many queries as keys in every sequence, which nobody knows before
    deterministic=False,  # the means of sequences are summed in any order
)


def make_pair(name: str, load: Callable[[], Any], function: str = "sageattn", claims: Claims = CLAIMS) -> OpPair:
    """The pair around a function of a module with SageAttention's, which `load` gives when a call needs it."""
    return OpPair(name, partial(_forward, load, function), _backward, claims)


def _forward(
    load: Callable[[], Any], function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the kernel; two where more queries than keys are causal."""
    kernel, seen = getattr(load(), function), q.shape[1]
    call = partial(_call, kernel, function == TRITON or not returns_lse(kernel), options.scale)
    if mask.causal is None:
        return ForwardOut(*call(q, k, v))
    if seen <= k.shape[1]:
        return ForwardOut(*call(q, k[:, :seen], v[:, :seen], causal=True))
    square, rest = call(q[:, : k.shape[1]], k, v, causal=True), call(q[:, k.shape[1] :], k, v)
    return ForwardOut(torch.cat([square[0], rest[0]], 1), torch.cat([square[1], rest[1]], 2))


def _call(
    kernel: Callable[..., Any], triton: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """out and lse; lse of 0 from a release that returns none, which is claimed not to be there."""
    length, keys = q.shape[1], k.shape[1]
    mean = k.mean(1, dtype=torch.float32)
    smooth = (k - mean.unsqueeze(1)).to(k.dtype)  # a tensor of our own: 1.0.6 writes into it
    more = (-keys % (BLOCK if causal else KEYS)) if triton else 0
    given = (_near(_longer(q, more if causal else 0)), _near(_longer(smooth, more)), _near(_longer(v, more)))
    with torch.cuda.device_of(q):
        call = partial(kernel, tensor_layout="NHD", is_causal=causal, sm_scale=scale, return_lse=True, smooth_k=False)
        result = call(*given)
        out, lse = result if isinstance(result, tuple) else (result, None)
        if more and not causal:
            ones = None if lse is not None else call(*given[:2], _longer(torch.ones_like(v), more))
            out, lse = _without_zeros(out, lse, more, ones)
    out = out[:, :length]
    if lse is None:
        return out, torch.zeros(q.shape[0], q.shape[2], length, device=q.device)
    return out, lse[:, :, :length] + scale * torch.einsum("bqhd,bhd->bhq", q.float(), mean)


def make_varlen_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around a module with SageAttention's `sageattn_varlen`."""
    return OpPair(name, partial(_varlen_forward, load), _backward, VARLEN_CLAIMS)


def _varlen_forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """Two calls of the kernel on all sequences of all samples; it returns no lse."""
    packed, _ = packing(mask, q, k)
    keys, values = packed.keys(k), _near(packed.keys(v))
    with torch.cuda.device_of(q):
        call = partial(
            load().sageattn_varlen, _near(packed.queries(q)), cu_seqlens_q=packed.q_ends, cu_seqlens_k=packed.k_ends,
            max_seqlen_q=packed.q_most, max_seqlen_k=packed.k_most, sm_scale=options.scale, smooth_k=False,
        )  # fmt: skip
        smooth = _near(_without_means(keys, packed.k_ends))
        out, share = call(k=smooth, v=values), call(k=smooth, v=torch.ones_like(values))
    out = packed.queries_back((out.float() / share.float()).to(out.dtype), q.shape[0])
    return ForwardOut(out, torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device))


def _without_means(keys: Tensor, ends: Tensor) -> Tensor:
    """(tokens, H, D) without the mean over each sequence; tokens behind the last one are none's."""
    places = torch.arange(keys.shape[0], dtype=ends.dtype, device=keys.device)
    number = torch.searchsorted(ends[1:], places, right=True)
    sums = torch.zeros(len(ends), *keys.shape[1:], device=keys.device).index_add_(0, number, keys.float())
    counts = functional.pad(ends.diff(), (0, 1), value=1).clamp(min=1)  # one more, for the tokens behind
    return (keys - (sums / counts[:, None, None])[number]).to(keys.dtype)


def _without_zeros(out: Tensor, lse: Tensor | None, zeros: int, ones: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """out and lse without that many keys whose score and value are 0.

    Scores of keys without their mean have the mean 0, so the sum of their exponentials is at least their number, and
    what is left when `zeros` is taken from the whole sum is no small difference. Where the kernel tells no sum, out for
    values of 1 (`ones`) is the share of the other keys."""
    if lse is None:
        assert ones is not None
        return (out.float() / ones.float()).to(out.dtype), None
    less = torch.log1p(-zeros * torch.exp(-lse))
    return (out.float() * torch.exp(-less).transpose(1, 2).unsqueeze(-1)).to(out.dtype), lse + less


def _near(x: Tensor) -> Tensor:
    """x, or a copy of which no element lies FAR from the first; UnsupportedError where it has too many for that."""
    if sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) < FAR:
        return x
    if x.numel() > FAR:
        raise UnsupportedError(
            message(
                "SageAttention counts elements in 32 bits", limit=f"{FAR} elements a tensor", value=str(x.numel()),
                remedy="fewer samples at once, or another backend",
            )
        )  # fmt: skip
    return x.contiguous()


def _longer(x: Tensor, more: int) -> Tensor:
    return functional.pad(x, (0, 0, 0, 0, 0, more)) if more else x


def _backward(*given: object) -> Grads:
    raise UnsupportedError(message("SageAttention has no backward", remedy='backend_options={"backward": ...}'))


def returns_lse(kernel: Callable[..., Any]) -> bool:
    """Whether it is release 2's: release 1 has no such argument, and takes anything by name without a word."""
    return "return_lse" in inspect.signature(kernel).parameters


def narrowed(device: str) -> Claims | None:
    """What is claimed where release 1 is installed."""
    older = why_not(PACKAGE) is None and not returns_lse(loaded(PACKAGE).sageattn)
    return RELEASE_1_CLAIMS if older else None


def unavailable(part: str, device: str) -> Reason | None:
    """Why a kernel of release 2 cannot be used; `part`: which of its three extensions has it, "" = none."""
    reason = why_not(RELEASE_2)
    if reason is not None or not part or getattr(loaded(RELEASE_2).core, f"{part}_ENABLED", True):
        return reason
    return Reason(
        "kernel-not-built", f"this build of sageattention has no kernels for {part}",
        f"built with that architecture in TORCH_CUDA_ARCH_LIST, and its extension _qattn_{part.lower()} imports",
        f"{part}_ENABLED is False", INSTALL,
    )  # fmt: skip


def fetch(device: str) -> Reason | None:
    """Loads the kernel of the hub; one whose `sageattn` returns no lse is refused."""
    failed = _hub.fetch(HUB, device)
    if failed is not None or returns_lse(_hub.module(HUB).sageattn):
        return failed
    return Reason("schema-moved", f"{HUB.repo} has another sageattn", "return_lse", "without it", "use sage")


def _named(name: str, summary: str, function: str, part: str, claims: Claims) -> Backend:
    return Backend(
        name,
        summary,
        {"cuda": make_pair(name, partial(loaded, RELEASE_2), function, claims)},
        partial(unavailable, part),
        packages=(RELEASE_2,),
        verified={"cuda": STAND_IN},
    )


SAGE = Backend(
    "sage",
    "SageAttention",
    {"cuda": make_pair("sage", partial(loaded, PACKAGE))},
    lambda device: why_not(PACKAGE),
    packages=(PACKAGE,),
    verified={"cuda": "docs/verified/2026-12-01-1xH200-audit-backends.md"},
    narrowed=narrowed,
)
SAGE_VARLEN = Backend(
    "sage_varlen",
    "SageAttention, packed sequences",
    {"cuda": make_varlen_pair("sage_varlen", partial(loaded, VARLEN))},
    lambda device: why_not(VARLEN),
    packages=(VARLEN,),
    verified={"cuda": STAND_IN},
)
SAGE_HUB = Backend(
    "sage_hub",
    "SageAttention from the hub",
    {"cuda": make_pair("sage_hub", partial(_hub.module, HUB))},
    lambda device: why_not(_hub.PACKAGE),
    packages=(_hub.PACKAGE,),
    verified={"cuda": STAND_IN},
    fetch=fetch,
)
KINDS = (
    _named("sage_qk_int8_pv_fp8_cuda", "SageAttention 2, 8-bit values", FLOAT8, "SM89",
           replace(CLAIMS, min_capability=(8, 9))),
    _named("sage_qk_int8_pv_fp8_cuda_sm90", "SageAttention 2, 8-bit values, Hopper", HOPPER, "SM90",
           replace(CLAIMS, min_capability=(9, 0), max_capability=(9, 0))),
    _named("sage_qk_int8_pv_fp16_cuda", "SageAttention 2, 16-bit values", HALF, "SM80", HALF_CLAIMS),
    _named("sage_qk_int8_pv_fp16_triton", "SageAttention 2, 16-bit values, Triton", TRITON, "", HALF_CLAIMS),
)  # fmt: skip
