"""Every backend, one line each. README.md here says how to add one."""

from __future__ import annotations

from ..contract import Backend
from . import (
    amd_aiter,
    cudnn_frontend,
    flash,
    flash_3,
    flash_4,
    flex,
    native_cudnn,
    native_efficient,
    native_flash,
    native_math,
    native_npu,
    native_xla,
    sage,
    xformers,
)

REGISTRY: tuple[Backend, ...] = (
    native_cudnn.BACKEND,
    native_flash.BACKEND,
    native_efficient.BACKEND,
    native_math.BACKEND,
    flash.FLASH,
    flash.FLASH_HUB,
    flash.FLASH_VARLEN,
    flash.FLASH_VARLEN_HUB,
    flash_3.FLASH_3,
    flash_3.FLASH_VARLEN_3,
    flash_3.FLASH_3_HUB,
    flash_3.FLASH_3_VARLEN_HUB,
    flash_4.FLASH_4,
    flash_4.FLASH_4_HUB,
    cudnn_frontend.BACKEND,
    xformers.BACKEND,
    flex.BACKEND,
    sage.SAGE,
    sage.SAGE_VARLEN,
    sage.SAGE_HUB,
    *sage.KINDS,
    native_npu.BACKEND,
    native_xla.BACKEND,
    amd_aiter.BACKEND,
)
