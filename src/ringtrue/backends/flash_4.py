"""FlashAttention-4 (CuTe DSL kernels for Hopper and Blackwell), by the `flash-attn-4` package or from the hub.

The package's public calls are autograd functions; a pair calls the two functions below them, `_flash_attn_fwd` and
`_flash_attn_bwd` of `flash_attn.cute.interface`. A release in which these take other arguments is refused.

As read in 4.0.0b36, and seen on an H200 where docs/verified says so: (B, S, H, D) as it is, lse (B, H, Sq); a window is
(left, right) from the diagonal that ends in the last query and the last key, None = no limit, (None, 0) = causal;
softcap through an approximate tanh; the gradient of lse goes into the kernel's own sums, at no further call; no bias
and no dropout. On Hopper, head dims are multiples of 8 up to 256, of which only multiples of 32 get a right dq
(faults.py), and the backward of grouped heads wants D == Dv, hence no `value_dim`. On Blackwell they end at 128 (256 is
another kernel, without softcap and gradient of lse). Ampere has no backward, and Blackwell's consumer GPUs none with
softcap: neither is claimed. 4.0.0b30, which the hub has, takes the same arguments; its backward takes head dims up to
192 (and 256, which is not claimed).

Kernels are compiled when first called (seconds), per dtype, head dim, heads per key head, kinds of ends, softcap,
determinism, gradient of lse or not, and for calls of a single block of queries or keys.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..optional import loaded, why_not
from . import _hub

FUNCTIONS = ("_flash_attn_fwd", "_flash_attn_bwd")
PACKAGE = Package(
    "flash_attn.cute.interface",  # flash_attn.cute itself calls its version 0.0.0
    'pip install "flash-attn-4[cu13]==4.0.0b36" (without [cu13] where torch is built for CUDA 12)',
    distribution="flash-attn-4",
    at_least="4.0.0b36",
    below="4.1",
    pre=True,
    attributes=FUNCTIONS,
)
HUB = _hub.Kernel("kernels-community/flash-attn4", version=0, attributes=FUNCTIONS, part="interface")
HUB_AT_LEAST = "4.0.0b30"
DSL = Package(
    "cutlass.cute",
    'pip install "nvidia-cutlass-dsl[cu13]>=4.6.2" (without [cu13] where torch is built for CUDA 12)',
    distribution="nvidia-cutlass-dsl",
    at_least="4.6.2",
)
FFI = Package("tvm_ffi", 'pip install "apache-tvm-ffi>=0.1.11,<0.2"', "apache-tvm-ffi", at_least="0.1.11", below="0.2")
NEEDED = (DSL, Package("quack", 'pip install "quack-kernels>=0.5.3"', "quack-kernels", at_least="0.5.3"), FFI)
DSL_PARTS = ("", "-libs-core", "-libs-base", "-libs-cu12", "-libs-cu13")

FORWARD_ARGUMENTS = (
    "q", "k", "v", "softmax_scale", "softcap", "window_size_left", "window_size_right", "return_lse",
)  # fmt: skip
BACKWARD_ARGUMENTS = (
    "q", "k", "v", "out", "dout", "lse", "softmax_scale", "softcap", "window_size_left", "window_size_right",
    "deterministic", "dlse",
)  # fmt: skip

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"window"}),
    causal="bottom_right",
    min_capability=(9, 0),
    max_capability=(9, 0),
    max_head_dim=256,
    head_dim_multiple=32,  # faults.py
    gqa=True,
    any_scale=False,
    stride_multiple=8,
    softcap=True,
    dlse=True,
    arithmetic="16-bit",
)
HUB_CLAIMS = replace(CLAIMS, max_head_dim=192)


def make_pair(name: str, load: Callable[[], Any], claims: Claims = CLAIMS) -> OpPair:
    """The pair around the module that `load()` gives: `flash_attn.cute.interface`, or one with the same functions."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), claims)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the kernel, which runs on the current device and not on that of its arguments."""
    left, right = _ends(mask, q, k)
    with torch.cuda.device_of(q):
        out, lse, *_ = load()._flash_attn_fwd(
            q, k, v, softmax_scale=options.scale, softcap=options.softcap, window_size_left=left,
            window_size_right=right, return_lse=True,
        )  # fmt: skip
    return ForwardOut(out, lse)


def _backward(
    load: Callable[[], Any],
    grad_out: Tensor,
    grad_lse: Tensor | None,
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
    """One call of the kernel; all of dq, dk, dv come together."""
    left, right = _ends(mask, q, k)
    with torch.cuda.device_of(q):
        grads = load()._flash_attn_bwd(
            q, k, v, out, grad_out, lse, softmax_scale=options.scale, softcap=options.softcap, window_size_left=left,
            window_size_right=right, deterministic=options.deterministic, dlse=grad_lse,
        )  # fmt: skip
    return Grads(*(x if w else None for x, w in zip(grads, wanted[:3], strict=True)))


def _ends(mask: Mask, q: Tensor, k: Tensor) -> tuple[int | None, int | None]:
    """How far a query sees to the left and to the right of the diagonal that ends in the last key; None = all."""
    diagonal = k.shape[1] - q.shape[1]
    return (
        None if mask.since is None else diagonal - mask.since,
        None if mask.causal is None else mask.causal - diagonal,
    )


def unavailable(device: str) -> Reason | None:
    """Why the package cannot be used. Where its import failed, or parts do not fit together, the part at fault."""
    reason = why_not(PACKAGE)
    if reason is not None and reason.code != "package-broken":
        return reason
    at_fault = mixed() or next((r for r in map(why_not, NEEDED) if r is not None), None)
    return at_fault or reason or unlike(loaded(PACKAGE))


@cache
def mixed() -> Reason | None:
    """Parts of the DSL come as distributions of their own, in one folder: those of two releases break in many ways."""
    seen = {}
    for part in DSL_PARTS:
        try:
            seen["nvidia-cutlass-dsl" + part] = version("nvidia-cutlass-dsl" + part)
        except PackageNotFoundError:
            continue
    if len(set(seen.values())) < 2:
        return None
    found = ", ".join(f"{name} {number}" for name, number in seen.items())
    newest = max(seen.values(), key=TorchVersion)
    remedy = f"pip install --force-reinstall {' '.join(f'{name}=={newest}' for name in seen)}"
    return Reason("package-version", "parts of nvidia-cutlass-dsl are of different releases", "one", found, remedy)


def unlike(module: Any) -> Reason | None:
    """`schema-moved` where the two functions lack an argument that a pair passes."""
    for name, arguments in zip(FUNCTIONS, (FORWARD_ARGUMENTS, BACKWARD_ARGUMENTS), strict=True):
        there = inspect.signature(getattr(module, name)).parameters
        missing = [a for a in arguments if a not in there]
        if missing:
            return Reason(
                "schema-moved", f"this release of flash-attn-4 has another {name}", ", ".join(arguments),
                f"without {', '.join(missing)}", PACKAGE.install,
            )  # fmt: skip
    return None


def hub_unavailable(device: str) -> Reason | None:
    """Why a kernel of the hub could not be loaded, as far as can be told without it; it brings its own quack."""
    return why_not(_hub.PACKAGE) or mixed() or why_not(DSL) or why_not(FFI)


def fetch(device: str) -> Reason | None:
    """Loads the kernel of the hub; a build older than the one that was read is refused."""
    failed = _hub.fetch(HUB, device)
    if failed is not None:
        return failed
    module = _hub.module(HUB)
    seen = str(getattr(sys.modules.get(module.__package__), "__version__", ""))
    if not seen or TorchVersion(seen) < HUB_AT_LEAST:
        problem = f"this build of {HUB.repo} is not supported"
        return Reason("package-version", problem, f">= {HUB_AT_LEAST}", seen or "it does not say", "use flash_4")
    return unlike(module)


FLASH_4 = Backend(
    "flash_4",
    "FlashAttention-4",
    {"cuda": make_pair("flash_4", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE, *NEEDED),
    verified={"cuda": "docs/verified/2026-12-01-1xH200-audit-backends.md"},
)
FLASH_4_HUB = Backend(
    "flash_4_hub",
    "FlashAttention-4 from the hub",
    {"cuda": make_pair("flash_4_hub", partial(_hub.module, HUB), HUB_CLAIMS)},
    hub_unavailable,
    packages=(_hub.PACKAGE, DSL, FFI),
    verified={"cuda": STAND_IN},
    fetch=fetch,
)
