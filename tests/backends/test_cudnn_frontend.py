"""cudnn_frontend's glue around a module with the arguments of nvidia-cudnn-frontend 1.32, and its cache of graphs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import refused
from contract.subjects import verdicts
from contract.test_order import broken
from ringtrue.audit.cases import case
from ringtrue.backends import _cudnn_graphs, cudnn_frontend
from ringtrue.backends._cudnn_graphs import Attributes, Call, everything, strides
from ringtrue.contract import Mask, OpPair, Options, Reason, Wanted
from ringtrue.edge import edge
from standins import cudnn_frontend as standin

# the docstrings that pybind gives the two methods of the compiled graph, to which the Python one hands all arguments
SDPA = """q k v is_inference=None attn_scale=None bias=None block_mask=None use_alibi_mask=False use_padding_mask=False
    seq_len_q=None seq_len_kv=None use_causal_mask=False use_causal_mask_bottom_right=False sliding_window_length=None
    diagonal_alignment=diagonal_alignment.TOP_LEFT diagonal_band_left_bound=None diagonal_band_right_bound=None
    dropout=None rng_dump=None paged_attention_k_table=None paged_attention_v_table=None
    paged_attention_max_seq_len_kv=None max_total_seq_len_q=None max_total_seq_len_kv=None
    compute_data_type=data_type.NOT_SET name= score_mod=None generate_stats=None
    implementation=attention_implementation.AUTO score_max=None score_sum_exp=None sink_token=None unfuse_fma=False
    cu_seq_len_q=None cu_seq_len_kv=None stats_use_log2=False"""
SDPA_BACKWARD = """q k v o dO stats attn_scale=None bias=None dBias=None use_alibi_mask=False use_padding_mask=False
    seq_len_q=None seq_len_kv=None max_total_seq_len_q=None max_total_seq_len_kv=None use_causal_mask=False
    use_causal_mask_bottom_right=False sliding_window_length=None diagonal_alignment=diagonal_alignment.TOP_LEFT
    diagonal_band_left_bound=None diagonal_band_right_bound=None dropout=None rng_dump=None
    use_deterministic_algorithm=False compute_data_type=data_type.NOT_SET name= score_mod=None score_mod_bprop=None
    sink_token=None dSink_token=None"""
RELEASED = {
    "__init__": """name=test_graph io_data_type=None intermediate_data_type=None compute_data_type=None handle=None
        sm_count=None sm_version=None kernel_cache=None device_property=None is_dynamic_shape_enabled=False
        is_override_shape_enabled=False cuda_graph_retention=None is_cuda_graph_replay_expected=False kwargs""",
    "tensor": """dim stride=None data_type=None is_virtual=False is_pass_by_value=False ragged_offset=None
        reordering_type=None name= uid=None ragged_offset_multiplier=1 alignment_value=1 kwargs""",
    "sdpa": SDPA,
    "sdpa_backward": SDPA_BACKWARD,
    "validate": "",
    "build_operation_graph": "",
    "create_execution_plans": "heuristics=None",
    "check_support": "",
    "build_plans": "args ctx=None kwargs",
    "get_workspace_size": "handle=None override_uids=None override_shapes=None override_strides=None",
    "execute": """tensor_dict workspace=None handle=None override_uids=None override_shapes=None override_strides=None
        tensor_uids=None""",
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_stand_in_has_the_arguments_of_1_32(name: str) -> None:
    parameters = list(inspect.signature(getattr(standin.pygraph, name)).parameters.values())[1:]
    assert [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters] == RELEASED[name].split()


def test_the_stand_in_refuses_what_it_does_not_compute() -> None:
    graph = standin.pygraph(
        intermediate_data_type=standin.data_type.FLOAT,
        compute_data_type=standin.data_type.FLOAT,
        handle=standin.create_handle(),
    )
    q = graph.tensor([1, 1, 8, 8], [64, 64, 8, 1])
    with pytest.raises(NotImplementedError, match="use_alibi_mask"):
        graph.sdpa(q, q, q, use_alibi_mask=True)


def tensors(*lengths: int, heads: int = 2, dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, heads, dim, dtype=torch.bfloat16) for n in lengths]


def around(key: Callable[[Call], Hashable] = everything, **instead: Any) -> OpPair:
    """The pair around the stand-in, with some of its functions replaced."""
    module = SimpleNamespace(**{**vars(standin), **instead})
    return cudnn_frontend.make_pair("cudnn_frontend", lambda: module, replace(cudnn_frontend.CLAIMS, dbias=True), key)


def without(*names: str) -> Callable[[Call], Hashable]:
    """A key that leaves the strides of these tensors out."""

    def key(call: Call) -> Hashable:
        parts = ((n, x.dtype, x.shape, strides(x) if n not in names else 0) for n, x in call.tensors.items())
        return (call.node, call.attributes, *parts)

    return key


def untold(*names: str) -> Callable[[Call], Hashable]:
    """A key that leaves these attributes out."""
    return lambda call: everything(replace(call, attributes=call.attributes._replace(**dict.fromkeys(names))))


KEYS: dict[str, Callable[[Call], Hashable]] = {
    "strides of grad_out": without("dO"),
    "strides of out": without("o"),
    "strides of q": without("q"),
    "the scale": untold("scale"),
    "the end of the band": untold("right"),
    "the bias": lambda call: everything(replace(call, inputs={n: x for n, x in call.inputs.items() if n != "bias"})),
    "the dtype": lambda call: (call.node, call.attributes, *((n, strides(x)) for n, x in call.tensors.items())),
}


@pytest.mark.parametrize("left_out", KEYS)
def test_a_key_that_leaves_something_out_is_found(left_out: str) -> None:
    """As torch's own cache of cuDNN's graphs leaves out the strides of out and grad_out."""
    try:
        found = next(broken(edge(around(KEYS[left_out])), "cpu", torch.bfloat16), "")
    except (AssertionError, ValueError) as error:  # not even a buffer of the kind that the graph was built for
        found = repr(error)
    assert found


def test_all_that_a_node_is_told_is_in_the_key() -> None:
    q = torch.empty(1, 1, 4, 8)
    call = Call("sdpa", {"q": q}, {}, Attributes(1.0), {})
    for name in Attributes._fields:
        other = replace(call, attributes=call.attributes._replace(**{name: 7}))
        assert everything(other) != everything(call)
    assert everything(replace(call, node="sdpa_backward")) != everything(call)
    for name in ("inputs", "outputs", "handed"):
        assert everything(replace(call, **{name: {"q": q[:, :, :2]}})) != everything(call)


def test_the_whole_key_is_enough() -> None:
    assert not list(broken(edge(around()), "cpu", torch.bfloat16))


Change = Callable[[dict[str, Any]], dict[str, Any]]


def graphs_with(node: str, change: Change) -> type:
    """The stand-in's graphs, whose node is told something else."""

    class Changed(standin.pygraph):
        pass

    def told(self: Any, **given: Any) -> Any:
        return getattr(standin.pygraph, node)(self, **change(given))

    setattr(Changed, node, told)
    return Changed


def computing(**instead: Callable[..., None]) -> type:
    """The stand-in's graphs, which compute with other functions."""

    class Changed(standin.pygraph):
        def validate(self) -> None:
            super().validate()
            assert self._node is not None
            self._node = (instead.get(self._node[0].__name__, self._node[0]), self._node[1])

    return Changed


def first_of_batch(dBias: Tensor | None, **given: Any) -> None:
    whole = None if dBias is None else dBias.new_empty(given["q"].shape[0], *dBias.shape[1:])
    standin._backward(dBias=whole, **given)
    if dBias is not None:
        dBias.copy_(whole[: dBias.shape[0]])  # type: ignore[index]


def in_base_2(stats: Tensor, **given: Any) -> None:
    standin._forward(stats=stats, **given)
    stats.mul_(1.4426950408889634)


def dropped(name: str, to: Any = None) -> Change:
    return lambda given: {**given, name: to}


def later(name: str) -> Change:
    return lambda given: {**given, name: None if given[name] is None else given[name] + 1}


MUTANTS: dict[str, tuple[str, type]] = {
    "gradient of the bias not summed over the batch": ("float-of-input", computing(_backward=first_of_batch)),
    "lse in base 2": ("length-33", computing(_forward=in_base_2)),
    "no end of the band": ("causal", graphs_with("sdpa", dropped("diagonal_band_right_bound"))),
    "no end of the band in backward": ("causal", graphs_with("sdpa_backward", dropped("diagonal_band_right_bound"))),
    "no offset": ("causal-bottom-right", graphs_with("sdpa", dropped("diagonal_band_right_bound", 0))),
    "band one key longer": ("window", graphs_with("sdpa", later("diagonal_band_left_bound"))),
    "band one key longer in backward": ("window", graphs_with("sdpa_backward", later("diagonal_band_left_bound"))),
    "no scale in backward": ("scale-one", graphs_with("sdpa_backward", dropped("attn_scale", 0.5))),
    "no bias in backward": ("float-of-input", graphs_with("sdpa_backward", dropped("bias"))),
    "no dropout in backward": ("dropout", graphs_with("sdpa_backward", dropped("dropout"))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, graph = MUTANTS[mutant]
    tried = replace(case(name), dtype=torch.bfloat16)
    assert not all(v.ok for v in verdicts(edge(around(pygraph=graph)), tried, "cpu"))
    assert all(v.ok for v in verdicts(edge(around()), tried, "cpu"))


LENGTHS = replace(case("dropout-gqa-masked"), mask="float_input:hqk", dtype=torch.bfloat16)


@pytest.mark.parametrize("mask", ["float_input:hqk", "float_input:k", "float_input:bqk"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_gradient_of_a_bias_at_lengths_for_which_cudnn_gives_none(mask: str, dropout: float) -> None:
    """Made longer in backward, and with dropout in forward too: what is dropped hangs on the lengths."""
    tried = replace(LENGTHS, mask=mask, dropout=dropout)
    assert all(v.ok for v in verdicts(edge(around()), tried, "cpu"))


def test_lengths_that_are_other_in_backward_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = around()

    def as_they_are(*call: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(cudnn_frontend, "TILE", 1)
            return pair.forward(*call)

    assert not all(v.ok for v in verdicts(edge(replace(pair, forward=as_they_are)), LENGTHS, "cpu"))


def test_the_sums_of_later_queries_are_copied_where_a_graph_reads_them() -> None:
    """31 queries see nothing: what is left of lse starts between two multiples of 16 bytes."""
    x = torch.randn(1, 64, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    y = x[:, :33]
    rt.attention(x, y, y, rt.Causal("bottom_right"), backend=around()).sum().backward()
    assert x.grad is not None


def test_graphs_are_kept_by_thread_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    built, handles = [], []

    class Counted(standin.pygraph):
        def build_plans(self, *args: Any, **given: Any) -> None:
            super().build_plans(*args, **given)
            built.append(self)

    def handle() -> standin.Handle:
        handles.append(standin.create_handle())
        return handles[-1]

    monkeypatch.setattr(_cudnn_graphs, "MOST", 2)
    pair = around(pygraph=Counted, create_handle=handle)

    def call(length: int) -> None:
        pair.forward(*tensors(length, 8, 8), Mask(), None, Options(1.0))

    def count() -> tuple[int, int]:
        return len(built), len(handles)

    for length in (4, 5, 4, 5):
        call(length)
    assert count() == (2, 1)
    call(6)  # 4, used longest ago, makes room
    call(5)
    assert count() == (3, 1)
    call(4)
    assert count() == (4, 1)
    other = threading.Thread(target=call, args=(4,))
    other.start()
    other.join()
    assert count() == (5, 2)


def test_what_the_graph_is_told() -> None:
    """A band from its first query and key, determinism, the gradient of the bias; sizes of 1 as if packed."""
    seen: dict[str, Any] = {}

    def note(given: dict[str, Any]) -> dict[str, Any]:
        seen.update(given)
        return given

    pair = around(pygraph=graphs_with("sdpa_backward", note))
    q, k, v, g = tensors(4, 9, 9, 4, heads=1)
    mask, options = (
        Mask(dense=torch.zeros(1, 1, 1, 9, dtype=q.dtype), causal=6, since=-2),
        Options(0.5, deterministic=True),
    )
    out, lse, *_ = pair.forward(q, k, v, mask, None, options)
    for wanted in (Wanted(True, False, True, True), Wanted(True, False, True)):
        grads = pair.backward(g, None, q, k, v, mask, out, lse, None, (), options, wanted)
        assert [x is not None for x in grads] == list(wanted)
    assert (seen["diagonal_band_left_bound"], seen["diagonal_band_right_bound"]) == (3, 6)
    assert (seen["attn_scale"], seen["use_deterministic_algorithm"]) == (0.5, True)
    assert "use_padding_mask" not in seen
    assert seen["stats"].stride == [4, 4, 1, 1]
    assert seen["q"].stride == [32, 32, 8, 1]


@pytest.mark.parametrize(
    ("sizes", "given", "told"),
    [
        ((2, 1, 5, 8), (40, 7, 8, 1), (40, 40, 8, 1)),
        ((1, 1, 1, 1), (9, 9, 9, 9), (1, 1, 1, 1)),
        ((1, 3, 1, 8), (0, 8, 3, 1), (24, 8, 8, 1)),
        ((2, 3, 4, 8), (96, 8, 24, 1), (96, 8, 24, 1)),
    ],
)
def test_strides_of_dims_of_size_1_are_those_of_a_packed_tensor(
    sizes: tuple[int, ...], given: tuple[int, ...], told: tuple[int, ...]
) -> None:
    assert strides(torch.empty_strided(sizes, given)) == told


def test_what_cudnn_has_no_plan_for_is_refused() -> None:
    def nothing(self: Any) -> None:
        raise standin.cudnnGraphNotSupportedError("No valid engine configs")

    class Unplanned(standin.pygraph):
        check_support = nothing

    pair, q = around(pygraph=Unplanned), tensors(4)[0]
    with refused(rt.UnsupportedError, "cuDNN has no plan for this sdpa: No valid engine configs", "q (2, 2, 4, 8)"):
        pair.forward(q, q, q, Mask(), None, Options(1.0))


def test_a_kernel_of_the_package_itself_is_not_taken() -> None:
    class Python(standin.pygraph):
        def build_plans(self, *args: Any, **given: Any) -> None:
            super().build_plans()
            self.selected_engine = SimpleNamespace(name="sdpa_fwd_prefill_sm90")

    pair, q = around(pygraph=Python), tensors(4)[0]
    with refused(rt.UnsupportedError, "not cuDNN but sdpa_fwd_prefill_sm90 would run this sdpa"):
        pair.forward(q, q, q, Mask(), None, Options(1.0))


def without_cudnn() -> int:
    raise RuntimeError("Unable to find symbol cudnnGetVersion")


@pytest.mark.parametrize(
    ("version", "code", "value"),
    [(lambda: 91900, None, ""), (lambda: 91002, "package-version", "91002"), (without_cudnn, "package-broken", "")],
)
def test_why_cudnn_itself_cannot_be_used(
    version: Callable[[], int], code: str | None, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_frontend, "why_not", lambda package: None)
    monkeypatch.setattr(cudnn_frontend, "loaded", lambda package: SimpleNamespace(backend_version=version))
    reason = cudnn_frontend.unavailable("cuda")
    assert (None if reason is None else (reason.code, reason.value)) == (None if code is None else (code, value))
    missing = Reason("package-missing", "it is not installed")
    monkeypatch.setattr(cudnn_frontend, "why_not", lambda package: missing)
    assert cudnn_frontend.unavailable("cuda") is missing
