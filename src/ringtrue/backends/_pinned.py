"""Private torch ops are pinned by their schemas: one that moved is a reason against a backend, never a wrong call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..contract import Reason


def op(name: str) -> Any:
    """The one overload of an aten op, found once, for a packet looks for it at every call; None where it is absent."""
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else packet.default


def moved(schemas: Mapping[str, str]) -> Reason | None:
    """`schema-moved` when one of these aten ops (name -> schema, the same in torch 2.11 to 2.13) is not as it was."""
    for name, pinned in schemas.items():
        op = getattr(torch.ops.aten, name, None)
        seen = "absent" if op is None else str(op.default._schema)
        if seen != pinned:
            problem = f"torch {torch.__version__} changed the private op {name}"
            return Reason("schema-moved", problem, pinned, seen, "use native_math")
    return None
