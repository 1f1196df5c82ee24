"""`native`: which of its own kernels torch would take for a call; no kernel itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .contract import Mask, Options

NAMES = {
    SDPBackend.MATH: "native_math",
    SDPBackend.FLASH_ATTENTION: "native_flash",
    SDPBackend.EFFICIENT_ATTENTION: "native_efficient",
    SDPBackend.CUDNN_ATTENTION: "native_cudnn",
}
ANY = "native_math"  # takes what the others cannot
SCHEMA = (
    "aten::_fused_sdp_choice(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> int"
)


def torchs_choice(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> str:
    """The backend whose kernel F.scaled_dot_product_attention would take, by torch's own switches and priorities.

    What torch's call has no word for (windows, segments, softcap, causal offsets) is left out of the question; whether
    the backend honours it is judged after. `native_math` where torch moved the question.
    """
    op = getattr(getattr(torch.ops.aten, "_fused_sdp_choice", None), "default", None)
    if op is None or str(op._schema) != SCHEMA or q.device.type == "meta":
        return ANY
    seen = mask.dense
    for keys in (mask.key_keep, mask.key_bias):
        seen = keys[:, None, None, :] if seen is None and keys is not None else seen
    choice = op(
        *(x.transpose(1, 2) for x in (q, k, v)), seen, options.dropout_p, mask.causal is not None and seen is None,
        scale=options.scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return next((name for kernel, name in NAMES.items() if int(kernel.value) == choice), ANY)
