"""A private op of torch that is not as it was tried is a reason against its backend, and costs nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import ringtrue as rt
from calls import qkv
from ringtrue.backends import REGISTRY, _pinned
from ringtrue.contract import Backend


def pinned() -> Iterator[object]:
    """Every backend and device, with each private op that it calls and the table of schemas it stands in."""
    for backend in REGISTRY:
        for device, pair in backend.pairs.items():
            module = sys.modules[pair.forward.__module__]
            for table in (x for name, x in vars(module).items() if name.endswith("SCHEMAS")):
                for op in table:
                    if ("_for_cpu" in op) == (device == "cpu"):
                        yield pytest.param(backend, device, table, op, id=f"{backend.name}-{device}-{op}")


EVERY_OP = pytest.mark.parametrize(("backend", "device", "table", "op"), list(pinned()))


@EVERY_OP
def test_as_it_is_here_it_is_known(backend: Backend, device: str, table: dict[str, str], op: str) -> None:
    assert str(_pinned.op(op)._schema) == table[op]
    assert backend.unavailable(device) is None


@EVERY_OP
def test_a_moved_schema_is_a_reason(
    backend: Backend, device: str, table: dict[str, str], op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(table, op, "aten::another(Tensor query) -> Tensor")
    reason = backend.unavailable(device)
    assert reason is not None
    assert (reason.code, reason.limit) == ("schema-moved", "aten::another(Tensor query) -> Tensor")
    assert op in reason.text
    if device == "cpu":
        said = rt.explain(*qkv(), backend=backend.name)
        assert said.backend is None
        assert [r.code for r in said.reasons[backend.name]] == ["schema-moved"]


@EVERY_OP
@pytest.mark.parametrize("left", [None, SimpleNamespace()], ids=["absent", "no default overload"])
def test_an_op_that_is_gone_is_a_reason(
    backend: Backend, device: str, table: dict[str, str], op: str, left: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, op, left)
    reason = backend.unavailable(device)
    assert reason is not None
    assert (reason.code, reason.value) == ("schema-moved", "absent")


def test_ringtrue_is_imported_without_one() -> None:
    code = (
        "import torch\n"
        "import torch.distributed.tensor\n"  # torch itself needs the others
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu = None\n"
        "import ringtrue as rt\n"
        "found = {(s.name, s.device): s.unavailable for s in rt.backends()}\n"
        "assert found['native_flash', 'cpu'].code == 'schema-moved', found\n"
        "q = torch.randn(1, 4, 2, 8)\n"
        "assert rt.explain(q, q, q).backend == 'native_math'\n"
        "assert rt.attention(q, q, q).shape == q.shape\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
