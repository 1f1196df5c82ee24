"""diffusers: the attention of one model goes through ringtrue, on one device or under context parallelism.

    cp = parallelize(model, rt.ContextParallelConfig(ulysses_degree=2))   # splits inputs, gathers the output
    use(model, backend="native_flash")                                    # binds a backend; with or without parallelize
    undo(model)                                                           # the model as it was found, bit for bit

Only the model that is passed changes: its attention processors are replaced by marked copies, and modules of its plan
get torch hooks. diffusers' dispatcher, its active backend and every other model stay as they are. A bound model may be
deep-copied (the copy is bound too), not pickled.

This package imports diffusers when one of its functions is called, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

import ringtrue as rt

from .masks import local_key_mask
from .models import require

if TYPE_CHECKING:
    from .theirs import ContextParallelConfig

__all__ = ["local_key_mask", "parallelize", "undo", "use"]


def parallelize(
    model: nn.Module,
    config: rt.ContextParallelConfig | rt.ContextParallel | ContextParallelConfig,
    cp_plan: Mapping[str, Any] | None = None,
    *,
    gather_backward: Literal["sum", "slice"] = "sum",
    check_inputs: int = 3,
) -> rt.ContextParallel:
    """Run every forward of `model` under context parallelism, until `undo`; returns the context (its `loss`, `gather`).

    config           degrees and mesh, a context that exists, or diffusers' own ContextParallelConfig, whose other flags
                     mean nothing here and are logged once.
    cp_plan          what is split and gathered where, as in diffusers; default: the model's own `_cp_plan`. Splits are
                     `tensor_split`'s, of any length; an input with other than its `expected_dims` dims is an error.
    gather_backward  "sum": gradients of all parameters are partial sums over the context ranks, and a loss that every
                     rank computes from the gathered output goes through `context.loss`; "slice": diffusers' convention.
    check_inputs     in so many first forwards the ranks compare a checksum of their inputs, bit for bit, and all raise
                     DisagreementError where they differ. One host-device synchronisation each; 0: never.

    Every rank passes the whole inputs, and its own key mask (`local_key_mask`) as
    `joint_attention_kwargs={"attention_mask": mask}`. One small header is exchanged per model forward; ranks that
    disagree all raise. Raises UnsupportedError for another model class, diffusers release or attention processor,
    ArgumentError for a plan that does not fit the model or a model that is parallelized already; the model is then
    untouched.
    """
    require("parallelize")
    from . import binding

    return binding.parallelize(model, config, cp_plan, gather_backward, check_inputs)


def use(model: nn.Module, backend: str | rt.OpPair) -> None:
    """Bind a backend (a name of `rt.backends()`, "auto", or an OpPair) to the attention of `model`, until `undo`.

    Before or after `parallelize`, and again to change it. It wins over `rt.attention_backend`. Raises ArgumentError for
    an unknown name, UnsupportedError for another model class, diffusers release or attention processor.
    """
    require("use")
    from . import binding

    binding.use(model, backend)


def undo(model: nn.Module) -> None:
    """Take back `parallelize` and `use`: processors, hooks and outputs are what they were. ArgumentError if unbound."""
    require("undo")
    from . import binding

    binding.undo(model)
