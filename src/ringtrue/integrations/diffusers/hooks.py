"""The hooks of a parallelized model: agree once a forward, split what goes in, gather what comes out.

They are torch's own module hooks: they come and go without a trace, and a deep copy of the model takes them along.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import ringtrue as rt

from . import masks
from .entry import Passed
from .models import Family
from .plan import ModulePlan, check, check_positions, check_streams, shares, split


@dataclass(frozen=True, eq=False)
class Draft:
    """What one rank brings to a forward: the facts that must be equal everywhere, and its own mask."""

    same: Mapping[str, str]
    given: object
    keys: rt.KeyPadding | rt.KeyBias | None
    lengths: Mapping[str, tuple[int, ...]]


class Hooks:
    """The hooks of one model; `sizes` are the output's tokens per context rank while a forward runs, else None."""

    def __init__(
        self,
        context: rt.ContextParallel,
        family: Family,
        parts: tuple[ModulePlan, ...],
        backward: Literal["sum", "slice"],
        intact: Callable[[nn.Module], None],
    ) -> None:
        self.context = context
        self.family = family
        self.parts = parts
        self.backward = backward
        self.intact = intact
        self.backend: str | rt.OpPair | None = None
        self.sizes: tuple[int, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        memo[id(self.context)] = self.context  # groups of processes are shared, never copied
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy({**vars(self), "sizes": None}, memo))
        return twin

    def install(self, model: nn.Module, attention: list[nn.Module], handles: list[RemovableHandle]) -> None:
        """Add the hooks; what was added is in `handles` also when one of them fails."""
        root = self.parts[0]
        handles.append(model.register_forward_pre_hook(functools.partial(self.before, root), with_kwargs=True))
        handles.append(model.register_forward_hook(self.after, always_call=True))
        handles.extend(module.register_forward_pre_hook(_without_rope, with_kwargs=True) for module in attention)
        for part in self.parts:
            module = model.get_submodule(part.module)
            if part.inputs and part is not root:
                handles.append(module.register_forward_pre_hook(functools.partial(self.split, part), with_kwargs=True))
            if part.outputs:
                handles.append(module.register_forward_hook(functools.partial(self.split_outputs, part)))
            if part.gathers:
                handles.append(module.register_forward_hook(functools.partial(self.gather, part)))

    def before(self, root: ModulePlan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the model's forward: one header, then this rank's share of every input, and the plan for its calls."""
        named = root.named(args, kwargs)
        try:
            draft = self._draft(root, model, named)
        except Exception as error:  # whatever it is: the other ranks wait for this rank's header
            with contextlib.suppress(rt.ParallelError):
                self.context.agree("model forward", same={}, own={}, error=str(error))
            raise
        headers = self.context.agree("model forward", same=draft.same, own={"mask": masks.kind_of(draft.keys)})
        kind = _common_kind([str(header.own["mask"]) for header in headers])
        tokens = tuple(sum(each) for each in zip(*(draft.lengths[s] for s in self.family.streams), strict=True))
        call = self.context.call(q_lengths=tokens, k_lengths=tokens, mask=kind)
        changed = self._shares(root, named)
        passed = Passed(draft.given, draft.keys, call, self.backend or rt.scope.current_backend() or rt.select.DEFAULT)
        changed[self.family.kwargs] = {**(named.get(self.family.kwargs) or {}), "attention_mask": passed}
        self.sizes = draft.lengths[self.family.output]
        return root.replaced(args, kwargs, changed)

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the model's forward, also one that failed."""
        self.sizes = None

    def split(self, part: ModulePlan, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward: this rank's share of its inputs."""
        named = part.named(args, kwargs)
        for name, entry in part.inputs.items():
            if named.get(name) is not None:
                check(named[name], entry, f"{part.module}: {name}")
        return part.replaced(args, kwargs, self._shares(part, named))

    def split_outputs(self, part: ModulePlan, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After a module's forward: this rank's share of its outputs."""
        outputs = [output] if isinstance(output, Tensor) else list(output)
        for index, entry in part.outputs.items():
            where = f"{part.module}: output {index}"
            check(outputs[index], entry, where)
            outputs[index] = split(outputs[index], entry, where, self.context)
        return outputs[0] if isinstance(output, Tensor) else tuple(outputs)

    def gather(self, part: ModulePlan, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After a module's forward: its outputs whole on every rank. Outside the model's forward they stay as they are."""
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

    def _draft(self, root: ModulePlan, model: nn.Module, named: Mapping[str, Any]) -> Draft:
        self.intact(model)
        check_streams(named, self.family, root.inputs)
        for name, entry in root.inputs.items():
            if named.get(name) is not None:
                check(named[name], entry, name)
        check_positions(named, self.family)
        lengths = {s: shares(named[s].shape[self.family.inputs[s]], self.context.size) for s in self.family.streams}
        image = named[self.family.output]
        given = (named.get(self.family.kwargs) or {}).get("attention_mask")
        keys = masks.read(given, image.shape[0], sum(each[self.context.rank] for each in lengths.values()))
        backend = getattr(self.backend, "name", self.backend)
        return Draft({**_facts(model, named, image.device), "backend": str(backend)}, given, keys, lengths)


def _facts(model: nn.Module, named: Mapping[str, Any], device: torch.device) -> dict[str, str]:
    """What must be equal on all ranks for their exchanges to meet, in forward and in backward, as text."""
    grad = torch.is_grad_enabled()
    facts = {}
    for name, value in named.items():
        tensors = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
        forms = Counter(_form(x, grad) for x in tensors)
        if tensors:
            facts[name] = ", ".join(form if n == 1 else f"{n} x {form}" for form, n in forms.items())
    flags = bytes(parameter.requires_grad for parameter in model.parameters())
    facts["parameters"] = f"{sum(flags)} of {len(flags)} require grad ({zlib.crc32(flags):08x})"
    facts["grad mode"] = "on" if grad else "off"
    facts["gradient checkpointing"] = "on" if model.is_gradient_checkpointing else "off"  # type: ignore[truthy-function]
    autocast = torch.is_autocast_enabled(device.type)
    facts["autocast"] = str(torch.get_autocast_dtype(device.type)) if autocast else "off"
    return facts


def _form(x: Tensor, grad: bool) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{tuple(x.shape)} {dtype}" + (" requires grad" if grad and x.requires_grad else "")


def _common_kind(kinds: list[str]) -> Literal["none", "key_bool", "key_float"]:
    """The kind of mask of a forward; DisagreementError, on all ranks alike, where the ranks' own kinds do not go together."""
    found = set(kinds)
    if found <= {"none", "key_bool"}:
        return "key_bool" if "key_bool" in found else "none"
    if found == {"key_float"}:
        return "key_float"
    text = rt.errors.message(
        "ranks passed attention masks of different kinds to one model forward",
        limit="one kind; None beside a bool mask is all True",
        value=", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds)),
        remedy="every rank passes its own local_key_mask",
    )
    raise rt.DisagreementError(text)


def _without_rope(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a rank without any token: diffusers' rotary embedding cannot reshape an empty tensor, and has nothing to do."""
    streams = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if kwargs.get("image_rotary_emb") is None or any(x.numel() for x in streams):
        return None
    return args, {**kwargs, "image_rotary_emb": None}
