"""A pair that counts: what a rank computes, and in how many tiles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

import ringtrue as rt
from ringtrue.contract import ForwardOut, Grads, Mask, OpPair


class Seen(NamedTuple):
    """One call of the pair: heads, queries, keys, and the ends of what each query sees."""

    heads: int
    q_len: int
    k_len: int
    causal: int | None
    since: int | None
    dense: bool

    def tiles(self, side: int) -> int:
        """Tiles of `side` x `side` that hold a place which is seen, over all heads."""
        seen = torch.ones(self.q_len, self.k_len, dtype=torch.uint8)
        seen = seen if self.causal is None else seen.tril(self.causal)
        seen = seen if self.since is None else seen.triu(self.since)
        padded = torch.nn.functional.pad(seen, (0, -self.k_len % side, 0, -self.q_len % side))
        cut = padded.unflatten(1, (-1, side)).unflatten(0, (-1, side))
        return int(cut.amax((1, 3)).sum()) * self.heads


@dataclass
class Counting:
    """`pair` to be passed as backend; the calls that reached it."""

    forwards: list[Seen] = field(default_factory=list)
    backwards: list[Seen] = field(default_factory=list)

    def pair(self, name: str = "native_math") -> OpPair:
        inner = rt.op_pair(name, "cpu")

        def forward(q: Any, k: Any, v: Any, mask: Mask, *rest: Any) -> ForwardOut:
            self.forwards.append(_seen(q, k, mask))
            return inner.forward(q, k, v, mask, *rest)

        def backward(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, mask: Mask, *rest: Any) -> Grads:
            self.backwards.append(_seen(q, k, mask))
            return inner.backward(grad_out, grad_lse, q, k, v, mask, *rest)

        return replace(inner, forward=forward, backward=backward)

    def tiles(self, side: int) -> int:
        return sum(seen.tiles(side) for seen in self.forwards)


def _seen(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> Seen:
    return Seen(q.shape[2], q.shape[1], k.shape[1], mask.causal, mask.since, mask.dense is not None)
