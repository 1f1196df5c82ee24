"""AMD's AITER (CK and assembly kernels for Instinct GPUs), where torch is built for ROCm; its devices are "cuda" too.

Read in aiter/ops/mha.py of ROCm/aiter, at e11da61 and a later state of 2025: `flash_attn_func`, its autograd node and
`_flash_attn_backward`, the function below that node; a release in which these lack an argument is refused. Layout (B,
S, H, D); lse (B, H, Sq) float32, natural; causal is bottom-right; backward writes into the dq, dk and dv that it is
handed. Grouped heads are taken directly, `deterministic` keeps backward to the CK kernels.

Not claimed: windows (where it picks among its kernels, an end of 0 does not count as one), the bias (one for all
samples and heads) and dropout (its state is not handed out with lse).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..optional import loaded, why_not

ARGUMENTS = {
    "flash_attn_func": ("q", "k", "v", "softmax_scale", "causal", "return_lse"),
    "_flash_attn_backward": (
        "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "dbias", "dropout_p", "softmax_scale", "causal",
        "window_size_left", "window_size_right", "bias", "alibi_slopes", "deterministic",
    ),
}  # fmt: skip
PACKAGE = Package(
    "aiter.ops.mha", "pip install amd-aiter, or build ROCm/aiter (`aiter` on PyPI is another project)",
    distribution="amd-aiter", attributes=tuple(ARGUMENTS),
)  # fmt: skip

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    causal="bottom_right",
    max_head_dim=256,
    head_dim_multiple=8,
    gqa=True,
    any_scale=False,
    stride_multiple=8,
    arithmetic="16-bit",
)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around `aiter.ops.mha`, or a module with its two functions, which `load` gives when called."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the public function, without the graph that it makes of its own."""
    with torch.no_grad():
        out, lse, *_ = load().flash_attn_func(
            q, k, v, softmax_scale=options.scale, causal=mask.causal is not None, return_lse=True
        )
    return ForwardOut(out, lse)


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
    """One call of the kernel, for which grad_out and out are stored alike; dq, dk and dv come into buffers of ours."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    load()._flash_attn_backward(
        dout=grad_out.contiguous(), q=q, k=k, v=v, out=out.contiguous(), softmax_lse=lse.contiguous(), dq=dq, dk=dk,
        dv=dv, dbias=None, dropout_p=0.0, softmax_scale=options.scale, causal=mask.causal is not None,
        window_size_left=-1, window_size_right=-1, bias=None, alibi_slopes=None, deterministic=options.deterministic,
    )  # fmt: skip
    return Grads(*(grad if w else None for grad, w in zip((dq, dk, dv), wanted[:3], strict=True)))


def unavailable(device: str) -> Reason | None:
    """Why aiter cannot be used: another kind of GPU, or the package."""
    if torch.version.hip is None:
        return Reason(
            "not-rocm", "aiter runs on AMD GPUs alone", "torch built for ROCm", f"torch {torch.__version__}",
            "use flash, flash_4 or auto",
        )  # fmt: skip
    return why_not(PACKAGE) or unlike(loaded(PACKAGE))


def unlike(module: Any) -> Reason | None:
    """`schema-moved` where one of the two functions lacks an argument that a pair passes."""
    for name, arguments in ARGUMENTS.items():
        missing = set(arguments).difference(_arguments(getattr(module, name), name))
        if missing:
            problem, seen = f"this release of aiter has another {name}", f"without {', '.join(sorted(missing))}"
            return Reason("schema-moved", problem, ", ".join(arguments), seen, PACKAGE.install)
    return None


def _arguments(function: Any, name: str) -> Iterable[str]:
    """Of the operator that aiter wraps a function into, of which only the operator knows them; else of the function."""
    operator = getattr(getattr(torch.ops.aiter, name, None), "default", None)
    return inspect.signature(function).parameters if operator is None else [a.name for a in operator._schema.arguments]


BACKEND = Backend(
    "aiter",
    "AMD's AITER kernels, on ROCm",
    {"cuda": make_pair("aiter", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
)
