"""Faults to plant into what is right: for the demo, the self-test of the audit, and the tests.

historical     past faults of public dispatchers, `OpPair -> OpPair`; the demo's
pairs, calls   others of one call, `OpPair -> OpPair`
memories       pairs that remember an earlier call
between_ranks  patches of one place in ringtrue.parallel, for the time of a block
registry       all of them, with what must catch each
"""

from .between_ranks import in_process
from .features import FEATURES
from .historical import (
    PLANTS,
    BackwardCall,
    ForwardCall,
    Planted,
    changed,
    kv_transposed_twice,
    ran,
    transposed_again,
)
from .plant import Plant
from .registry import OF_PAIRS, OF_RANKS, REGISTRY

__all__ = [
    "FEATURES",
    "OF_PAIRS",
    "OF_RANKS",
    "PLANTS",
    "REGISTRY",
    "BackwardCall",
    "ForwardCall",
    "Plant",
    "Planted",
    "changed",
    "in_process",
    "kv_transposed_twice",
    "ran",
    "transposed_again",
]
