"""Everything that is taken from diffusers, private names included: the one file to look at when a release moves one.

Imported in calls only (`models.require` first), so that a missing or broken diffusers costs nothing but itself. All
names are the same in every release of `models.PACKAGE`.
"""

from __future__ import annotations

from diffusers.models._modeling_parallel import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ParallelConfig,
)
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention, MochiAttention

ATTENTION = (AttentionModuleMixin, Attention, MochiAttention)  # every class whose `processor` makes attention calls
Registry = _AttentionBackendRegistry

__all__ = [
    "ATTENTION",
    "AttentionBackendName",
    "ContextParallelConfig",
    "ContextParallelInput",
    "ContextParallelOutput",
    "ParallelConfig",
    "Registry",
]
