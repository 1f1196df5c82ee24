"""ringtrue: one attention call for PyTorch whose gradients are proven, on one device and under context parallelism."""

from __future__ import annotations

from . import errors, integrations, optional, tuned
from .api import Explanation, Support, attention, attention_backend, backends, current_backend, explain, op_pair
from .contract import Claims, Facts, ForwardOut, Grads, Mask, OpPair, Options, Reason, Wanted
from .errors import (
    ArgumentError,
    CommunicationError,
    DisagreementError,
    GradientError,
    ParallelError,
    PeerError,
    RingtrueError,
    ScopeError,
    UnsupportedError,
)
from .masks import Causal, Dense, KeyBias, KeyPadding, Segments, Window
from .parallel.config import ContextParallelConfig
from .parallel.context import ContextParallel, context_parallel
from .scope import checkpoint
from .version import __version__ as __version__

__all__ = [
    "ArgumentError",
    "Causal",
    "Claims",
    "CommunicationError",
    "ContextParallel",
    "ContextParallelConfig",
    "Dense",
    "DisagreementError",
    "Explanation",
    "Facts",
    "ForwardOut",
    "GradientError",
    "Grads",
    "KeyBias",
    "KeyPadding",
    "Mask",
    "OpPair",
    "Options",
    "ParallelError",
    "PeerError",
    "Reason",
    "RingtrueError",
    "ScopeError",
    "Segments",
    "Support",
    "UnsupportedError",
    "Wanted",
    "Window",
    "attention",
    "attention_backend",
    "backends",
    "checkpoint",
    "context_parallel",
    "current_backend",
    "errors",
    "explain",
    "integrations",
    "op_pair",
    "optional",
    "tuned",
]
