"""Private torch ops are pinned by their schemas: one that moved is a reason against a backend, never a wrong call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..contract import Reason


def op(name: str) -> Any:
    """The one overload of an aten op, found once, for a packet looks for it at every call; None where it is absent."""
    return getattr(getattr(torch.ops.aten, name, None), "default", None)


def moved(schemas: Mapping[str, str]) -> Reason | None:
    """`schema-moved` when one of these aten ops (name -> schema, the same in torch 2.11 to 2.13) is not as it was."""
    for name, pinned in schemas.items():
        found = op(name)
        seen = "absent" if found is None else str(found._schema)
        if seen != pinned:
            problem = f"torch {torch.__version__} changed the private op {name}"
            return Reason("schema-moved", problem, pinned, seen, "use native_math")
    return None
