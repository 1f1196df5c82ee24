"""What the ranks of one model forward compare before it begins."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def facts_of(model: nn.Module, named: Mapping[str, Any], device: torch.device) -> dict[str, str]:
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
    facts["gradient checkpointing"] = "on" if getattr(model, "gradient_checkpointing", False) else "off"
    autocast = torch.is_autocast_enabled(device.type)
    facts["autocast"] = str(torch.get_autocast_dtype(device.type)) if autocast else "off"
    return facts


def _form(x: Tensor, grad: bool) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{tuple(x.shape)} {dtype}" + (" requires grad" if grad and x.requires_grad else "")
