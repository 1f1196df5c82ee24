"""FlexAttention's two ops compiled: one compilation a kind of call, dtype, head dim and number of heads, not a length.

torch.compile sees a function that hands its tensors to a leaf; the leaf, which Dynamo does not look into, calls the op
with the functions of a `Kind`, and AOTAutograd traces it. So backward, which torch's public call only reaches by
autograd, is compiled as forward is. Each kind has code of its own: Dynamo counts recompilations per code object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

from ..errors import UnsupportedError, message
from ._flex_mods import Kind, all_layers, mask_mod, ops, score_mod, slope

Tensors = tuple[Any, ...]
DYNAMIC: bool | None = True  # lengths are symbols from the first call on: one compilation serves them all
COMPILER = "inductor"
# torch's public call sets these; products of float32 inputs stay in float32, whatever torch's switch for TF32 says
KERNEL_OPTIONS = {
    "BACKEND": "TRITON", "FLOAT32_PRECISION": "'ieee'", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
}  # fmt: skip


def kernel_options(kind: Kind, which: str, row_bytes: int) -> dict[str, Any]:
    """Those of a call whose query of one head has that many bytes.

    torch's own blocks leave no shared memory for the blocks of a dense mask that its kernels keep two of ahead (out of
    resources at head dim 64 on an H200): beside one, blocks are small and nothing is loaded ahead.
    """
    found = dict(KERNEL_OPTIONS)
    if kind.dense:
        size = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        names = {"forward": ("BLOCK_M", "BLOCK_N"), "backward": ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}
        found |= dict.fromkeys(names[which], size) | {"num_stages": 1, "num_warps": 4}
    return found


def forward(kind: Kind, scale: float, qkv: Tensors, blocks: Tensors, scores: Tensors, places: Tensors) -> Tensors:
    """out (B, H, Sq, Dv) and lse in base 2; `qkv` heads first, `blocks` as `_flex_blocks.block_mask` gives them."""
    return _run(kind, scale, "forward", qkv, blocks, scores, places)


def backward(kind: Kind, scale: float, given: Tensors, blocks: Tensors, scores: Tensors, places: Tensors) -> Tensors:
    """dq, dk, dv; `given` is q, k, v, out, lse, grad_out, and the gradient of lse or None."""
    return _run(kind, scale, "backward", given, blocks, scores, places)


def _run(kind: Kind, scale: float, which: str, given: Tensors, blocks: Tensors, *tensors: Tensors) -> Tensors:
    call = _compiled(kind, scale, which, blocks[-2:], DYNAMIC, COMPILER)
    limits = torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)
    for x in given[:3]:  # heads and head dims are no symbols
        torch._dynamo.mark_static(x, 1)
        torch._dynamo.mark_static(x, 3)
    try:
        with torch.no_grad(), all_layers(), limits:
            found: Tensors = call(given, blocks[:-2], *tensors)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        said = str(error.inner_exception).strip().splitlines()[:1]
        problem = f"flex: torch cannot compile its {which} kernel for this call"
        raise UnsupportedError(
            message(problem, value="".join(said), remedy='use backend="native_math" for it')
        ) from error
    return found


@lru_cache(maxsize=1024)
def _compiled(
    kind: Kind, scale: float, which: str, sizes: Tensors, dynamic: bool | None, compiler: str
) -> Callable[..., Tensors]:
    made = {"forward": _forward_leaf, "backward": _backward_leaf}[which](kind, scale, sizes)
    leaf = torch.compiler.allow_in_graph(made)

    def call(given: Tensors, blocks: Tensors, scores: Tensors, places: Tensors) -> Tensors:
        return leaf(given, blocks, scores, places)

    code = call.__code__.replace(co_name=f"flex_{which}")
    own = FunctionType(code, call.__globals__, code.co_name, call.__defaults__, call.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=dynamic, backend=compiler)


def _forward_leaf(kind: Kind, scale: float, sizes: Tensors) -> Callable[..., Tensors]:
    score, mask = score_mod(kind), mask_mod(kind)

    def leaf(given: Tensors, blocks: Tensors, scores: Tensors, places: Tensors) -> Tensors:
        q, k, v = given
        block_mask = (q.shape[2], k.shape[2], *blocks, *sizes, mask)
        options = kernel_options(kind, "forward", q.shape[3] * q.itemsize)
        out, lse, _ = ops().flex_attention(q, k, v, score, block_mask, scale, options, scores, places)
        return out, lse

    return leaf


def _backward_leaf(kind: Kind, scale: float, sizes: Tensors) -> Callable[..., Tensors]:
    score, back, mask = score_mod(kind), slope(kind), mask_mod(kind)

    def leaf(given: Tensors, blocks: Tensors, scores: Tensors, places: Tensors) -> Tensors:
        q, k, v, *ends = given
        block_mask = (q.shape[2], k.shape[2], *blocks, *sizes, mask)
        options = kernel_options(kind, "backward", q.shape[3] * q.itemsize)
        found = ops().flex_attention_backward(q, k, v, *ends, score, back, block_mask, scale, options, scores, places)
        return tuple(found[:3])

    return leaf
