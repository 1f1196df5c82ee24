"""Both benches on tiny shapes: figures are there and positive, the sides compute the same, the commit is found."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import sdpa_kernel

import ringtrue as rt
from ringtrue.bench import overhead, pair
from ringtrue.bench.environment import environment

DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SHAPE = (1, 16, 2, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def able(device: str) -> list[str]:
    """The backends that can be compared here."""
    return [name for name, why in pair.backends(device).items() if not why]


@pytest.mark.parametrize("device", DEVICES)
def test_every_backend_is_compared_or_says_why_not(device: str) -> None:
    found = pair.backends(device)
    assert list(found) == [s.name for s in rt.backends() if s.device == device]
    assert able(device)
    for name, why in found.items():
        assert (why == "") == (name in able(device))


def test_a_backend_that_cannot_run_here_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = rt.Reason("schema-moved", "torch changed it")
    elsewhere = tuple(replace(s, unavailable=gone) for s in rt.backends())
    monkeypatch.setattr(rt, "backends", lambda: elsewhere)
    assert set(pair.backends("cpu").values()) == {str(gone)}


@pytest.mark.parametrize("device", DEVICES)
def test_pair(device: str) -> None:
    for name in able(device):
        found = pair.compare(name, [SHAPE, (2, 8, 2, 64)], DTYPE[device], device, repetitions=2)
        assert [(m.shape, m.part) for m in found] == [
            (shape, part) for shape in (SHAPE, (2, 8, 2, 64)) for part in (pair.FORWARD, pair.BOTH)
        ]
        for m in found:
            assert m.time_ratio > 0
            for side in (m.ours, m.torch):
                assert len(side.times.seconds) == 2
                assert min(side.times.seconds) > 0
                assert (side.extra_peak is None) == (device == "cpu")
            assert (m.memory_ratio is None) == (device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_both_sides_of_a_pair_compute_the_same(device: str) -> None:
    q, k, v = (torch.randn(SHAPE, dtype=DTYPE[device], device=device) for _ in range(3))
    for name in able(device):
        with sdpa_kernel([pair.TORCH[name]]):
            theirs = pair.sdpa(q, k, v)
        torch.testing.assert_close(rt.attention(q, k, v, backend=name), theirs, rtol=0.02, atol=0.02)


def test_all_ways_of_overhead_compute_the_same() -> None:
    q, k, v, g = (torch.randn(overhead.SHAPE) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    ways = overhead._ways(with_dispatcher=importlib.util.find_spec("diffusers") is not None)
    for way in ways.values():
        out = way(*inputs)
        expected = ways[overhead.OURS](*inputs)
        torch.testing.assert_close(out, expected)
        both = zip(*(torch.autograd.grad(x, inputs, g) for x in (out, expected)), strict=True)
        for got, right in both:
            torch.testing.assert_close(got, right)


def test_overhead() -> None:
    pytest.importorskip("diffusers")
    threads = torch.get_num_threads()
    found = overhead.measure(repetitions=1)
    assert torch.get_num_threads() == threads
    assert found.absent == ""
    assert found.times.keys() == overhead.TARGETS.keys()
    for part, ways in found.times.items():
        assert {overhead.DISPATCHER, overhead.OURS} <= ways.keys()
        assert all(times.median > 0 for times in ways.values())
        ratio = found.ratio(part)
        assert ratio is not None
        assert ratio > 0


def test_overhead_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(overhead.DIFFUSERS, module="a_package_that_is_nowhere", distribution="")
    monkeypatch.setattr(overhead, "DIFFUSERS", absent)
    found = overhead.measure(repetitions=1)
    assert "a_package_that_is_nowhere is not installed" in found.absent
    assert found.ratio("no grad") is None
    assert overhead.OURS in found.times["no grad"]


def test_environment() -> None:
    found = environment("cpu", commit="abc")
    assert found["commit"] == "abc"
    assert found["torch"] == torch.__version__
    assert {"ringtrue", "diffusers", "python", "threads", "system", "device"} <= found.keys()
    assert environment("cpu")["commit"]


def test_the_environment_names_the_optional_packages_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"flash-attn-4": "4.0.0b36", "diffusers": "0.42.1"}
    monkeypatch.setattr("ringtrue.bench.environment._distribution", lambda name: installed.get(name, "not installed"))
    found = environment("cpu", commit="abc")
    assert found["flash-attn-4"] == "4.0.0b36"
    assert "sageattention" not in found
