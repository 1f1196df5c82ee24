"""cuDNN's attention through NVIDIA's own package (`nvidia-cudnn-frontend`, imported as `cudnn`).

The package describes graphs and cuDNN, the library that torch brings, runs them; native_cudnn reaches the same kernels
through torch, which describes fewer of them. As read in 1.32: layout (B, H, S, D) by strides; lse is `stats`
(B, H, Sq, 1), packed and float32; a float mask has q's dtype, and its gradient is one more output; a band is counted
from the first query and the first key (both ends; beside a float mask only so), and without lengths a left end wants
Sq <= Sk; GQA and Dv != D are taken directly. A deterministic backward and the gradient of a float mask need as much
memory as the scores, in 16 bits.

Every call runs the graph of all its sizes and strides (_cudnn_graphs.py): building one takes time, running it again
does not. No Python kernel of the package is ever taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..optional import loaded, why_not
from ._cudnn_graphs import Attributes, Call, Graphs, everything
from ._philox import replayed

PACKAGE = Package(
    "cudnn",
    'pip install "nvidia-cudnn-frontend>=1.32,<2"',
    distribution="nvidia-cudnn-frontend",
    at_least="1.32",
    below="2",
    attributes=("pygraph", "create_handle", "set_stream", "backend_version", "cudnnGraphNotSupportedError"),
)
CUDNN_AT_LEAST = 91900
TILE = 128  # the gradient of a bias is given for lengths that are multiples

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_float", "window"}),
    bias_dtype="input",
    stride_multiple=8,
    causal="ahead",
    min_capability=(9, 0),
    max_capability=(9, 0),
    max_head_dim=256,
    max_dropout_head_dim=128,
    max_deterministic_head_dim=128,
    head_dim_multiple=8,
    gqa=True,
    value_dim=True,
    key_tile=64,
    any_scale=False,
    dropout=True,
    dbias=True,
    arithmetic="16-bit",
)


def make_pair(
    name: str, load: Callable[[], Any], claims: Claims = CLAIMS, key: Callable[[Call], Hashable] = everything
) -> OpPair:
    """The pair around the module that `load()` gives: `cudnn`, or one with the same functions."""
    graphs = Graphs(load, key)
    return OpPair(name, partial(_forward, graphs), partial(_backward, graphs), claims)


def _forward(
    graphs: Graphs, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    """One graph, which fills buffers of ours."""
    if options.dropout_p and mask.dense is not None:  # what is dropped hangs on the lengths: the same in backward
        tiled = _tiled(q, k, v, mask)
        if tiled.q is not q or tiled.k is not k:
            result = _forward(graphs, *tiled, rng, options)
            return result._replace(out=result.out[:, : q.shape[1]], lse=result.lse[:, :, : q.shape[1]])
    batch, q_len, heads, _ = q.shape
    out = q.new_empty(batch, q_len, heads, v.shape[-1])
    stats = q.new_empty(batch, heads, q_len, 1, dtype=torch.float32)
    inputs = {"q": _seen(q), "k": _seen(k), "v": _seen(v), **_beside(q, k, mask, rng, options)}
    graphs.run(Call("sdpa", inputs, {"o": _seen(out), "stats": stats}, _attributes(mask, options), {}))
    return ForwardOut(out, stats.squeeze(-1), rng)


def _backward(
    graphs: Graphs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One graph; all of dq, dk, dv come together, the gradient of the bias where it is wanted."""
    if mask.dense is not None and (options.dropout_p or wanted.bias):
        tiled = _tiled(q, k, v, mask)
        if tiled.q is not q or tiled.k is not k:
            more = tiled.q.shape[1] - q.shape[1]
            grad_out, out = (_longer(x, more) for x in (grad_out, out))
            lse = functional.pad(lse, (0, more), value=float("inf"))  # no part in any gradient
            longer = _backward(graphs, grad_out, None, *tiled, out, lse, rng, (), options, wanted)
            return _cut(longer, q.shape[1], k.shape[1])
    inputs = {"q": _seen(q), "k": _seen(k), "v": _seen(v), "o": _seen(out), "dO": _seen(grad_out)}
    lse = lse.contiguous() if lse.storage_offset() % 4 == 0 else lse.clone(memory_format=torch.contiguous_format)
    inputs |= {"stats": lse.unsqueeze(-1), **_beside(q, k, mask, rng, options)}  # each starts at 16 bytes
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_bias = None
    if wanted.bias and mask.dense is not None:  # summed by the kernel over batch and heads, by the edge over queries
        d_bias = mask.dense.new_empty(*mask.dense.shape[:2], q.shape[1], k.shape[1])
    attributes = _attributes(mask, options)._replace(deterministic=options.deterministic)
    outputs = dict(zip(("dQ", "dK", "dV"), map(_seen, grads), strict=True))
    graphs.run(Call("sdpa_backward", inputs, outputs, attributes, {} if d_bias is None else {"dBias": d_bias}))
    dq, dk, dv = (grad if w else None for grad, w in zip(grads, wanted[:3], strict=True))
    return Grads(dq, dk, dv, d_bias)


class Tiled(NamedTuple):
    """A call with more queries and keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask


def _tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tiled:
    """With zeros behind, as many as make the lengths those that the gradient of a bias is given for; the bias hides the
    new keys."""
    queries, keys = -q.shape[1] % TILE, -k.shape[1] % TILE
    dense = mask.dense
    if dense is not None and (queries or keys):
        dense = dense.expand(-1, -1, q.shape[1], -1)
        dense = functional.pad(functional.pad(dense, (0, keys), value=float("-inf")), (0, 0, 0, queries))
    return Tiled(_longer(q, queries), _longer(k, keys), _longer(v, keys), replace(mask, dense=dense))


def _longer(x: Tensor, more: int) -> Tensor:
    return functional.pad(x, (0, 0, 0, 0, 0, more)) if more else x


def _cut(grads: Grads, q_len: int, k_len: int) -> Grads:
    """Of such a call, those of the queries and keys that there are."""
    lengths = (q_len, k_len, k_len)
    dq, dk, dv = (None if x is None else x[:, :n] for x, n in zip(grads[:3], lengths, strict=True))
    return Grads(dq, dk, dv, None if grads.dbias is None else grads.dbias[:, :, :q_len, :k_len])


def _seen(x: Tensor) -> Tensor:
    """(B, S, H, D) as (B, H, S, D)."""
    return x.transpose(1, 2)


def _attributes(mask: Mask, options: Options) -> Attributes:
    left = None if mask.since is None else 1 - mask.since
    return Attributes(options.scale, left, mask.causal, options.dropout_p)


def _beside(q: Tensor, k: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> dict[str, Tensor]:
    """What a node takes besides q, k and v: the bias, the random state, lengths."""
    found = {}
    if mask.dense is not None:  # one row for all queries is taken, and backward is wrong with it
        found["bias"] = mask.dense.expand(-1, -1, q.shape[1], -1)
    if options.dropout_p:
        state = replayed(rng, options.dropout_p, q.device, 1, 1, 1, 1)
        found |= {"seed": state, "offset": state}
    if mask.since is not None and q.shape[1] > k.shape[1]:  # taken with lengths only: all of them are whole
        lengths = [torch.full((q.shape[0], 1, 1, 1), x.shape[1], dtype=torch.int32, device=q.device) for x in (q, k)]
        found |= {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    return found


def unavailable(device: str) -> Reason | None:
    """Why the package, or the cuDNN that it finds, cannot be used."""
    reason = why_not(PACKAGE)
    if reason is not None:
        return reason
    try:
        seen = loaded(PACKAGE).backend_version()
    except Exception as error:  # no library of cuDNN: RuntimeError here, an undefined symbol elsewhere
        said = (str(error).strip().splitlines() or [""])[0]
        problem = f"nvidia-cudnn-frontend finds no cuDNN: {type(error).__name__}: {said}"
        return Reason("package-broken", problem, "the cuDNN that torch for CUDA brings", "", "install torch for CUDA")
    if seen < CUDNN_AT_LEAST:
        return Reason("package-version", "cuDNN is too old", f">= {CUDNN_AT_LEAST}", str(seen), "update torch")
    return None


BACKEND = Backend(
    "cudnn_frontend",
    "cuDNN's graphs, through its own package",
    {"cuda": make_pair("cudnn_frontend", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": "docs/verified/2026-12-01-1xH200-audit-backends.md"},
)
