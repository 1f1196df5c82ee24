"""Binding a model: its attention processors give way to marked copies, which `undo` takes away again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

import ringtrue as rt

from . import entry
from .config import translated
from .hooks import Hooks, Kept
from .models import ATTRIBUTE, Family, family_of
from .plan import read_plan
from .theirs import ATTENTION


@dataclass(eq=False)
class Seat:
    """One attention module: the processor that was found in it, and our marked copy of that."""

    module: nn.Module
    found: Any
    ours: Any


class Binding(Kept):
    """What was done to one model. The model itself keeps it, so that a deep copy has its own."""

    def __init__(self, model: nn.Module) -> None:
        self.seats = [Seat(m, m.processor, copy.copy(m.processor)) for m in _attention_modules(model)]
        self.handles: list[RemovableHandle] = []
        self.hooks: Hooks | None = None
        self.choose(None)

    def choose(self, backend: str | rt.OpPair | None) -> None:
        """Take another backend (None: the scope's); the old entry goes with its last user."""
        self.backend = backend
        self.name = entry.register(backend)

    @property
    def context(self) -> rt.ContextParallel | None:
        return None if self.hooks is None else self.hooks.context

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def mark(self) -> None:
        """Put our copies into the modules, marked with what is bound now."""
        for seat in self.seats:
            seat.ours._attention_backend = self.name
            seat.ours._parallel_config = None if self.hooks is None else entry.Parallel()
            seat.module.processor = seat.ours

    def unmark(self) -> None:
        """Put back what was found; a processor that somebody else set meanwhile stays."""
        for seat in self.seats:
            if seat.module.processor is seat.ours:
                seat.module.processor = seat.found

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.hooks = [], None

    def _holds(self, seat: Seat) -> bool:
        ours = seat.ours
        marked = ours._attention_backend is self.name and isinstance(ours._parallel_config, entry.Parallel)
        return marked and seat.module.processor is ours

    def check_intact(self, model: nn.Module) -> None:
        """ArgumentError if an attention of the model is no longer ours: it would silently attend to this rank alone."""
        seats = {seat.module: seat for seat in self.seats}
        modules = _attention_modules(model)
        strange = [module for module in modules if module not in seats or not self._holds(seats[module])]
        if strange or len(modules) != len(seats) or model._parallel_config is not None:
            _fail(
                "the attention of a parallelized model was changed by somebody else",
                value=f"{len(strange)} of {len(modules)} attention modules",
                remedy="undo(model), change it, then parallelize again; choose backends with use(model, backend=...)",
            )


def parallelize(
    model: nn.Module,
    config: object,
    cp_plan: Mapping[str, Any] | None,
    backward: Literal["sum", "slice"],
    check_inputs: int,
) -> rt.ContextParallel:
    family = family_of(model, "parallelize")
    binding = _bound(model)
    if binding is not None and binding.hooks is not None:
        _fail("this model is parallelized already", remedy="undo(model) first")
    config = translated(config)
    _check_order(config)
    if backward not in ("sum", "slice"):
        _fail("unknown gather_backward", limit='"sum" or "slice"', value=repr(backward))
    if type(check_inputs) is not int or check_inputs < 0:
        limit = "how many forwards compare their inputs: 0 (never), 1, 2, ..."
        _fail("check_inputs is not a number of forwards", limit=limit, value=repr(check_inputs))
    _check_processors(model, family, "parallelize", binding)
    parts = read_plan(model, family, cp_plan)
    context = config if isinstance(config, rt.ContextParallel) else rt.ContextParallel(config)
    fresh = binding is None
    binding = Binding(model) if binding is None else binding
    try:
        binding.hooks = Hooks(context, family, parts, backward, check_inputs, binding)
        binding.hooks.install(model, binding.handles)
        binding.mark()
    except BaseException:
        binding.unhook()
        binding.unmark() if fresh else binding.mark()
        raise
    model.__dict__[ATTRIBUTE] = binding
    return context


def _check_order(config: rt.ContextParallelConfig | rt.ContextParallel) -> None:
    config = config.config if isinstance(config, rt.ContextParallel) else config
    if config.load_balance != "none":
        text = rt.errors.message(
            "[order-unknown] load_balance under parallelize: a call sees the shards of each stream rank by rank",
            limit='load_balance="none"',
            value=repr(config.load_balance),
            remedy="these models attend without a causal mask: contiguous shards are balanced",
        )
        raise rt.UnsupportedError(text)


def use(model: nn.Module, backend: str | rt.OpPair) -> None:
    family = family_of(model, "use")
    name = backend.value if isinstance(backend, Enum) else backend  # a member of diffusers' enum is as good as its name
    known = sorted({support.name for support in rt.backends()} | {"auto"})
    if not isinstance(name, rt.OpPair) and (not isinstance(name, str) or name.removeprefix("_") not in known):
        _fail("unknown backend in use", limit=f"{', '.join(known)}, or an OpPair", value=repr(name))
    binding = _bound(model)
    _check_processors(model, family, "use", binding)
    binding = Binding(model) if binding is None else binding
    binding.choose(name)
    binding.mark()
    model.__dict__[ATTRIBUTE] = binding


def undo(model: nn.Module) -> None:
    binding = _bound(model)
    if binding is None:
        _fail("this model is not bound", value=type(model).__name__, remedy="undo takes back parallelize and use")
    assert binding is not None
    binding.unhook()
    binding.unmark()
    del model.__dict__[ATTRIBUTE]
    vars(binding).clear()  # its entry in diffusers' registry goes now, if nobody else holds it
    entry.sweep()


def _bound(model: nn.Module) -> Binding | None:
    return model.__dict__.get(ATTRIBUTE)


def _attention_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ATTENTION)]


def _check_processors(model: nn.Module, family: Family, call: str, binding: Binding | None) -> None:
    """UnsupportedError for a processor that would go past us; ArgumentError for one that somebody else has bound."""
    if model._parallel_config is not None:
        _fail("diffusers' own enable_parallelism is active on this model", remedy="load the model without it")
    ours = [] if binding is None else [seat.ours for seat in binding.seats]
    for module in _attention_modules(model):
        processor, name = module.processor, type(module.processor).__name__
        refused = call == "parallelize" and any(cls.__name__ in family.refused for cls in type(processor).__mro__)
        if refused or not (hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config")):
            why = "its calls have other lengths" if refused else "it does not let its backend be chosen"
            limit = "processors that pass _attention_backend and _parallel_config to diffusers' dispatcher"
            remedy = "unload the IP adapter first" if refused else "set the model's default processors"
            text = rt.errors.message(f"{name} is not supported: {why}", call=f"{call}(...)", limit=limit, remedy=remedy)
            raise rt.UnsupportedError(text)
        bound = entry.is_ours(processor._attention_backend) and not any(processor is mine for mine in ours)
        if bound or (processor._parallel_config is not None and not entry.is_ours(processor._attention_backend)):
            _fail("an attention processor of this model is bound elsewhere", value=name, remedy="undo that first")


def _fail(problem: str, limit: object = "", value: object = "", remedy: str = "") -> NoReturn:
    raise rt.ArgumentError(rt.errors.message(problem, limit=limit, value=value, remedy=remedy))
