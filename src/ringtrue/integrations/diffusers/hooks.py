"""The hooks of a parallelized model: agree once per forward, split what goes in, gather what comes out.

They are torch's own module hooks: they come and go without a trace, and a deep copy of the model takes them along.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import ringtrue as rt

from . import checksums, masks
from .entry import Passed
from .facts import facts_of
from .models import Family
from .plan import ModulePlan, check, check_positions, check_streams, shares, split

if TYPE_CHECKING:
    from .binding import Binding

_eager = torch.compiler.disable(reason="ringtrue: ranks exchange in this hook, do not use fullgraph=True")


@dataclass(frozen=True, eq=False)
class Draft:
    """What one rank brings to a forward: facts that must be equal everywhere, its own mask, the backend it chose, and
    checksums of its inputs (None: not compared)."""

    same: Mapping[str, str]
    given: object
    keys: rt.KeyPadding | rt.KeyBias | None
    lengths: Mapping[str, tuple[int, ...]]
    backend: str | rt.OpPair
    sums: Mapping[str, str] | None


class Kept:
    """What a bound model keeps: copied along in a deep copy of the model, never pickled."""

    def __reduce__(self) -> NoReturn:
        remedy = "undo(model) first, or save its state_dict()"
        raise rt.UnsupportedError(rt.errors.message("a bound model cannot be pickled", remedy=remedy))


class Hooks(Kept):
    """The hooks of one model; `sizes` are the output's tokens per context rank while a forward runs, else None."""

    def __init__(
        self,
        context: rt.ContextParallel,
        family: Family,
        parts: tuple[ModulePlan, ...],
        backward: Literal["sum", "slice"],
        check_inputs: int,
        binding: Binding,
    ) -> None:
        self.context = context
        self.family = family
        self.parts = parts
        self.backward = backward
        self.checks = check_inputs  # forwards that still compare the inputs of ranks
        self.binding = binding
        self.hooked: dict[str, nn.Module] = {}
        self.sizes: tuple[int, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        memo[id(self.context)] = self.context  # groups of processes are shared, never copied
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy({**vars(self), "sizes": None}, memo))
        return twin

    def install(self, model: nn.Module, handles: list[RemovableHandle]) -> None:
        """Add the hooks; what was added is in `handles` also when one of them fails."""
        root = self.parts[0]
        handles.append(model.register_forward_pre_hook(functools.partial(self.before, root), with_kwargs=True))
        handles.append(model.register_forward_hook(self.after, always_call=True))
        for seat in self.binding.seats:
            handles.append(seat.module.register_forward_pre_hook(_without_rope, with_kwargs=True))
        for part in self.parts:
            module = self.hooked[part.module] = model.get_submodule(part.module)
            if part.inputs and part is not root:
                handles.append(module.register_forward_pre_hook(functools.partial(self.split, part), with_kwargs=True))
            if part.outputs:
                handles.append(module.register_forward_hook(functools.partial(self.split_outputs, part)))
            if part.gathers:
                handles.append(module.register_forward_hook(functools.partial(self.gather, part)))

    @_eager
    def before(self, root: ModulePlan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the model's forward: one header, then this rank's share of every input, and the plan for its calls."""
        named = root.named(args, kwargs)
        self.checks, check = max(0, self.checks - 1), self.checks > 0
        try:
            draft = self._draft(root, model, named, check)
        except Exception as error:  # whatever it is: the other ranks wait for this rank's header
            with contextlib.suppress(rt.ParallelError):
                self.context.agree("model forward", same={}, own={}, error=f"{type(error).__name__}: {error}")
            raise
        own = {"mask": masks.kind_of(draft.keys), "inputs": draft.sums}
        headers = self.context.agree("model forward", same=draft.same, own=own)
        checksums.compare([header.own["inputs"] for header in headers])
        kind = masks.common_kind([str(header.own["mask"]) for header in headers])
        tokens = tuple(map(sum, zip(*(draft.lengths[stream] for stream in self.family.streams), strict=True)))
        keys = draft.keys
        if kind == "key_bool" and keys is None:  # the same facts on every rank choose the same backend
            shape = named[self.family.output].shape[0], tokens[self.context.rank]
            keys = rt.KeyPadding(torch.ones(shape, dtype=torch.bool, device=named[self.family.output].device))
        call = self.context.call(q_lengths=tokens, k_lengths=tokens, mask=kind)
        changed = self._shares(root, named)
        passed = Passed(draft.given, keys, call, draft.backend)
        changed[self.family.kwargs] = {**(named.get(self.family.kwargs) or {}), "attention_mask": passed}
        self.sizes = draft.lengths[self.family.output]
        return root.replaced(args, kwargs, changed)

    @_eager
    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the model's forward, also one that failed."""
        self.sizes = None

    @_eager
    def split(self, part: ModulePlan, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward: this rank's share of its inputs."""
        named = part.named(args, kwargs)
        for name, entry in part.inputs.items():
            if named.get(name) is not None:
                check(named[name], entry, f"{part.module}: {name}")
        return part.replaced(args, kwargs, self._shares(part, named))

    @_eager
    def split_outputs(self, part: ModulePlan, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After a module's forward: this rank's share of its outputs."""
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for index, entry in part.outputs.items():
            where = f"{part.module}: output {index}"
            check(outputs[index], entry, where)
            outputs[index] = split(outputs[index], entry, where, self.context)
        return outputs[0] if isinstance(output, Tensor) else tuple(outputs)

    @_eager
    def gather(self, part: ModulePlan, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After a module's forward: its outputs whole on every rank. Outside the model's forward they stay local."""
        if self.sizes is None:
            return output
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for i, (x, entry) in enumerate(zip(outputs, part.gathers, strict=True)):
            if entry is not None:
                if entry.expected_dims not in (None, x.dim()):
                    text = rt.errors.message(
                        f"{part.module}: the output has another number of dims than the plan expects",
                        limit=entry,
                        value=tuple(x.shape),
                    )
                    raise rt.ArgumentError(text)
                outputs[i] = self.context.gather(x, entry.gather_dim, lengths=self.sizes, backward=self.backward)
        return outputs[0] if isinstance(output, Tensor) else tuple(outputs)

    def _shares(self, part: ModulePlan, named: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: entry for name, entry in part.inputs.items() if named.get(name) is not None}
        return {name: split(named[name], entry, name, self.context) for name, entry in given.items()}

    def _draft(self, root: ModulePlan, model: nn.Module, named: Mapping[str, Any], check_inputs: bool) -> Draft:
        self._check_intact(model)
        check_streams(named, self.family, root.inputs)
        for name, entry in root.inputs.items():
            if named.get(name) is not None:
                check(named[name], entry, name)
        check_positions(named, self.family)
        lengths = {s: shares(named[s].shape[self.family.inputs[s]], self.context.size) for s in self.family.streams}
        image = named[self.family.output]
        given = (named.get(self.family.kwargs) or {}).get("attention_mask")
        keys = masks.read(given, image.shape[0], sum(each[self.context.rank] for each in lengths.values()))
        backend = self.binding.backend or rt.current_backend()  # a recomputed call finds no scope
        asked = backend if isinstance(backend, str) else backend.name
        same = {**facts_of(model, named, image.device), "backend": asked}
        sums = checksums.of_inputs(named, self.family, image.device) if check_inputs else None
        return Draft(same, given, keys, lengths, backend, sums)

    def _check_intact(self, model: nn.Module) -> None:
        """An error where something was changed since `parallelize` that would make numbers wrong, or ranks part."""
        self.binding.check_intact(model)
        gone = [name for name, module in self.hooked.items() if model.get_submodule(name) is not module]
        if gone:
            text = rt.errors.message(
                "a module of the plan was replaced after parallelize",
                value=", ".join(gone),
                remedy="undo(model) before adapters are added or removed, then parallelize again",
            )
            raise rt.ArgumentError(text)
        if model.is_cache_enabled:
            text = rt.errors.message(
                "a cache is enabled on a parallelized model: each rank would decide by itself which blocks to skip",
                value=type(model._cache_config).__name__,
                remedy="model.disable_cache()",
            )
            raise rt.UnsupportedError(text)


def _without_rope(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a rank without any token: diffusers' rotary embedding cannot reshape an empty tensor; it has nothing to do."""
    streams = (kwargs.get("hidden_states"), kwargs.get("encoder_hidden_states"))
    if kwargs.get("image_rotary_emb") is None or any(x is not None and x.numel() for x in streams):
        return None
    return args, {**kwargs, "image_rotary_emb": None}
