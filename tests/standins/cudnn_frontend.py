"""`cudnn` of nvidia-cudnn-frontend 1.32: graphs of one attention node, with the arguments of its methods.

As there: tensors are declared before anything runs, and a graph reads and writes the memory it is handed by the sizes
and strides of its declaration, whatever those of the buffer are. Layout (B, H, S, D); a band is counted from the first
query and the first key; stats are packed, -inf where a query sees nothing; the gradient of a bias is summed over the
batch and heads that it is declared without. What cuDNN 9.19 does not take is refused when the graph is validated.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from standins import _eager

data_type = Enum("data_type", "FLOAT HALF BFLOAT16 INT32 INT64 NOT_SET")
heur_mode = Enum("heur_mode", "A B FALLBACK OPENSOURCE")
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
attention_implementation = Enum("attention_implementation", "AUTO COMPOSITE UNIFIED")
TYPES = {
    torch.float32: data_type.FLOAT,
    torch.float16: data_type.HALF,
    torch.bfloat16: data_type.BFLOAT16,
    torch.int32: data_type.INT32,
    torch.int64: data_type.INT64,
}


class cudnnGraphNotSupportedError(Exception):  # noqa: N801
    """What the released one is."""


class Handle:
    """Belongs to a thread."""


def create_handle() -> Handle:
    return Handle()


def set_stream(handle: Handle, stream: int) -> None:
    raise AssertionError("there are no streams here")


def backend_version() -> int:
    return 91900


class Declared:
    """One tensor of a graph."""

    def __init__(self, dim: list[int], stride: list[int], kind: Any, uid: int | None) -> None:
        self.dim, self.stride, self.kind, self.uid, self.output = dim, stride, kind, uid, False

    def set_uid(self, uid: int) -> Declared:
        self.uid = uid
        return self

    def set_output(self, value: bool) -> Declared:
        self.output = value
        return self

    def set_data_type(self, dtype: Any) -> Declared:
        self.kind = dtype
        return self

    def set_dim(self, dim: list[int]) -> Declared:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Declared:
        self.stride = stride
        return self

    def on(self, buffer: Tensor) -> Tensor:
        """The memory at the start of a buffer, as it was declared."""
        assert TYPES[buffer.dtype] is self.kind
        _require(buffer.data_ptr() % 16 == 0, "a misaligned address")
        return buffer.as_strided(self.dim, self.stride, buffer.storage_offset())


class pygraph:  # noqa: N801
    """A graph of one node."""

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Any = None,
        sm_count: Any = None,
        sm_version: Any = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: Any = None,
        *,
        is_cuda_graph_replay_expected: bool = False,
        **kwargs: Any,
    ) -> None:
        assert intermediate_data_type is compute_data_type is data_type.FLOAT
        assert isinstance(handle, Handle)
        self.selected_engine, self._state, self._declared = None, "described", []
        self._node: tuple[Callable[..., None], dict[str, Any]] | None = None

    def tensor(
        self,
        dim: list[int],
        stride: list[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Any = None,
        reordering_type: Any = None,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
        **kwargs: Any,
    ) -> Declared:
        assert stride is not None
        assert not any((is_virtual, is_pass_by_value, ragged_offset, kwargs)), "not part of this stand-in"
        return self._declare(Declared(dim, stride, data_type, uid))

    def sdpa(
        self, q: Any, k: Any, v: Any, is_inference: Any = None, attn_scale: Any = None, bias: Any = None,
        block_mask: Any = None, use_alibi_mask: bool = False, use_padding_mask: bool = False, seq_len_q: Any = None,
        seq_len_kv: Any = None, use_causal_mask: bool = False, use_causal_mask_bottom_right: bool = False,
        sliding_window_length: Any = None, diagonal_alignment: Any = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: Any = None, diagonal_band_right_bound: Any = None, dropout: Any = None,
        rng_dump: Any = None, paged_attention_k_table: Any = None, paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: Any = None, max_total_seq_len_q: Any = None, max_total_seq_len_kv: Any = None,
        compute_data_type: Any = data_type.NOT_SET, name: str = "", score_mod: Any = None, generate_stats: Any = None,
        implementation: Any = attention_implementation.AUTO, score_max: Any = None, score_sum_exp: Any = None,
        sink_token: Any = None, unfuse_fma: bool = False, cu_seq_len_q: Any = None, cu_seq_len_kv: Any = None,
        stats_use_log2: bool = False,
    ) -> list[Declared]:  # fmt: skip
        given = _given(pygraph.sdpa, locals())
        made = [self._declare(Declared([], [], None, None)) for _ in range(2)]
        self._node = (_forward, {**given, "o": made[0], "stats": made[1]})
        return made

    def sdpa_backward(
        self, q: Any, k: Any, v: Any, o: Any, dO: Any, stats: Any, attn_scale: Any = None, bias: Any = None,
        dBias: Any = None, use_alibi_mask: bool = False, use_padding_mask: bool = False, seq_len_q: Any = None,
        seq_len_kv: Any = None, max_total_seq_len_q: Any = None, max_total_seq_len_kv: Any = None,
        use_causal_mask: bool = False, use_causal_mask_bottom_right: bool = False, sliding_window_length: Any = None,
        diagonal_alignment: Any = diagonal_alignment.TOP_LEFT, diagonal_band_left_bound: Any = None,
        diagonal_band_right_bound: Any = None, dropout: Any = None, rng_dump: Any = None,
        use_deterministic_algorithm: bool = False, compute_data_type: Any = data_type.NOT_SET, name: str = "",
        score_mod: Any = None, score_mod_bprop: Any = None, sink_token: Any = None, dSink_token: Any = None,
    ) -> list[Declared]:  # fmt: skip
        given = _given(pygraph.sdpa_backward, locals())
        made = [self._declare(Declared([], [], None, None)) for _ in range(3)]
        self._node = (_backward, {**given, **dict(zip(("dQ", "dK", "dV"), made, strict=True))})
        return made

    def validate(self) -> None:
        self._go("described", "validated")
        assert self._node is not None
        _validate(self._node[1])

    def build_operation_graph(self) -> None:
        self._go("validated", "lowered")

    def create_execution_plans(self, heuristics: list[Any] | None = None) -> None:
        assert heuristics == [heur_mode.A, heur_mode.FALLBACK]
        self._go("lowered", "planned")

    def check_support(self) -> None:
        self._go("planned", "supported")

    def build_plans(self, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        self._go("supported", "built")

    def get_workspace_size(
        self, handle: Any = None, override_uids: Any = None, override_shapes: Any = None, override_strides: Any = None
    ) -> int:
        assert self._state == "built", "Call build() first"
        return 16

    def execute(
        self,
        tensor_dict: dict[int, Tensor] | tuple[Tensor, ...],
        workspace: Any = None,
        handle: Handle | None = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
        tensor_uids: Any = None,
    ) -> None:
        assert self._state == "built"
        assert isinstance(handle, Handle)
        assert workspace.numel() == 16
        assert self._node is not None
        if tensor_uids is not None:
            tensor_dict = dict(zip(tensor_uids, tensor_dict, strict=True))
        missing = [x.uid for x in self._declared if x.uid not in tensor_dict]
        if missing:
            raise ValueError(f"the variant pack is missing a buffer for tensor uid {missing[0]}")
        compute, given = self._node

        def bound(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(bound, value))
            return value.on(tensor_dict[value.uid]) if isinstance(value, Declared) else value

        compute(**{name: bound(value) for name, value in given.items()})

    def _declare(self, tensor: Declared) -> Declared:
        assert self._state == "described", "the graph is frozen"
        self._declared.append(tensor)
        return tensor

    def _go(self, start: str, end: str) -> None:
        assert self._state == start
        self._state = end


COMPUTED = frozenset(
    {"q", "k", "v", "o", "dO", "stats", "attn_scale", "bias", "dBias", "use_padding_mask", "seq_len_q", "seq_len_kv"}
    | {"diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound", "dropout", "generate_stats"}
    | {"use_deterministic_algorithm"}
)


def _given(method: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a node; what is not computed here is refused, never dropped."""
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(method.__defaults__ or ()), strict=False))
    for name in names:
        if name not in COMPUTED and values[name] is not defaults[name]:
            raise NotImplementedError(f"{name} is not computed here")
    return {name: values[name] for name in names if name in COMPUTED}


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise cudnnGraphNotSupportedError(text)


def _validate(given: dict[str, Any]) -> None:
    q, k, v, left, right = (given[n] for n in ("q", "k", "v", "diagonal_band_left_bound", "diagonal_band_right_bound"))
    (batch, heads, q_len, dim), (_, kv_heads, k_len, value_dim) = q.dim, v.dim
    _require(k.dim == [batch, kv_heads, k_len, dim], "sizes")
    _require(heads % kv_heads == 0, "number of heads for key and query must be a factor")
    _require(all(d % 8 == 0 and d <= 256 for d in (dim, value_dim)), "hidden_dim")
    for name in ("q", "k", "v", "o", "dO", "dQ", "dK", "dV"):
        x = given.get(name)
        if x is not None:
            _require(x.stride[3] == 1, "the stride of the last dimension should be 1")
            rows = zip(x.dim[:3], x.stride[:3], strict=True)
            _require(all(s % 8 == 0 for n, s in rows if n > 1), f"{name}: not a multiple of the tensor's alignment")
    _require(given["bias"] is None or given["bias"].stride[3] == 1, "the stride of the last dimension should be 1")
    _require(left is None or left > 0, "Left bound should be greater than zero when set")
    _require(right is None or right >= 0, "Right bound needs to be larger than or equal to zero")
    padded = given["use_padding_mask"]
    _require(padded == (given["seq_len_q"] is not None) == (given["seq_len_kv"] is not None), "padding")
    _require(left is None or padded or q_len <= k_len, "Sliding window attention is only supported with s_q <= s_kv")
    if given["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT and right is not None:
        raise NotImplementedError("bottom right is not computed here")
    if "dO" not in given:
        _require(given["generate_stats"] is True, "stats are wanted")
    else:
        _require((q_len, k_len) != (1, 1), "s_q = s_kv = 1 is not supported")
        d_bias = given["dBias"]
        if d_bias is not None:
            _require(d_bias.dim[2:] == [q_len, k_len] and d_bias.stride[2] == k_len, "dBias")
            _require(q_len % 128 == k_len % 128 == 0, "dBias")
    _require(given["stats"].dim == [batch, heads, q_len, 1], "stats")
    packed = [heads * q_len, q_len, 1, 1]  # asked of dims of size 1 too
    _require("dO" not in given or given["stats"].stride == packed, "Stats must be a packed BHSD tensor")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, attn_scale: float, dropout: Any, **given: Any
) -> None:
    result, lse = _eager.forward(
        *map(_tokens_first, (q, k, v)), attn_scale, bias=_bias(q, k, **given), keep=_kept(q, k, dropout)
    )
    o.copy_(_tokens_first(result))
    stats.copy_(lse.masked_fill(lse == torch.inf, -torch.inf).unsqueeze(-1))


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, stats: Tensor, dQ: Tensor, dK: Tensor, dV: Tensor,
    dBias: Tensor | None, attn_scale: float, dropout: Any, **given: Any,
) -> None:  # fmt: skip
    bias = given.pop("bias")
    if bias is not None and bias.shape[2] != q.shape[2]:
        bias = None  # one row for all queries: as wrong as seen on an H200
    *grads, d_scores = _eager.backward(
        *map(_tokens_first, (dO, q, k, v, o)), stats.squeeze(-1), attn_scale, bias=_bias(q, k, bias, **given),
        keep=_kept(q, k, dropout),
    )  # fmt: skip
    for grad, x in zip(grads, (dQ, dK, dV), strict=True):
        x.copy_(_tokens_first(grad))
    if dBias is not None:
        dBias.copy_(d_scores.sum_to_size(dBias.shape))


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _bias(
    q: Tensor, k: Tensor, bias: Tensor | None, diagonal_band_left_bound: int | None,
    diagonal_band_right_bound: int | None, seq_len_q: Tensor | None, seq_len_kv: Tensor | None, **others: Any,
) -> Tensor:  # fmt: skip
    """The bias, -inf outside of the band and beyond the lengths."""
    row, col = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen if diagonal_band_left_bound is None else seen & (col + diagonal_band_left_bound > row)
    seen = seen if diagonal_band_right_bound is None else seen & (col <= row + diagonal_band_right_bound)
    seen = seen if seq_len_q is None else seen & (row < seq_len_q)
    seen = seen if seq_len_kv is None else seen & (col < seq_len_kv)
    hidden = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    return hidden if bias is None else hidden + bias.float()


def _kept(q: Tensor, k: Tensor, dropout: Any) -> Tensor | None:
    """The drawn mask, scaled; every state has its own."""
    if dropout is None:
        return None
    probability, seed, offset = dropout
    generator = torch.Generator().manual_seed(hash((seed.item(), offset.item())) % 2**63)
    drawn = torch.rand(*q.shape[:3], k.shape[2], generator=generator)
    return (drawn >= probability).float() / (1 - probability)
