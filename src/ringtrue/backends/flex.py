"""torch's FlexAttention: the kernels that it writes for a mask and a change of scores given as functions of the place.

The pair calls the two higher order ops below torch.nn.attention.flex_attention, so that backward takes an out and lse
from more keys. They are private: pinned by their arguments, the same in torch 2.11 to 2.13. Seen there: (B, H, S, D);
lse, float32, counts in base 2, in both ops, and so does a gradient of lse (at 1e6 that costs float32's last bits); a
row that sees nothing is 0 with lse -inf; grouped heads as they are; head dims from 16 on where compiled.
The block mask goes as a tuple whose last item is the mask's function.

`backend_options={"mask_mod": f, "score_mod": g}` are torch's functions of (batch, head, query, key) and of (score,
batch, head, query, key): f hides beside the mask, g changes the scaled scores after softcap and before a float mask.
Tensors in their closures and globals are read at every call and get no gradients. What is traced and compiled is kept
per function: define them once, not in every call.

On CUDA the ops are compiled to Triton kernels by torch.compile, in seconds: once for each kind of mask, softcap,
scale, dtype, head dim and number of heads, whatever the lengths, and skip blocks that a causal limit, a window,
segments, a key mask or a bool mask hides. On a CPU they are called as they are: torch holds all scores there and runs
the functions under vmap, in float32 but for products with 16-bit inputs. Compiled, torch has no backward there.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..optional import why_not
from . import _flex_compiled
from ._flex_blocks import block_mask, block_mask_length
from ._flex_mods import Mods, all_layers, mods_of, ops

LN2 = math.log(2.0)
TRITON = Package("triton", "pip install triton, the release that this torch was built with")
FUNCTIONS = frozenset({"mask_mod", "score_mod"})
ARGUMENTS = {
    "flex_attention": (
        "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_mod_other_buffers",
        "mask_mod_other_buffers",
    ),
    "flex_attention_backward": (
        "query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph",
        "block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers",
    ),
    "create_fw_bw_graph": ("score_mod", "index_values", "other_buffers"),
}  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
    """One call of the op as it is."""
    mods = mods_of(mask, options, q)
    with all_layers():
        out, lse, _ = ops().flex_attention(
            *_heads_first(*_precise(q, k, v)),
            mods.score,
            _places(mods),
            options.scale,
            {},
            mods.score_tensors,
            mods.mask_tensors,
        )
    return ForwardOut(out.transpose(1, 2).to(q.dtype), (lse * LN2).to(torch.float32))


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One call of the op as it is; all of dq, dk, dv come together."""
    mods = mods_of(mask, options, q)
    with all_layers():
        grads = ops().flex_attention_backward(
            *_given(*_precise(grad_out, grad_lse, q, k, v, out, lse)), mods.score, mods.back, _places(mods),
            options.scale, {}, mods.score_tensors, mods.mask_tensors,
        )  # fmt: skip
    return _wanted(tuple(x.to(q.dtype) for x in grads[:3]), wanted)


def _precise(*tensors: Any) -> tuple[Any, ...]:
    """float32 in float64, on a CPU: an lse in base 2 is rounded once more, which our rule does not leave room for."""
    if any(x is not None and x.dtype not in (torch.float32, torch.float64) for x in tensors):
        return tensors
    return tuple(x if x is None else x.double() for x in tensors)


def compiled_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
    """One call of the kernel that was compiled for such calls."""
    mods = mods_of(mask, options, q)
    blocks = block_mask(mask, q, k, mods.kind.mask_mod is not None, of_keys=False)
    out, lse = _flex_compiled.forward(
        mods.kind, options.scale, _heads_first(q, k, v), blocks, mods.score_tensors, mods.mask_tensors
    )
    return ForwardOut(out.transpose(1, 2), lse * LN2)


def compiled_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One call of the kernel that was compiled for such calls; all of dq, dk, dv come together."""
    mods = mods_of(mask, options, q)
    blocks = block_mask(mask, q, k, mods.kind.mask_mod is not None, of_keys=True)
    given = _given(grad_out, grad_lse, q, k, v, out, lse)
    grads = _flex_compiled.backward(mods.kind, options.scale, given, blocks, mods.score_tensors, mods.mask_tensors)
    return _wanted(grads, wanted)


def _given(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor | None, ...]:
    """q, k, v, out, lse, grad_out and the gradient of lse as backward has them; kernels read lse without strides."""
    base_2 = (lse / LN2).contiguous()
    return *_heads_first(q, k, v, out), base_2, grad_out.transpose(1, 2), None if grad_lse is None else grad_lse * LN2


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _wanted(grads: tuple[Tensor, ...], wanted: Wanted) -> Grads:
    return Grads(*(x.transpose(1, 2) if w else None for x, w in zip(grads[:3], wanted[:3], strict=True)))


def _places(mods: Mods) -> tuple[Any, ...]:
    """A block mask without blocks, which only compiled kernels look at, and the mask's function."""
    return *(None,) * 12, mods.mask


def moved() -> Reason | None:
    """`schema-moved` where one of the private functions has other arguments than it had when it was tried."""
    try:
        module = ops()
    except ImportError:
        module = None
    for name, pinned in ARGUMENTS.items():
        found = getattr(module, name, None)
        call = type(found).__call__ if isinstance(found, torch._ops.HigherOrderOperator) else found
        seen = () if call is None else tuple(n for n in inspect.signature(call).parameters if n != "self")
        if seen != pinned:
            problem = f"torch {torch.__version__} changed the private {name} of FlexAttention"
            return Reason("schema-moved", problem, ", ".join(pinned), ", ".join(seen) or "absent", "use native_math")
    return None


def other_block_mask() -> Reason | None:
    """`schema-moved` where block masks have another form than they had when they were tried."""
    length = block_mask_length()
    problem = f"torch {torch.__version__} changed the block mask of FlexAttention"
    return None if length in (13, 17) else Reason("schema-moved", problem, "13 or 17 items", str(length), "native_math")


def unavailable(device: str) -> Reason | None:
    """Why it cannot run here."""
    return moved() or (why_not(TRITON) or other_block_mask() if device == "cuda" else None)


CPU = Claims(
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    masks=frozenset({"dense_bool", "dense_float", "key_keep", "key_bias", "segments", "window"}),
    causal="offset",
    gqa=True,
    value_dim=True,
    any_strides=True,
    softcap=True,
    dlse=True,
    arithmetic="16-bit",
    options=FUNCTIONS,
    functions=FUNCTIONS,
)
CUDA = replace(
    CPU,
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    min_capability=(8, 0),
    head_dims=frozenset({16, 32, 64, 128, 256}),  # torch has blocks tried for these, and for D == Dv
    value_dim=False,
    any_strides=False,
    stride_multiple=8,
)
BACKEND = Backend(
    "flex",
    "torch's FlexAttention",
    {
        "cpu": OpPair("flex", forward, backward, CPU),
        "cuda": OpPair("flex", compiled_forward, compiled_backward, CUDA),
    },
    unavailable,
)
