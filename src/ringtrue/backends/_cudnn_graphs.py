"""cuDNN's attention graphs: built for one layout of all their tensors, kept by everything that is baked into them.

A graph has sizes, strides and dtypes of every tensor in it, `out`, grad_out and the gradients included: run on tensors
with other strides it reads and writes elsewhere, without an error. So a key is the whole description of a call, and
what it means cannot change; a graph that is found again is the graph that would be built. Handles and graphs are the
thread's own, as cuDNN asks for handles, and only so many graphs are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError, message

MOST = 256  # graphs of a thread


class Attributes(NamedTuple):
    """What a node is told besides tensors.

    left   a query i sees keys from i + 1 - left on; None = from the first
    right  a query i sees keys to i + right; None = to the last
    """

    scale: float
    left: int | None = None
    right: int | None = None
    dropout_p: float = 0.0
    deterministic: bool = False


@dataclass(frozen=True, eq=False)
class Call:
    """One run of one node: its tensors by the names of its arguments, each (B, H, S, D) or such a one with sizes of 1.

    The names of `outputs` are in the order of what the node returns; `handed` are written too, but are arguments.
    """

    node: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    attributes: Attributes
    handed: Mapping[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.outputs, **self.handed}


def everything(call: Call) -> Hashable:
    """All that is baked into the graph of a call."""
    tensors = call.tensors
    return (
        call.node, call.attributes, call.inputs["q"].device, tuple(tensors),
        *((x.dtype, x.shape, x.stride()) for x in tensors.values()),
    )  # fmt: skip


def strides(x: Tensor) -> tuple[int, ...]:
    """Its strides as cuDNN checks them: a dim of size 1 may have any in torch, here that of a packed tensor."""
    found: list[int] = []
    packed = 1
    for size, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        found.append(packed if size == 1 else step)
        packed = size * found[-1] or packed  # a row that stands for many is as long as itself
    return tuple(reversed(found))


class Graphs:
    """Runs calls, each by the graph of its key."""

    def __init__(self, load: Callable[[], Any], key: Callable[[Call], Hashable] = everything) -> None:
        self._load, self._key, self._own = load, key, local()

    def run(self, call: Call) -> None:
        """Fills the outputs of the call, on the current stream of their device. UnsupportedError where cuDNN has no
        plan for it."""
        cudnn, tensors = self._load(), tuple(call.tensors.values())
        with torch.cuda.device_of(tensors[0]):
            handle = self._handle(cudnn, tensors[0].device)
            graph, size, uids = self._plan(cudnn, handle, call)
            space = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
            graph.execute(tensors, space, handle=handle, tensor_uids=uids)

    def _handle(self, cudnn: Any, device: torch.device) -> Any:
        """This thread's handle for a device, on its current stream."""
        handles = self._own.__dict__.setdefault("handles", {})
        if device not in handles:
            handles[device] = cudnn.create_handle()
        if device.type == "cuda":
            cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
        return handles[device]

    def _plan(self, cudnn: Any, handle: Any, call: Call) -> Plan:
        """What runs the call, by its key; the plan not used for longest makes room for a new one."""
        plans = self._own.__dict__.setdefault("plans", OrderedDict())
        key = self._key(call)
        if key not in plans:
            graph = planned(cudnn, handle, call)
            plans[key] = Plan(graph, graph.get_workspace_size(), tuple(range(1, len(call.tensors) + 1)))
            if len(plans) > MOST:
                plans.popitem(last=False)
        plans.move_to_end(key)
        return plans[key]


class Plan(NamedTuple):
    """A graph that is ready to run, the bytes it works in, and the uids of its tensors in the order of a call's."""

    graph: Any
    size: int
    uids: tuple[int, ...]


def planned(cudnn: Any, handle: Any, call: Call) -> Any:
    """A graph of the call's node alone that is ready to run; its tensors have the uids 1, 2, ... in their order."""
    graph = _described(cudnn, handle, call)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise UnsupportedError(
            message(
                f"cuDNN has no plan for this {call.node}: {error}",
                value=f"{', '.join(f'{name} {tuple(x.shape)}' for name, x in call.tensors.items())}; {call.attributes}",
                remedy="choose another backend",
            )
        ) from error
    if graph.selected_engine is not None:  # a kernel of the package itself, which was never tried
        name = graph.selected_engine.name
        raise UnsupportedError(
            message(f"not cuDNN but {name} would run this {call.node}", remedy="choose another backend")
        )
    return graph


def _described(cudnn: Any, handle: Any, call: Call) -> Any:
    types = {
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float16: cudnn.data_type.HALF,
        torch.float32: cudnn.data_type.FLOAT,
        torch.int32: cudnn.data_type.INT32,
        torch.int64: cudnn.data_type.INT64,
    }
    graph = cudnn.pygraph(
        io_data_type=types[call.inputs["q"].dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    uids = {name: uid for uid, name in enumerate(call.tensors, 1)}
    arguments: dict[str, Any] = {
        name: graph.tensor(
            dim=list(x.shape), stride=list(strides(x)), data_type=types[x.dtype], name=name, uid=uids[name]
        )
        for name, x in {**call.inputs, **call.handed}.items()
    }
    told = call.attributes
    if told.dropout_p:
        arguments["dropout"] = (told.dropout_p, arguments.pop("seed"), arguments.pop("offset"))
    if "seq_len_q" in call.inputs:
        arguments["use_padding_mask"] = True
    if told.deterministic:
        arguments["use_deterministic_algorithm"] = True
    if call.node == "sdpa":
        arguments["generate_stats"] = True
    made = getattr(graph, call.node)(
        **arguments,
        attn_scale=told.scale,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound=told.left,
        diagonal_band_right_bound=told.right,
    )
    for (name, x), output in zip(call.outputs.items(), made, strict=True):
        output.set_uid(uids[name]).set_output(True).set_data_type(types[x.dtype])
        output.set_dim(list(x.shape)).set_stride(list(strides(x)))
    return graph
