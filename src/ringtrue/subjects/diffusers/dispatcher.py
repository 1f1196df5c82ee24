"""Its dispatcher. What it takes without an error is claimed, unless a text or an error of its own excludes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from diffusers.models import attention_dispatch as theirs
from torch import Tensor

from ...audit.subject import Call, Plain, Quantities, Says, Subject, through_autograd
from .._torch_calls import given, other_dtype, seeded, unsupported
from . import parallel
from .stand_in import STANDS_IN, beyond, standing_in, within_stand_in

HALVES = frozenset({"bfloat16", "float16"})
ALL = HALVES | {"float32", "float64"}
TENSORS = frozenset({"bool", "float"})
MASKS = TENSORS | {"key_bool", "key_float"}
SHARDED = frozenset({"ulysses", "ring", "both"})
WIDE = (1 << 30, 1)


@dataclass(frozen=True)
class Known:
    """A backend that somebody has looked at. says: on one device; ranks: what of context parallelism it claims."""

    says: Says
    devices: tuple[str, ...] = ("cuda",)
    ranks: frozenset[str] = frozenset()


FLAT = ("native", "flex", "xformers")  # each has a branch for two axes
SDPA = Says(
    ALL, MASKS, causal="top_left", gqa=True, value_dim=True, head_dims=WIDE, dropout=True, mask_grad=True, blind=True,
    deterministic=False,
)  # fmt: skip
FLASH = Says(HALVES, causal="square", gqa=True, head_dims=(256, 1), dropout=True, deterministic=False)
# _native_flash, _native_cudnn: their own checks ask for 16 bits. flex names neither a 2-D limit nor a causal one, and
# takes dropout_p without a word
KNOWN: dict[str, Known] = {
    "native": Known(SDPA, ("cpu", "cuda"), frozenset({"ulysses"})),
    "_native_math": Known(SDPA, ("cpu", "cuda")),
    "_native_flash": Known(FLASH, ("cpu", "cuda"), SHARDED),
    "_native_efficient": Known(replace(SDPA, dtypes=HALVES | {"float32"}, gqa=False, head_dims=(1 << 30, 8))),
    "_native_cudnn": Known(
        replace(SDPA, dtypes=HALVES, value_dim=False, head_dims=(128, 8), mask_grad=False), ranks=SHARDED
    ),
    "flex": Known(replace(SDPA, mask_grad=False), ("cpu", "cuda")),
    "flash": Known(replace(FLASH, causal="bottom_right"), ranks=SHARDED),
    "_flash_3": Known(replace(FLASH, causal="bottom_right", dropout=False)),
    "xformers": Known(replace(SDPA, dtypes=HALVES | {"float32"}, head_dims=(1 << 30, 8), mask_grad=False)),
}


def found(device: str, about: str) -> Iterator[Subject]:
    """Every backend of the registry, by its name without a leading underscore, with its variants."""
    for backend in theirs._AttentionBackendRegistry.list_backends():
        name = f"diffusers/{backend.value.removeprefix('_')}"
        known = KNOWN.get(backend.value)
        missing = missing_for(backend, known, device)
        if known is None:
            yield Plain(name, _refuse, about=about, missing=missing)
            continue
        if backend.value == "flex" and device == "cpu":  # torch has no backward of it there
            known = replace(known, says=replace(known.says, backward=False))
        stand_in = device == "cpu" and backend.value in STANDS_IN
        yield Dispatched(name, backend, replace(known, ranks=frozenset()) if stand_in else known, about, missing)
        if stand_in:
            yield Dispatched(f"{name}/stand-in", backend, known, told(about, backend), stand_in=True)
        end, text, why = ("/stand-in", told(about, backend), "") if stand_in else ("", about, missing)
        if known.ranks and backend.value != "native":  # which has no lse to give
            yield Dispatched(f"{name}/lse{end}", backend, known, text, why, lse=True, stand_in=stand_in)
        if known.ranks:
            yield Dispatched(f"{name}/anything{end}", backend, known, text, why, anything=True, stand_in=stand_in)


def told(about: str, backend: Any) -> str:
    """What is said of a variant with a stand-in."""
    return f"{about}; {STANDS_IN[backend.value]}"


def missing_for(backend: Any, known: Known | None, device: str) -> str:
    """Why a backend cannot run here: by diffusers' own requirements first."""
    try:
        theirs._check_attention_backend_requirements(backend)
    except Exception as error:
        return str(error)
    if backend in getattr(theirs, "_HUB_KERNELS_REGISTRY", {}):
        return "its kernel is downloaded when it is called, which an audit does not do"
    if known is None:
        return "a backend that nobody looked at"
    return "" if device in known.devices else f"it has no kernel for {device}"


def _refuse(call: Call) -> Tensor:
    raise NotImplementedError("nobody looked at this backend")


class Dispatched(Plain):
    """One backend. Context parallelism alone can return an lse, and only so much of it can do what one device can."""

    def __init__(
        self, name: str, backend: Any, known: Known, about: str, missing: str = "",
        lse: bool = False, anything: bool = False, stand_in: bool = False,
    ) -> None:  # fmt: skip
        ranks = known.ranks | {"uneven"} if anything else known.ranks
        says = replace(known.says, ranks=ranks, lse=lse, lse_grad=lse)
        if anything:
            says = replace(says, ranks=ranks - {"both"}, backward=False)
        if stand_in:
            says = within_stand_in(says)
        super().__init__(name, self.attend_call, says, about, None, missing, self.lines)
        for key, value in {"backend": backend, "anything": anything, "stand_in": stand_in}.items():
            object.__setattr__(self, key, value)

    backend: Any
    anything: bool
    stand_in: bool

    def against(self, call: Call) -> str:
        limits, masked = [self.says.against(call)], bool(call.mask.kinds)
        if self.backend.value != "flex":
            limits.append(other_dtype(call))
        limits.append("a mask beside is_causal" if call.mask.causal is not None and call.mask.kinds - PLACES else "")
        if call.ranks.size == 1:
            limits.append("return_lse, anything or a stand-in without context parallelism" if self._only_ranks else "")
        else:
            limits += under_context_parallelism(call)
            limits.append("a mask under ring_anything" if self.anything and call.ranks.ring > 1 and masked else "")
            limits.append(beyond(call.dense()) if self.stand_in else "")
        return "; ".join(filter(None, limits))

    @property
    def _only_ranks(self) -> bool:
        return self.says.lse or self.anything or self.stand_in

    def attend_call(self, call: Call, config: Any = None) -> Tensor | tuple[Tensor, Tensor]:
        """One call of the dispatcher, under a config if there is one."""
        seeded(call)
        given, more = arguments(call, self.flat), {} if config is None else {"parallel_config": config}
        return theirs.dispatch_attention_fn(*given, backend=self.backend, **self.options(call), **more)

    @property
    def flat(self) -> bool:
        """Whether it takes a mask of keys as (B, Sk), as models hand it over."""
        return self.backend.value in FLAT

    def options(self, call: Call) -> dict[str, Any]:
        """The arguments by name."""
        extra = {"attention_kwargs": {"return_lse": True}} if self.says.lse else {}
        return {
            "dropout_p": call.dropout_p,
            "is_causal": call.mask.causal is not None,
            "scale": None if call.default_scale else call.scale,
            "enable_gqa": call.group > 1,
            **extra,
        }

    def run(self, call: Call) -> Quantities:
        expressible(call)
        if call.ranks.size > 1:
            with standing_in(self.backend.value if self.stand_in else ""):
                return parallel.run(call, self.attend_call, self.anything)
        if self._only_ranks:
            raise NotImplementedError("this variant is for context parallelism")
        return through_autograd(self.attend, call)

    def lines(self, call: Call) -> str:
        if self._only_ranks:
            return ""
        kinds = call.mask.kinds - PLACES
        keys = next(iter(kinds)) if self.flat and len(kinds) == 1 and kinds <= {"key_keep", "key_bias"} else "attn_mask"
        extra = given(
            [
                (f"attn_mask={keys}", bool(kinds)),
                ("is_causal=True", call.mask.causal is not None),
                (f"scale={call.scale!r}", not call.default_scale),
                (f"dropout_p={call.dropout_p}", bool(call.dropout_p)),
                ("enable_gqa=True", call.group > 1),
            ]
        )
        return (
            "from diffusers.models.attention_dispatch import dispatch_attention_fn\n"
            f"out = dispatch_attention_fn(query, key, value{extra}, backend={self.backend.value!r})"
        )


def under_context_parallelism(call: Call) -> list[str]:
    """What its templates refuse, or have no place for: causal and GQA; masks other than those of keys."""
    mask, value_dim = call.mask, call.value.shape[3]
    reasons = {
        "causal under context parallelism": mask.causal is not None,
        "fewer key heads under context parallelism": call.group > 1,
        "a value dim of its own under context parallelism": value_dim != call.query.shape[3],
        "a mask with rows under context parallelism": mask.dense is not None,
        "the gradient of a mask under context parallelism": "bias" in call.wanted,
    }
    return [reason for reason, there in reasons.items() if there]


PLACES = frozenset({"causal", "window", "segments"})


def arguments(call: Call, flat: bool = False) -> tuple[Tensor | None, ...]:
    """query, key, value and attn_mask in four axes; `flat`: (B, Sk) where it is one of keys alone."""
    mask = call.mask
    if flat and mask.dense is None and (mask.key_keep is None or mask.key_bias is None):
        keys = mask.key_bias if mask.key_keep is None else mask.key_keep
        return call.query, call.key, call.value, keys
    return call.query, call.key, call.value, call.dense()


def expressible(call: Call) -> None:
    """Raises for what the dispatcher has no argument for."""
    unsupported(call, "window", "segments", "softcap")
    if call.mask.causal:
        raise NotImplementedError("there is no argument for a causal offset")
