"""What the tests of subjects share: calls made of named cases, and the lines of a bug report, run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringtrue.audit.asked import call_of, within
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import build
from ringtrue.audit.subject import Call, Says, Subject


def call(name: str, dtype: torch.dtype = torch.float32, says: Says | None = None) -> Call:
    """The call of the case of that name; with `says`, only what such a subject is asked for."""
    inputs = build(replace(case(name), dtype=dtype))
    return call_of(inputs if says is None else within(says, inputs))


def told(subject: Subject, asked: Call) -> Tensor:
    """`out` as the subject's lines for a bug report compute it."""
    names: dict[str, Any] = {
        "query": asked.query,
        "key": asked.key,
        "value": asked.value,
        "attn_mask": asked.dense(places=True),
        **{n: getattr(asked.mask, n) for n in ("dense", "key_keep", "key_bias", "q_segments", "k_segments")},
    }
    if asked.rng is not None:
        torch.manual_seed(int(asked.rng[0]))
    exec(subject.source(asked), names)
    return names["out"]
