"""xformers' memory-efficient attention, by its public calls outside of autograd: forward with lse, and backward.

Read in xformers 0.0.35 (xformers/ops/fmha: __init__, common, cutlass, flash, attn_bias). Its operators call torch's
flash kernel (or flash-attn's where that is installed; 16 bits, D == Dv, no bias) or torch's efficient kernel, and
each call takes the first whose list of reasons against the inputs is empty. Layout (B, S, H, D); lse (B, H, Sq),
which the efficient kernel pads with +inf to a multiple of 32 queries and which is padded again on its way back. A
bias has q's dtype and the full (B, H, Sq, Sk), expanded or not; its gradient is not among what the public backward
returns, and beside causal it has no backward: hence `alone`. Strides must be multiples of 8 also where a dim is 1.
Dropout is refused by these calls. LocalAttentionFromBottomRightMask is taken by the flash operator only, neither in
float32 nor beside a bias: windows are written out by `edge`. Under torch's switch for deterministic algorithms
backward is the efficient kernel's.

A wheel that was built for another torch imports and then refuses every input: `unavailable` asks the operators.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..optional import anew, loaded, why_not

ARGUMENTS = {
    "memory_efficient_attention_forward_requires_grad": ("query", "key", "value", "attn_bias", "scale"),
    "memory_efficient_attention_backward": ("grad", "output", "lse", "query", "key", "value", "attn_bias", "scale"),
}
PACKAGE = Package(
    "xformers.ops.fmha",
    "pip install --no-build-isolation --no-binary xformers xformers (builds it for the torch that is here)",
    distribution="xformers",
    at_least="0.0.35",
    below="0.1",
    attributes=(*ARGUMENTS, "attn_bias.LowerTriangularFromBottomRightMask", "Inputs", "cutlass.FwOp", "cutlass.BwOp"),
)
ALIGNED = 8

CLAIMS = Claims(
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_float"}),
    bias_dtype="input",
    causal="bottom_right",
    alone=frozenset({"dense_float"}),
    min_capability=(8, 0),
    max_capability=(9, 0),
    head_dim_multiple=ALIGNED,
    value_dim=True,
    any_scale=False,
    stride_multiple=ALIGNED,
    deterministic=False,
    deterministic_by_switch=True,
    arithmetic="16-bit",
)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around `xformers.ops.fmha`, or a module with the same functions, which `load` gives when called."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of an operator of its choice, lse cut to the queries there are."""
    fmha = load()
    q, k, v = map(_placed, (q, k, v))
    bias = _attn_bias(fmha, mask, q, k)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=options.scale)
    return ForwardOut(out, lse[:, :, : q.shape[1]])


def _backward(
    load: Callable[[], Any],
    grad_out: Tensor,
    grad_lse: None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One call of an operator of its choice; the efficient kernel reads out as contiguous."""
    fmha = load()
    q, k, v = map(_placed, (q, k, v))
    grads = fmha.memory_efficient_attention_backward(
        grad_out.contiguous(), out.contiguous(), lse.contiguous(), q, k, v, _attn_bias(fmha, mask, q, k),
        scale=options.scale,
    )  # fmt: skip
    return Grads(*(grad if w else None for grad, w in zip(grads, wanted[:3], strict=True)))


def _attn_bias(fmha: Any, mask: Mask, q: Tensor, k: Tensor) -> Any:
    """The mask as xformers writes it."""
    if mask.dense is not None:
        return _placed(mask.dense.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    return None if mask.causal is None else fmha.attn_bias.LowerTriangularFromBottomRightMask()


def _placed(x: Tensor) -> Tensor:
    """x with the stride of a dim of 1 such as the operators ask of any dim: it is never read."""
    if all(n != 1 or s % ALIGNED == 0 for n, s in zip(x.shape[:-1], x.stride(), strict=False)):
        return x
    stride = (0 if n == 1 else s for n, s in zip(x.shape[:-1], x.stride(), strict=False))
    return x.as_strided(x.shape, (*stride, x.stride(-1)))


def unavailable(device: str) -> Reason | None:
    """Why the package, or each of its operators, cannot be used."""
    return why_not(PACKAGE) or unlike(loaded(PACKAGE)) or refused(device)


def unlike(fmha: Any) -> Reason | None:
    """`schema-moved` where one of the two functions lacks an argument that a pair passes."""
    for name, arguments in ARGUMENTS.items():
        there = inspect.signature(getattr(fmha, name)).parameters
        missing = [a for a in arguments if a not in there]
        if missing:
            problem, seen = f"this release of xformers has another {name}", f"without {', '.join(missing)}"
            return Reason("schema-moved", problem, ", ".join(arguments), seen, PACKAGE.install)
    return None


@cache
def refused(device: str) -> Reason | None:
    """`package-broken` with what xformers itself says where its operators refuse any input; runs no kernel."""
    fmha = loaded(PACKAGE)
    library = importlib.import_module("xformers._cpp_lib")
    cause = getattr(library, "_cpp_library_load_exception", None)  # why the operators say what they say
    said = [] if cause is None else [" ".join(str(cause).partition("Please")[0].split())]
    if device == "cuda" and torch.cuda.is_available():
        if (
            not (CLAIMS.min_capability or (0,))
            <= torch.cuda.get_device_capability()
            <= (CLAIMS.max_capability or (99,))
        ):
            return None  # told by the claims
        tensors = (torch.empty(1, ALIGNED, 1, ALIGNED, dtype=torch.float16, device=device) for _ in range(3))
        inputs = fmha.Inputs(*tensors)
        reasons = [r for op in (fmha.cutlass.FwOp, fmha.cutlass.BwOp) for r in op.not_supported_reasons(inputs)]
        said = [*dict.fromkeys(reasons), *said] if reasons else []
    if not said:
        return None
    release = getattr(importlib.import_module("xformers"), "__version__", "")
    return Reason(
        "package-broken", f"xformers is installed, but its operators refuse every input: {'; '.join(said)}",
        "operators built for this torch", f"xformers {release}, torch {torch.__version__}", anew(PACKAGE.install),
    )  # fmt: skip


BACKEND = Backend(
    "xformers",
    "xformers' memory-efficient attention",
    {"cuda": make_pair("xformers", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
)
