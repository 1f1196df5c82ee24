# mypy: disable-error-code="assignment, override"
# (the base class names its parameters otherwise in torch 2.11 and 2.13)
"""A process group for ranks that share one GPU: tensors travel through the host's memory, over gloo.

NCCL takes one rank a GPU, and gloo's own CUDA collectives end the process in torch 2.11 (all_gather into one tensor).
Slow, and only for audits: what is looked at is what ranks compute, not how fast they exchange it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

NAME = "hosted"


class HostedGroup(dist.ProcessGroup):
    """The collectives that attention libraries use, each on copies in the host's memory; complete when they return.

    Only send and recv return before they are done: rings post both before they wait.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sent: list[Tensor] = []

    @property
    def group_name(self) -> str:  # torch keeps a name only for groups with a backend in C++
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802  # torch's own name
        return NAME

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        host = [x.cpu() for x in tensors]
        return self._done(self._gloo.allreduce(host, *_given(opts)), tensors, host)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        host = [x.cpu() for x in tensors]
        return self._done(self._gloo.broadcast(host, *_given(opts)), tensors, host)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        host = [[x.cpu() for x in each] for each in outputs]
        work = self._gloo.allgather(host, [x.cpu() for x in inputs], *_given(opts))
        return self._done(work, [x for each in outputs for x in each], [x for each in host for x in each])

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        host = output.cpu()
        return self._done(self._gloo._allgather_base(host, given.cpu(), *_given(opts)), [output], [host])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        host = output.cpu()
        work = self._gloo.alltoall_base(host, given.cpu(), output_sizes, input_sizes, *_given(opts))
        return self._done(work, [output], [host])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """By an all-reduce: gloo has no other."""
        whole = given.cpu()
        work = self._gloo.allreduce([whole], *_given(_reduction(opts)))
        work.wait()
        output.copy_(whole.flatten().chunk(self.size())[self.rank()].view(output.shape))
        return work

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """What functional collectives call."""
        works = [self._allgather_base(output, given) for output, given in zip(outputs, inputs, strict=True)]
        return works[-1]

    # their names from torch 2.13 on
    all_to_all_single, all_gather_single, reduce_scatter_single = alltoall_base, _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def barrier(self, opts: Any = None) -> Any:
        work = self._gloo.barrier()
        work.wait()
        return work

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        host = [x.cpu().contiguous() for x in tensors]
        self._sent = [*self._sent[-64:], *host]  # alive until the peer has them
        return self._gloo.send(host, rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        host = [x.cpu().contiguous() for x in tensors]
        return _Received(self._gloo.recv(host, rank, tag), tensors, host)

    def _done(self, work: Any, tensors: Sequence[Tensor], host: Sequence[Tensor]) -> Any:
        work.wait()
        for x, copy in zip(tensors, host, strict=True):
            x.copy_(copy)
        return work


class _Received(dist.Work):
    """A recv that fills its tensors when somebody waits for it."""

    def __init__(self, work: Any, tensors: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._host = work, tensors, host

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        for x, copy in zip(self._tensors, self._host, strict=True):
            x.copy_(copy)
        return True


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)


def _reduction(options: Any) -> Any:
    made = dist.AllreduceOptions()
    if options is not None:
        made.reduceOp = options.reduceOp
    return made


def register() -> None:
    """Make the name known to torch.distributed, once a process."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, HostedGroup, devices=["cpu", "cuda"])
