"""Modules with exactly the public signatures of optional packages, one file each: they prove the glue, no kernel."""

from __future__ import annotations

from dataclasses import replace

from ringtrue import faults
from ringtrue.backends import (
    amd_aiter,
    flash,
    flash_3,
    flash_4,
    native_npu,
    native_xla,
    sage,
    xformers,
)
from ringtrue.backends import cudnn_frontend as cudnn
from ringtrue.contract import OpPair

from . import (
    aiter_mha,
    cudnn_frontend,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    sageattention_2,
    torch_npu,
    torch_xla_kernel,
    xformers_fmha,
)
from .standin import StandIn


def _without_softcap(pair: OpPair) -> OpPair:
    """For torch's copy of the kernel, which has none."""
    return replace(pair, claims=replace(pair.claims, softcap=False))


_FLASH = flash.make_pair("flash", lambda: flash_attn_2)
_VARLEN = flash.make_varlen_pair("flash_varlen", lambda: flash_attn_2)

_SAGE = ("sage", "sage_hub", *(kind.name for kind in sage.KINDS))

STANDINS: tuple[StandIn, ...] = (
    StandIn(_FLASH, ("flash", "flash_hub")),
    StandIn(_without_softcap(_FLASH), ("flash", "flash_hub"), "cuda"),
    StandIn(_VARLEN, ("flash_varlen", "flash_varlen_hub")),
    StandIn(_without_softcap(_VARLEN), ("flash_varlen", "flash_varlen_hub"), "cuda"),
    StandIn(flash_3.make_pair("flash_3", lambda: flash_attn_3), ("flash_3", "flash_3_hub")),
    StandIn(flash_3.make_varlen_pair("flash_varlen_3", lambda: flash_attn_3), ("flash_varlen_3", "flash_3_varlen_hub")),
    StandIn(flash_4.make_pair("flash_4", lambda: flash_attn_4), ("flash_4", "flash_4_hub")),
    StandIn(xformers.make_pair("xformers", lambda: xformers_fmha), ("xformers",)),
    StandIn(sage.make_pair("sage", lambda: sageattention_2, sage.TRITON, sage.HALF_CLAIMS), _SAGE),
    StandIn(native_npu.make_pair("native_npu", lambda: torch_npu), ("native_npu",)),
    StandIn(native_xla.make_pair("native_xla", lambda: torch_xla_kernel), ("native_xla",)),
    StandIn(amd_aiter.make_pair("aiter", lambda: aiter_mha), ("aiter",)),
    StandIn(
        faults.mended(cudnn.make_pair("cudnn_frontend", lambda: cudnn_frontend), "cuda", None), ("cudnn_frontend",)
    ),
)
