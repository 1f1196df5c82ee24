"""The names in the registry: diffusers' own, so that what people know is found here."""

from __future__ import annotations

from diffusers.models.attention_dispatch import AttentionBackendName

from ringtrue.backends import REGISTRY
from ringtrue.select import names

FAMILIES = {
    "torch": "native_cudnn native_flash native_efficient native_math flex",
    "flash-attn 2": "flash flash_hub flash_varlen flash_varlen_hub",
    "flash-attn 3": "flash_3 flash_3_hub flash_varlen_3 flash_3_varlen_hub",
    "flash-attn 4": "flash_4 flash_4_hub",
    "quantised": "sage sage_varlen sage_hub sage_qk_int8_pv_fp8_cuda sage_qk_int8_pv_fp8_cuda_sm90 "
    "sage_qk_int8_pv_fp16_cuda sage_qk_int8_pv_fp16_triton",
    "others": "xformers cudnn_frontend native_npu native_xla aiter",
}
NOT_HERE = {"aiter_fa2_hub", "sage_blackwell_hub"}  # newer than the contract, for hardware that nobody tried here


def test_every_backend_is_there_once() -> None:
    found = [backend.name for backend in REGISTRY]
    assert sorted(found) == sorted(name for family in FAMILIES.values() for name in family.split())


def test_diffusers_names_are_ours() -> None:
    theirs = {name.value.removeprefix("_") for name in AttentionBackendName}
    assert theirs - set(names()) == NOT_HERE
