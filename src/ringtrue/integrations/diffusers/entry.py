"""Our entry in diffusers' attention registry, and the call it makes.

diffusers' dispatcher looks a backend up by a member of its enum. Ours is an instance of that enum which is no member:
the enum does not know it, so only processors that were handed it can select it. Models that chose the same backend
share an entry; once no processor (nor a deep copy of one) holds its name, it is taken out again.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import ringtrue as rt

from .theirs import AttentionBackendName, Registry

PREFIX = "_ringtrue_"
_numbers = itertools.count(1)
_names: weakref.WeakValueDictionary[str | int | None, AttentionBackendName] = weakref.WeakValueDictionary()
_unused: deque[AttentionBackendName] = deque()  # entries without a holder, to be swept
_EXTRAS = ("softcap", "deterministic", "backend_options")  # what `attention_kwargs` may hold


class Parallel:
    """Rides in `processor._parallel_config`: the call is one of a parallelized model. A call without it is local."""


@dataclass(frozen=True, eq=False)
class Passed:
    """Rides through a parallelized model in the place of its attention mask: the plan of the forward it belongs to.

    Activation checkpointing keeps it with the arguments of what it recomputes, so a recomputed call has the plan of its
    own forward, whatever ran in between.

    given    the attention mask as it was passed to the model
    keys     the same as a mask of this rank's keys
    call     the declared call: lengths of every rank and kind of mask
    backend  what was bound, or else in scope, when the forward began
    """

    given: Any
    keys: Any
    call: Any
    backend: str | rt.OpPair


class _AnyName(set[str]):
    """The argument names of our entry: the dispatcher drops what an entry does not name, ours judges everything."""

    def __contains__(self, name: object) -> bool:
        return True


def register(backend: str | rt.OpPair | None) -> AttentionBackendName:
    """A registry entry that runs `backend` (None: the scope's choice); one for all that chose the same.

    It lives as long as somebody holds the returned name, and goes with the next `sweep`: not at once, for torch guards
    the keys of the registry while it compiles, and a model may be collected at any time.
    """
    sweep()
    key = backend.removeprefix("_") if isinstance(backend, str) else None if backend is None else id(backend)
    found = _names.get(key)
    if found is not None:
        return found
    value = f"{PREFIX}{next(_numbers)}"
    label, name = _non_member(value), _non_member(value)
    Registry.register(label)(functools.partial(attend, backend))
    arguments = Registry._supported_arg_names
    arguments[label] = _AnyName(arguments[label])
    _names[key] = name
    weakref.finalize(name, _unused.append, label).atexit = False
    return name


def sweep() -> None:
    """Take out of the registry what nobody can select any more."""
    while _unused:
        label = _unused.popleft()
        for table in ("_backends", "_constraints", "_supported_arg_names"):
            getattr(Registry, table).pop(label, None)


def is_ours(backend: object) -> bool:
    """Whether a processor's backend is an entry of ours."""
    return isinstance(backend, AttentionBackendName) and str(backend.value).startswith(PREFIX)


def _non_member(value: str) -> AttentionBackendName:
    name = str.__new__(AttentionBackendName, value)
    name._name_ = name._value_ = value
    here = weakref.ref(name)
    name.__deepcopy__ = lambda memo: here()  # Python before 3.11.4 would look for it among the members
    return name


def attend(
    bound: str | rt.OpPair | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: object = None,
    **extras: Any,
) -> Tensor:
    """What the dispatcher calls; `bound` is the entry's own."""
    unknown = [name for name in extras if name not in _EXTRAS]
    if unknown:
        _refuse("attention_kwargs holds names that have no meaning here", ", ".join(_EXTRAS), ", ".join(unknown))
    passed = attn_mask if isinstance(attn_mask, Passed) else None
    backend = bound if passed is None else passed.backend
    arguments = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, **extras}
    if _parallel_config is None:
        mask = attn_mask if passed is None else passed.given
        if isinstance(mask, Tensor) and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None, :]  # as diffusers' own native backend reads it
        out = rt.attention(query, key, value, attn_mask=mask, backend=backend, parallel=False, **arguments)
        assert isinstance(out, Tensor)
        return out
    passed = _checked(passed, attn_mask, is_causal, _parallel_config)
    out = rt.attention(query, key, value, attn_mask=passed.keys, backend=backend, parallel=passed.call, **arguments)
    assert isinstance(out, Tensor)
    return out


def _checked(passed: Passed | None, attn_mask: object, is_causal: bool, config: object) -> Passed:
    """The plan of a call under context parallelism, or why there is none."""
    if not isinstance(config, Parallel):
        _refuse("diffusers' own parallel config reached a bound processor", "parallelize", type(config).__name__)
    if is_causal:
        _refuse(
            "[order-unknown] is_causal under parallelize: a call sees the shards of each stream rank by rank",
            "masks that do not depend on the order of tokens",
            "is_causal=True",
        )
    if passed is None:
        _refuse(
            "an attention call of a parallelized model carries no plan",
            "calls inside the model's own forward, whose processor passes its attention_mask on",
            "attn_mask is " + ("None" if attn_mask is None else type(attn_mask).__name__),
            "call the model itself, not its forward method or a block of it",
        )
    assert passed is not None
    return passed


def _refuse(problem: str, limit: str, value: str, remedy: str = "") -> None:
    raise rt.UnsupportedError(rt.errors.message(problem, limit=limit, value=value, remedy=remedy))
