"""SageAttention: query and key quantised to int8, forward only. Release 1 (Triton) by its package, release 2 besides.

Read in 1.0.6 (PyPI) and 2.2.0 (its repository; not on PyPI). `sageattn(q, k, v, tensor_layout, is_causal, sm_scale)`
takes (B, S, H, D) as "NHD". Both subtract from the keys their mean over the sequence, which changes every score of a
query by the same amount: the weights stay, lse does not. What is done here instead of what they would do:

- The mean is subtracted here, in float32, and `scale * q . mean` added to lse in float32. 1.0.6 subtracts it in the
  caller's own key tensor, and returns no lse; 2.x adds it to lse rounded to the inputs' dtype, and for grouped heads
  not at all (it fails). Release 2's `sageattn` drops `smooth_k` and does it once more, on keys whose mean is then 0.
- Causal is right for as many queries as keys only ("top_left"): keys that no query sees are cut off, queries that see
  all keys go without.
- The Triton kernels count the keys that are missing in the last block of 64 as keys with a score of 0. Under causal no
  query sees those, but scales behind the end are read: queries and keys are padded to whole blocks. Without causal such
  a number of keys is refused (Claims.key_block); under Ulysses, where only the kernel's call knows it, here.
- 2.x makes the device of its arguments the current one: put back.

Values and weights are float16 (release 1), and with release 2's "fp8" kernels 8-bit floats. Values above 65504 are inf
in float16. "backward" of `backend_options` names an exact backend for the gradients: see exact.py.
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

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package
from ..errors import UnsupportedError, message
from ..optional import loaded, why_not

BLOCK = 128  # of queries; of keys it is 64
KEYS = 64

RELEASE_2 = 'pip install --no-build-isolation "git+https://github.com/thu-ml/SageAttention@v2.2.0"'
PACKAGE = Package(
    "sageattention", f"{RELEASE_2} (or, without lse and so without rings, pip install sageattention==1.0.6)",
    at_least="1.0.6", below="3", attributes=("sageattn",),
)  # fmt: skip

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
TRITON_CLAIMS = replace(CLAIMS, key_block=KEYS, arithmetic="8-bit")
RELEASE_1_CLAIMS = replace(TRITON_CLAIMS, lse=False)


def make_pair(name: str, load: Callable[[], Any], claims: Claims = CLAIMS, function: str = "sageattn") -> OpPair:
    """The pair around a function of a module with SageAttention's, which `load` gives when a call needs it."""
    return OpPair(name, partial(_forward, load, function, claims), _backward, claims)


def _forward(
    load: Callable[[], Any],
    function: str,
    claims: Claims,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    rng: None,
    options: Options,
) -> ForwardOut:
    """One call of the kernel; two where more queries than keys are causal."""
    kernel = getattr(load(), function)
    blocks = claims.key_block is not None or not returns_lse(kernel)
    call, seen = partial(_call, kernel, blocks, options.scale), q.shape[1]
    if mask.causal is None:
        return ForwardOut(*call(q, k, v))
    if seen <= k.shape[1]:
        return ForwardOut(*call(q, k[:, :seen], v[:, :seen], causal=True))
    square, rest = call(q[:, : k.shape[1]], k, v, causal=True), call(q[:, k.shape[1] :], k, v)
    return ForwardOut(torch.cat([square[0], rest[0]], 1), torch.cat([square[1], rest[1]], 2))


def _call(
    kernel: Callable[..., Any], blocks: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """out and lse; lse of 0 from a release that returns none, which is claimed not to be there."""
    length = q.shape[1]
    mean = k.mean(1, dtype=torch.float32)
    smooth = (k - mean.unsqueeze(1)).to(k.dtype)  # a tensor of our own: 1.0.6 writes into it
    given = [q, smooth, v]
    if blocks and causal:
        given = [functional.pad(x, (0, 0, 0, 0, 0, -length % BLOCK)) for x in given]
    else:
        _whole(blocks, k.shape[1])
    with torch.cuda.device_of(q):
        result = kernel(*given, tensor_layout="NHD", is_causal=causal, sm_scale=scale, return_lse=True, smooth_k=False)
    if not isinstance(result, tuple):
        return result[:, :length], torch.zeros(q.shape[0], q.shape[2], length, device=q.device)
    out, lse = result
    return out[:, :length], lse[:, :, :length] + scale * torch.einsum("bqhd,bhd->bhq", q.float(), mean)


def _whole(blocks: bool, keys: int) -> None:
    if blocks and keys % KEYS:
        raise UnsupportedError(
            message(
                "this kernel counts the keys that are missing in its last block",
                limit=f"a multiple of {KEYS} keys, or causal from the first",
                value=str(keys),
                remedy="pad and mask with another backend",
            )
        )


def _backward(*given: object) -> Grads:
    raise UnsupportedError(message("SageAttention has no backward", remedy='backend_options={"backward": ...}'))


def returns_lse(kernel: Callable[..., Any]) -> bool:
    """Whether it is release 2's: release 1 has no such argument, and takes anything by name without a word."""
    return "return_lse" in inspect.signature(kernel).parameters


def narrowed(device: str) -> Claims | None:
    """What is claimed where release 1 is installed."""
    older = why_not(PACKAGE) is None and not returns_lse(loaded(PACKAGE).sageattn)
    return RELEASE_1_CLAIMS if older else None


SAGE = Backend(
    "sage",
    "SageAttention",
    {"cuda": make_pair("sage", partial(loaded, PACKAGE))},
    lambda device: why_not(PACKAGE),
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
    narrowed=narrowed,
)
