"""torch's own: F.scaled_dot_product_attention, as torch chooses and with each of its kernels alone.

torch/default      whichever kernel torch takes
torch/NAME         under torch.nn.attention.sdpa_kernel(NAME), which raises where that kernel cannot: nothing falls back

Causal with offset 0 and no other mask is `is_causal=True`. Every other causal call is written as torch asks for it
(mask and is_causal together are an error there): as a dense mask. Windows and segments are not: torch has no word for
them. Claims are from the documentation of 2.11 to 2.13 and from what the kernels' own checks say (sdp_utils): a float
mask is of query's dtype; rows that see nothing give zeros (since 2.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..audit.subject import Call, Plain, Says, Subject
from ._torch_calls import dense_kinds, given, heads_first, other_dtype, seeded, unsupported

KERNELS = {
    "default": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HALVES = frozenset({"bfloat16", "float16"})
# everything that the documentation promises without naming a kernel
DOCUMENTED = Says(
    dtypes=HALVES | {"float32", "float64"},
    masks=frozenset({"bool", "float", "key_bool", "key_float"}),
    causal="any",
    gqa=True,
    value_dim=True,
    head_dims=(1 << 30, 1),
    dropout=True,
    mask_grad=True,
    empty=True,
    blind=True,
    deterministic=False,
)
CPU = {
    "default": replace(DOCUMENTED, deterministic=True),
    "math": replace(DOCUMENTED, deterministic=True),
    "flash": replace(DOCUMENTED, value_dim=False, dropout=False, mask_grad=False, empty=False, deterministic=True),
}
CUDA = {
    "default": DOCUMENTED,
    "math": DOCUMENTED,
    "flash": replace(
        DOCUMENTED, dtypes=HALVES, masks=frozenset(), causal="square", value_dim=False, head_dims=(256, 1),
        mask_grad=False, empty=False,
    ),
    "efficient": replace(
        DOCUMENTED, dtypes=HALVES | {"float32"}, gqa=False, head_dims=(1 << 30, 8), empty=False,
    ),
    "cudnn": replace(DOCUMENTED, dtypes=HALVES, head_dims=(128, 8), mask_grad=False, empty=False),
}  # fmt: skip


def found(device: str) -> Iterator[Subject]:
    """Each kernel that torch has for the device."""
    about = f"torch {torch.__version__}"
    if device == "cuda" and torch.backends.cudnn.is_available():
        about += f", cuDNN {torch.backends.cudnn.version()}"
    for name, says in {"cpu": CPU, "cuda": CUDA}.get(device, {}).items():
        yield Sdpa(name, says, about)


class Sdpa(Plain):
    """One kernel."""

    def __init__(self, kernel: str, says: Says, about: str) -> None:
        super().__init__(f"torch/{kernel}", self.attend_call, says, about, text=self.lines)
        object.__setattr__(self, "kernel", kernel)

    kernel: str

    def against(self, call: Call) -> str:
        mine = {
            "cudnn": ("a single query", call.query.shape[1] == 1),
            "flash": ("a last stride that is not 1", any(x.stride(3) != 1 for x in (call.query, call.key, call.value))),
        }
        text, holds = mine.get(self.kernel, ("", False))
        return "; ".join(filter(None, (self.says.against(call), other_dtype(call), text if holds else "")))

    def attend_call(self, call: Call) -> Tensor:
        unsupported(call, "window", "segments", "softcap")
        query, key, value = heads_first(call.query, call.key, call.value)
        seeded(call)
        causal = by_flag(call)
        with self.chosen():
            out = scaled_dot_product_attention(
                query, key, value, None if causal else call.dense(places=True), call.dropout_p, causal,
                scale=None if call.default_scale else call.scale, enable_gqa=call.group > 1,
            )  # fmt: skip
        return out.transpose(1, 2)

    def chosen(self) -> AbstractContextManager[None]:
        """torch's choice left alone, or no kernel but one."""
        backend = KERNELS[self.kernel]
        return nullcontext() if backend is None else sdpa_kernel(backend)

    def lines(self, call: Call) -> str:
        causal = by_flag(call)
        arguments = given(
            (
                ("attn_mask=attn_mask", not causal and (dense_kinds(call) or call.mask.causal is not None)),
                (f"dropout_p={call.dropout_p}", call.dropout_p > 0),
                ("is_causal=True", causal),
                (f"scale={call.scale!r}", not call.default_scale),
                ("enable_gqa=True", call.group > 1),
            )
        )
        backend = KERNELS[self.kernel]
        attend = f"out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)){arguments})"
        if backend is not None:
            attend = f"with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.{backend.name}):\n    {attend}"
        return f"import torch\nimport torch.nn.functional as F\n{attend}\nout = out.transpose(1, 2)"


def by_flag(call: Call) -> bool:
    """Whether the mask is what is_causal=True means: top-left, and nothing else."""
    return call.mask.causal == 0 and not dense_kinds(call)
