"""Queries and keys as variable-length kernels take them: sequences one after another, and where each of them ends.

A sequence is what may attend to each other: a sample, or all of a sample that has one id. Queries are sorted by sample
and id, stably; keys likewise, and those that no query may see (padding, ids that no query has) come after the last
sequence, where no kernel looks. How many sequences there are is known only on the device: `Segments` wait for it, once
a call, and learn at once whether anything has to move at all; backward finds both in `saved`. Without ids there is one
sequence a sample, and nothing to wait for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import ForwardOut, Mask, Options, shapes_only
from ..errors import UnsupportedError, message

PACKED_KINDS = frozenset({"key_keep", "segments"})  # of masks; beside causal a kernel counts inside each sequence
MOST_SEQUENCES = 65535  # kernels have a sequence a block in the second dim of their grid, which ends there


class Packing(NamedTuple):
    """Where the tokens of a call go.

    q_order, k_order  (B * S,) int64: which token, counted through all samples, stands at each place; None = as it was
    q_ends, k_ends    (sequences + 1,) int32: 0, and where each sequence ends (`cu_seqlens`)
    q_most, k_most    no sequence has more queries or keys
    leaves_keys       some keys may be in no sequence
    """

    q_order: Tensor | None
    k_order: Tensor | None
    q_ends: Tensor
    k_ends: Tensor
    q_most: int
    k_most: int
    leaves_keys: bool = False

    @property
    def kernel_arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """`cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`, `max_seqlen_k`."""
        return self.q_ends, self.k_ends, self.q_most, self.k_most

    def queries(self, x: Tensor) -> Tensor:
        """(B, Sq, H, D) -> (B * Sq, H, D)"""
        return _packed(x, self.q_order)

    def keys(self, x: Tensor) -> Tensor:
        """(B, Sk, H, D) -> (B * Sk, H, D)"""
        return _packed(x, self.k_order)

    def sums(self, lse: Tensor) -> Tensor:
        """(B, H, Sq) -> (H, B * Sq), contiguous"""
        flat = lse.transpose(0, 1).flatten(1)
        return flat.contiguous() if self.q_order is None else flat.index_select(1, self.q_order)

    def queries_back(self, x: Tensor, batch: int) -> Tensor:
        """(B * Sq, H, D) -> (B, Sq, H, D)"""
        return _back(x, self.q_order, 0).unflatten(0, (batch, -1))

    def keys_back(self, x: Tensor, batch: int) -> Tensor:
        """(B * Sk, H, D) -> (B, Sk, H, D), 0 for keys in no sequence, whatever a kernel left there."""
        if self.leaves_keys:
            places = torch.arange(x.shape[0], device=x.device)
            x = x.masked_fill((places >= self.k_ends[-1])[:, None, None], 0.0)
        return _back(x, self.k_order, 0).unflatten(0, (batch, -1))

    def sums_back(self, lse: Tensor, batch: int) -> Tensor:
        """(H, B * Sq) -> (B, H, Sq)"""
        return _back(lse, self.q_order, 1).unflatten(1, (batch, -1)).transpose(0, 1)


def packing(mask: Mask, q: Tensor, k: Tensor, saved: tuple[Tensor, ...] = ()) -> tuple[Packing, tuple[Tensor, ...]]:
    """Where the tokens go, and what is kept of it for backward (nothing where finding it again is as cheap)."""
    batch, q_len, k_len = q.shape[0], q.shape[1], k.shape[1]
    if not _reorders(mask):
        _check(batch)
        return Packing(None, None, _steps(batch, q_len, q), _steps(batch, k_len, q), q_len, k_len), ()
    saved = saved or (_padded(mask, q) if mask.q_segments is None else _by_ids(mask))
    q_order, k_order, q_ends, k_ends, counts = saved
    number, q_most, k_most, q_moves, k_moves, leaves = counts.tolist()  # on the CPU already
    _check(number)
    orders = (q_order if q_moves else None, k_order if k_moves else None)
    ends = (q_ends[: number + 1], k_ends[: number + 1])
    return Packing(*orders, *ends, q_most, max(k_most, 1), bool(leaves)), saved


def kept_shapes(mask: Mask, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """What `packing` keeps, without its numbers: as long as it can be at most, not as long as it turns out."""
    if not _reorders(mask):
        return ()
    queries, keys = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    sorts = mask.q_segments is not None
    ends = (queries if sorts else q.shape[0]) + 1
    sizes = ((queries if sorts else 0, torch.int64), (keys, torch.int64), (ends, torch.int32), (ends, torch.int32))
    return (*(q.new_empty(size, dtype=dtype) for size, dtype in sizes), torch.empty(6, dtype=torch.int64, device="cpu"))


def packed_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
    """A packed forward without its numbers (OpPair.shapes)."""
    return shapes_only(q, k, v, mask, rng, options)._replace(saved=kept_shapes(mask, q, k))


def _reorders(mask: Mask) -> bool:
    return mask.key_keep is not None or mask.q_segments is not None


def _padded(mask: Mask, q: Tensor) -> tuple[Tensor, ...]:
    """One sequence a sample, with the keys that are kept; at most all of them, so that nobody has to wait."""
    keep = mask.key_keep
    assert keep is not None
    batch, k_len = keep.shape
    sample = torch.arange(batch, device=keep.device).unsqueeze(1)
    sample, k_order = torch.where(keep, sample, batch).flatten().sort(stable=True)
    counts = torch.tensor([batch, q.shape[1], k_len, 0, 1, 1], device="cpu")
    return q.new_empty(0, dtype=torch.int64), k_order, _steps(batch, q.shape[1], q), _ends(sample, batch), counts


def _by_ids(mask: Mask) -> tuple[Tensor, ...]:
    """A sequence for each id that a query of a sample has."""
    assert mask.q_segments is not None
    assert mask.k_segments is not None
    batch, q_len = mask.q_segments.shape
    q_ids, order = mask.q_segments.long().sort(dim=1, stable=True)
    first = torch.ones_like(q_ids, dtype=torch.bool)
    first[:, 1:] = q_ids[:, 1:] != q_ids[:, :-1]
    number = first.flatten().cumsum(0) - 1
    q_order = (order + torch.arange(batch, device=order.device).unsqueeze(1) * q_len).flatten()

    k_ids = mask.k_segments.long().contiguous()
    place = torch.searchsorted(q_ids, k_ids).clamp(max=q_len - 1)
    seen = q_ids.gather(1, place) == k_ids
    seen = seen if mask.key_keep is None else seen & mask.key_keep
    most = batch * q_len  # as many sequences at most, so no sequence has this number
    k_number = torch.where(seen, number.view(batch, q_len).gather(1, place), most)
    k_number, k_order = k_number.flatten().sort(stable=True)

    q_ends, k_ends = _ends(number, most), _ends(k_number, most)
    if q_ends.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            message(
                "segments while a stream is captured: how many there are is read from the device",
                limit="variable-length kernels take the number of sequences from the host",
                remedy="leave attention out of the captured graph, or use a backend that takes segments as a mask",
            )
        )
    moves = [(order.diff() != 1).any() for order in (q_order, k_order)]  # from 0 on, as both are permutations
    counts = (number[-1] + 1, q_ends.diff().amax(), k_ends.diff().amax(), *moves, k_ends[-1] < k_ids.numel())
    return q_order, k_order, q_ends, k_ends, torch.stack([n.long() for n in counts]).cpu()


def _check(number: int) -> None:
    if number > MOST_SEQUENCES:
        raise UnsupportedError(
            message(
                "too many packed sequences in one call",
                limit=f"{MOST_SEQUENCES}, one a sample or one for each id that its queries have",
                value=str(number),
                remedy="cut the batch, or use a backend that takes segments as a mask",
            )
        )


def _ends(number: Tensor, most: int) -> Tensor:
    """Where each of `most` sequences ends among tokens that are sorted by the number of theirs; 0 before."""
    return torch.searchsorted(number, torch.arange(most + 1, device=number.device), out_int32=True)


def _steps(batch: int, length: int, like: Tensor) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length


def _packed(x: Tensor, order: Tensor | None) -> Tensor:
    flat = x.flatten(0, 1)
    return flat if order is None else flat.index_select(0, order)


def _back(x: Tensor, order: Tensor | None, dim: int) -> Tensor:
    return x if order is None else torch.empty_like(x).index_copy_(dim, order, x)
