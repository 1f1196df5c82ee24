"""A context-parallel plan as diffusers writes it, checked against the model before anything is touched.

{"": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},   # inputs of the module, by name
 "x_embedder": {0: ContextParallelInput(split_dim=1, split_output=True)},     # outputs of the module, by index
 "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)}
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

import ringtrue as rt

from .models import Family
from .theirs import ContextParallelInput, ContextParallelOutput


@dataclass(frozen=True)
class ModulePlan:
    """What happens at one module: inputs split by name, outputs split by index, or outputs gathered."""

    module: str
    inputs: Mapping[str, Any]
    outputs: Mapping[int, Any]
    gathers: tuple[ContextParallelOutput | None, ...]
    names: tuple[str, ...]

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the module was called with, by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def replaced(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with other values; what was positional stays so."""
        names = (*self.names, *[""] * len(args))
        positional = tuple(changed.get(name, arg) for name, arg in zip(names, args, strict=False))
        return positional, {**kwargs, **{n: x for n, x in changed.items() if n not in self.names[: len(args)]}}


def read_plan(model: nn.Module, family: Family, cp_plan: Mapping[str, Any] | None) -> tuple[ModulePlan, ...]:
    """The plan module by module, the model itself first; ArgumentError where it does not fit the model."""
    cp_plan = type(model)._cp_plan if cp_plan is None else cp_plan  # type: ignore[attr-defined]
    if not isinstance(cp_plan, Mapping):
        _fail("cp_plan is not a plan", "a dict of module names", type(cp_plan).__name__)
    parts = tuple(_module_plan(model, name, entry) for name, entry in cp_plan.items())
    for name, dim in family.inputs.items():
        entry = next((part.inputs.get(name) for part in parts if part.module == ""), None)
        if not isinstance(entry, ContextParallelInput) or entry.split_dim != dim:
            _fail(
                f"cp_plan does not split {name} of {family.name}: its tokens and their positions would part",
                f'cp_plan[""] splits {", ".join(f"{n} along dim {d}" for n, d in family.inputs.items())}',
                entry,
            )
    return tuple(sorted(parts, key=lambda part: part.module != ""))


def _module_plan(model: nn.Module, name: str, entry: object) -> ModulePlan:
    where = f"cp_plan[{name!r}]"
    try:
        module = model.get_submodule(name)
    except AttributeError:
        _fail(f"{where}: the model has no such module", "names of model.named_modules()", name)
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if isinstance(entry, Mapping):
        inputs = {key: value for key, value in entry.items() if isinstance(key, str)}
        outputs = {key: value for key, value in entry.items() if isinstance(key, int)}
        for key, value in entry.items():
            many = value if isinstance(value, (list, tuple)) else [value]
            split_output = isinstance(key, int)
            if not all(isinstance(v, ContextParallelInput) and v.split_output == split_output for v in many):
                _fail(
                    f"{where}[{key!r}] is no entry of a plan",
                    "ContextParallelInput, with split_output=True if and only if the key is the index of an output",
                    value,
                )
            if isinstance(key, str) and key not in names:
                _fail(f"{where}: {type(module).__name__} has no input of this name", ", ".join(names), key)
        return ModulePlan(name, inputs, outputs, (), names)
    gathers = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
    if not all(gather is None or isinstance(gather, ContextParallelOutput) for gather in gathers):
        _fail(f"{where} is neither a dict of inputs nor an output", "ContextParallelOutput, or a list of them", entry)
    return ModulePlan(name, {}, {}, gathers, names)


def check(x: object, entry: Any, where: str) -> None:
    """ArgumentError unless `x` (a tensor, or a list of them) has the dims that its entry expects."""
    for one, rule in pairs(x, entry, where):
        if not isinstance(one, Tensor):
            _fail(f"{where} is neither a tensor nor a list of tensors", "a tensor", type(one).__name__)
        expected = one.dim() if rule.expected_dims is None else rule.expected_dims
        if one.dim() != expected or not -one.dim() <= rule.split_dim < one.dim():
            _fail(f"{where} has another number of dims than the plan expects", rule, f"{tuple(one.shape)}")


def split(x: Any, entry: Any, where: str, context: rt.ContextParallel) -> Any:
    """This rank's share of `x` (a tensor, or a list of them), which is whole on every rank."""
    parts = [context.shard(one, rule.split_dim) for one, rule in pairs(x, entry, where)]
    return parts if isinstance(x, (list, tuple)) else parts[0]


def pairs(x: object, entry: Any, where: str) -> list[tuple[Any, Any]]:
    """Each tensor with its entry; one entry serves all tensors of a list."""
    many = list(x) if isinstance(x, (list, tuple)) else [x]
    rules = list(entry) if isinstance(entry, (list, tuple)) else [entry] * len(many)
    if len(rules) != len(many):
        _fail(f"{where} has another number of tensors than the plan has entries", len(rules), len(many))
    return list(zip(many, rules, strict=True))


def shares(length: int, size: int) -> tuple[int, ...]:
    """How many of `length` tokens each context rank holds: `tensor_split`'s rule, the only one that `shard` knows."""
    return tuple(length // size + (rank < length % size) for rank in range(size))


def check_streams(named: Mapping[str, Any], family: Family, planned: Mapping[str, Any]) -> None:
    """ArgumentError unless every stream is there, with as many positions as tokens, and nothing would stay whole."""
    for stream, positions in family.positions.items():
        for name in (stream, positions):
            if not isinstance(named.get(name), Tensor):
                _fail(f"{name} is missing", "a tensor, whole on every rank", type(named.get(name)).__name__)
    for name in (name for name in family.whole if name not in planned and named.get(name) is not None):
        entry = f'cp_plan[""][{name!r}] = ContextParallelInput(split_dim=1)'
        _fail(f"{name} would not be split", f"an entry {entry}", "none")


def check_positions(named: Mapping[str, Any], family: Family) -> None:
    """ArgumentError unless every stream has one position a token: the shards of the two would not fit."""
    for stream, positions in family.positions.items():
        tokens, ids = (named[name].shape[family.inputs[name]] for name in (stream, positions))
        if tokens != ids:
            _fail(f"{positions} does not fit {stream}", f"{tokens} positions, one a token", ids)


def _fail(problem: str, limit: object, value: object) -> NoReturn:
    raise rt.ArgumentError(rt.errors.message(problem, limit=limit, value=value))
