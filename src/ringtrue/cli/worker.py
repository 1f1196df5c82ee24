"""A worker process: it performs the tasks that arrive over its pipe, and ends with its parent."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import hosted


@dataclass(frozen=True)
class Order:
    """Parent to worker: fn(job, *args) as one rank of a group; `fn` is "module:function"."""

    fn: str
    args: tuple[Any, ...]
    rank: int
    world: int
    folder: str
    rendezvous: str
    timeout: float


@dataclass(frozen=True)
class Ready:
    """Worker to parent: everything is imported."""


@dataclass(frozen=True)
class News:
    """Worker to parent: how far the task is."""

    value: Any


@dataclass(frozen=True)
class Done:
    """Worker to parent: what the task returned."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """Worker to parent: the traceback of what the task raised."""

    text: str


@dataclass(frozen=True)
class Died:
    """In the parent: a worker is gone."""

    text: str


@dataclass(frozen=True)
class Job:
    """What a task knows of its surroundings. `folder` is shared by all workers; `report` speaks for the first rank."""

    rank: int
    world: int
    device: torch.device
    folder: Path
    timeout: float
    report: Callable[[Any], None]

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks of the group, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x


def serve(pipe: Connection, warm: str, place: str, threads: int) -> None:
    """The main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve in a container
    torch.set_num_threads(threads)
    try:
        device = torch.device(place)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        importlib.import_module(warm)
        pipe.send(Ready())
        while True:
            pipe.send(perform(pipe.recv(), device, pipe))
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))


def perform(order: Order, device: torch.device, pipe: Connection) -> Done | Failed:
    """Run one task in a process group of exactly its ranks."""
    report = (lambda value: pipe.send(News(value))) if order.rank == 0 else (lambda value: None)
    job = Job(order.rank, order.world, device, Path(order.folder), order.timeout, report)
    try:
        if order.world > 1:
            own_gpu = device.type == "cuda" and order.world <= torch.cuda.device_count()
            shared = device.type == "cuda" and not own_gpu
            if shared:
                hosted.register()
            dist.init_process_group(
                "nccl" if own_gpu else hosted.NAME if shared else "gloo",
                init_method=f"file://{order.rendezvous}",
                rank=order.rank,
                world_size=order.world,
                timeout=timedelta(seconds=order.timeout),
                device_id=device if own_gpu else None,
            )
        module, function = order.fn.split(":")
        return Done(getattr(importlib.import_module(module), function)(job, *order.args))
    except BaseException:  # every way to fail is an answer
        return Failed(traceback.format_exc())
    finally:
        if dist.is_initialized():
            gc.collect()  # groups in a reference cycle would outlive the default one
            dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
