"""diffusers as a subject: what is found, how it is asked, and faults planted into its parts."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtrue.audit.cases import PARALLEL, case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import CLAIMED_BUT_REFUSED, NOT_RUN, PASS, REFUSED, WRONG
from ringtrue.audit.subject import Subject
from ringtrue.cli.audit.tasks import Summed
from ringtrue.cli.worker import Job
from ringtrue.subjects import diffusers as family
from ringtrue.subjects import found
from subjects.asking import call, told

theirs = pytest.importorskip("diffusers.models.attention_dispatch")


def subject(name: str, device: str = "cpu") -> Subject:
    return next(s for s in found(name, device) if s.name == name)


def test_every_backend_of_the_registry_is_there() -> None:
    names = {s.name for s in found("diffusers", "cuda")}
    backends = {b.value.removeprefix("_") for b in theirs._AttentionBackendRegistry.list_backends()}
    assert {f"diffusers/{name}" for name in backends} <= names


def test_every_pair_of_the_module_is_there_and_each_has_a_backend() -> None:
    from ringtrue.subjects.diffusers import pairs

    assert {"native_attention", "cudnn_attention", "native_flash_attention", "flash_attention_hub"} <= set(
        pairs.stems()
    )
    assert all(pairs.backend_of(stem) is not None for stem in pairs.stems())


@pytest.mark.parametrize(
    ("name", "asked", "verdict"),
    [
        ("native", "bool-bqk", PASS),
        ("native", "keep-ragged", PASS),
        ("native", "float-of-input", PASS),
        ("native", "gqa", PASS),
        ("native", "causal-bottom-right", REFUSED),
        ("native_math", "causal-wide", PASS),
        ("native_flash", "causal", NOT_RUN),  # claims 16 bits alone
        ("native_flash", "bool-qk", REFUSED),
        ("native_cudnn", "length-5", NOT_RUN),
        ("native/pair", "causal", PASS),
        ("native/pair-lse", "length-5", REFUSED),
        ("native_flash/pair/stand-in", "length-33", PASS),
        ("native_flash/pair-lse/stand-in", "dropout", PASS),
        ("native_cudnn/pair/stand-in", "float-bhqk", PASS),
        ("native_cudnn/pair-lse/stand-in", "bias-blind", PASS),
        ("native_cudnn/pair/stand-in", "bool-qk", REFUSED),
    ],
)
def test_asked(name: str, asked: str, verdict: str) -> None:
    each = subject(f"diffusers/{name}")
    dtype = torch.float32 if verdict != NOT_RUN or "cudnn" in name else torch.bfloat16
    outcome = examine(each, Check(replace(case(asked), dtype=dtype)))
    assert outcome.verdict == (PASS if dtype == torch.bfloat16 else verdict), outcome


@pytest.mark.parametrize("asked", ["causal", "bool-qk", "keep", "bias-of-input", "scale-one"])
def test_lines_of_the_dispatcher_compute_the_same(asked: str) -> None:
    each = subject("diffusers/native")
    given = call(asked, says=each.says)
    names: dict[str, Any] = {name: getattr(given.mask, name) for name in ("key_keep", "key_bias")}
    names |= {n: getattr(given, n) for n in ("query", "key", "value")}
    exec(each.source(given), names | {"attn_mask": given.dense()}, names)
    torch.testing.assert_close(names["out"], each.run(given).out)


def test_lines_of_a_pair_compute_the_same() -> None:
    each = subject("diffusers/native/pair")
    given = call("float-hqk", says=each.says)
    torch.testing.assert_close(told(each, given), each.run(given).out)


def test_keys_transposed_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = theirs._native_flash_attention_backward_op

    def twice(ctx: Any, grad_out: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, *rest = ctx.saved_tensors
        fake = type("Ctx", (), dict(vars(ctx)))()
        fake.saved_tensors = (query, key.transpose(1, 2), value.transpose(1, 2), *rest)
        return right(fake, grad_out)

    monkeypatch.setattr(theirs, "_native_flash_attention_backward_op", twice)
    each = subject("diffusers/native_flash/pair/stand-in")
    outcome = examine(each, Check(case("heads-equal-length")))
    assert outcome.verdict == WRONG
    assert {v.quantity for v in outcome.quantities if not v.ok} == {"dq", "dk", "dv"}
    assert examine(each, Check(case("length-33"))).verdict == CLAIMED_BUT_REFUSED


def test_an_lse_that_was_not_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = theirs._cudnn_attention_forward_op

    def unasked(ctx: Any, *args: Any, _parallel_config: Any, **kwargs: Any) -> Any:
        return right(ctx, *args, _parallel_config=None, **kwargs)  # nothing tells it that gradients will be wanted

    monkeypatch.setattr(theirs, "_cudnn_attention_forward_op", unasked)
    outcome = examine(subject("diffusers/native_cudnn/pair/stand-in"), Check(case("length-33")))
    assert outcome.verdict == CLAIMED_BUT_REFUSED


@pytest.mark.parametrize(
    ("name", "check"),
    [("native", "ring-2"), ("native", "ulysses-2-causal"), ("native_flash/stand-in", "ulysses-2-keep")],
)
def test_what_context_parallelism_does_not_claim(name: str, check: str) -> None:
    each, ranks = next((c, r) for c, r in PARALLEL if c.id == check)
    asked = replace(call("length-16"), ranks=ranks)
    asked = replace(asked, mask=replace(asked.mask, causal=each.causal))
    if "keep" in check:
        asked = replace(asked, mask=call("keep").mask)
    assert subject(f"diffusers/{name}").against(asked)


ASKED = {
    "ulysses-2": "native_flash/stand-in",
    "ring-2": "native_flash/stand-in",
    "ring-2-cross": "native_flash/stand-in",
    "ulysses-2-keep": "native",
    "ring-2-uneven": "native_flash/anything/stand-in",
}


def test_under_its_context_parallelism(pool: Any) -> None:
    """On two processes; and with a ring whose backward reads the first step's keys, as before 0.40."""
    for outcomes in pool.run(in_ranks, 2):
        assert outcomes == dict.fromkeys(ASKED, PASS) | {"stale": WRONG}


def in_ranks(rank: int, world: int) -> dict[str, str]:
    job = Job(rank, world, torch.device("cpu"), Path(), 60, print)
    verdicts = {check: verdict(job, name, check) for check, name in ASKED.items()}
    right = theirs._native_flash_attention_backward_op
    theirs._native_flash_attention_backward_op = lambda ctx, grad_out, **_: right(ctx, grad_out)
    try:
        return verdicts | {"stale": verdict(job, "native_flash/stand-in", "ring-2")}
    finally:
        theirs._native_flash_attention_backward_op = right


def verdict(job: Job, name: str, check: str) -> str:
    each, ranks = next((c, r) for c, r in PARALLEL if c.id == check)
    return examine(Summed(subject(f"diffusers/{name}"), job), Check(each, "ranks", ranks)).verdict


@pytest.mark.parametrize(
    ("version", "word"), [(None, "not installed"), ("0.1.0", "nobody looked at"), ("0.42.1", "cannot be imported")]
)
def test_what_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch, version: str | None, word: str) -> None:
    def asked(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    def broken(name: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(family.metadata, "version", asked)
    monkeypatch.setattr(family, "import_module", broken)
    (only,) = found("diffusers", "cpu")
    assert word in only.unavailable()
    assert examine(only, Check(case("length-5"))).verdict == NOT_RUN
