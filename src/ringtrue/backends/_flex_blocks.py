"""Which blocks of a mask a compiled FlexAttention kernel looks at: none, with the mask's function, or without it.

Found from lengths, ends, and one reduction of each tensor of the mask; nothing of size Sq x Sk is made unless the
user's own mask has it. A block counts as seen in part where that is not certain: there the function decides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import Mask
from ._flex_mods import all_layers

BLOCK = 128
WHOLE = 1 << 30  # torch's size of the one block of a call without a mask


Lists = tuple[Tensor | None, ...]


def block_mask(mask: Mask, q: Tensor, k: Tensor, more: bool, of_keys: bool) -> tuple[Any, ...]:
    """torch's block mask as a tuple between its lengths and its function: tensors, then the two sizes of a block.

    `more`: a function of the caller hides keys too, in any block. `of_keys`: with what backward needs beside it, the
    blocks of queries for each block of keys.
    """
    rest = (None,) * (block_mask_length() - 13)
    if _hides_nothing(mask) and not more:
        one, zero = (torch.full((1,) * n, x, dtype=torch.int32, device=q.device) for n, x in ((3, 1), (4, 0)))
        return *(one, zero, None, None) * 2, *rest, WHOLE, WHOLE
    seen, full = seen_and_full(mask, q.shape[1], k.shape[1], q.device)
    full = full & (not more)
    part = seen & ~full
    found: Lists = (*_ordered(part), *_ordered(full))
    found += (*_ordered(part.mT), *_ordered(full.mT)) if of_keys else (None,) * 4
    return *found, *rest, BLOCK, BLOCK


@lru_cache
def block_mask_length() -> int:
    """How many items this torch's block masks have: 13 in 2.11, 17 in 2.13 (another kernel's after the lists)."""
    from torch.nn.attention.flex_attention import BlockMask  # loads what only a compiled call needs

    one, zero = (torch.full((1,) * n, x, dtype=torch.int32) for n, x in ((3, 1), (4, 0)))
    with all_layers():
        return len(BlockMask.from_kv_blocks(one, zero).as_tuple())


def _hides_nothing(mask: Mask) -> bool:
    """Whether no key is hidden, but by -inf."""
    return mask.causal is None and mask.since is None and not mask.kinds - {"dense_float", "key_bias"}


def seen_and_full(mask: Mask, q_len: int, k_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks of which something may be seen, and those of which all is, (b, h, blocks of queries, blocks of keys).

    torch looks at the function in every block that the end of the queries or of the keys cuts off; so these are not
    full."""
    q_blocks, k_blocks = -(-q_len // BLOCK), -(-k_len // BLOCK)
    first_q, first_k = (torch.arange(n, device=device) * BLOCK for n in (q_blocks, k_blocks))
    last_q, last_k = (first_q + BLOCK - 1).clamp(max=q_len - 1), (first_k + BLOCK - 1).clamp(max=k_len - 1)
    uncut = (first_q + BLOCK <= q_len)[:, None] & (first_k + BLOCK <= k_len)
    seen, full = torch.ones_like(uncut)[None, None], uncut[None, None]
    if mask.causal is not None:
        seen = seen & (first_k <= last_q[:, None] + mask.causal)
        full = full & (last_k <= first_q[:, None] + mask.causal)
    if mask.since is not None:
        seen = seen & (last_k >= first_q[:, None] + mask.since)
        full = full & (first_k >= last_q[:, None] + mask.since)
    if mask.key_keep is not None:
        seen = seen & _blocks(mask.key_keep, 1).any(-1)[:, None, None]
        full = full & _blocks(mask.key_keep, 1).all(-1)[:, None, None]
    if mask.dense is not None and mask.dense.dtype == torch.bool:
        seen, full = seen & _reduced(mask.dense, "any"), full & _reduced(mask.dense, "all")
    if mask.q_segments is not None and mask.k_segments is not None:
        q_ids, k_ids = (_blocks(ids, 1, last=True) for ids in (mask.q_segments, mask.k_segments))
        (q_low, q_high), (k_low, k_high) = (torch.aminmax(ids, dim=-1) for ids in (q_ids, k_ids))
        apart = (q_low[:, :, None] > k_high[:, None]) | (k_low[:, None] > q_high[:, :, None])
        one = (q_low == q_high)[:, :, None] & (k_low == k_high)[:, None] & (q_low[:, :, None] == k_low[:, None])
        seen, full = seen & ~apart[:, None], full & one[:, None]
    return seen, full & seen


def _blocks(x: Tensor, dim: int, last: bool = False) -> Tensor:
    """x with a dim cut into blocks, filled up with its last element or with zeros (False)."""
    missing = -x.shape[dim] % BLOCK
    if missing and last:
        x = torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
    elif missing:
        x = functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return x.unflatten(dim, (-1, BLOCK))


def _reduced(mask: Tensor, how: str) -> Tensor:
    """A bool mask (b, h, q, k) as one value a block, dims of 1 left as they are."""
    for dim in (3, 2):
        if mask.shape[dim] > 1:
            mask = getattr(_blocks(mask, dim), how)(dim + 1)
    return mask


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which, those first."""
    chosen = blocks.to(torch.int32, memory_format=torch.contiguous_format)  # kernels read rows without strides
    places = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), places.to(torch.int32)
