"""A bound Flux as training scripts use it: checkpointed, partly frozen, beside another model, in bfloat16."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from tiny_flux import Step, alone, build, error, inputs, numbers, ragged, step, together, with_mask
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringtrue as rt
from ringtrue import plants
from ringtrue.audit.rule import RULE
from ringtrue.integrations import diffusers as ours
from ringtrue.parallel.twin import World

MODES = {"ulysses 2": (2, 1), "ring 2": (1, 2), "2 x 2": (2, 2)}


@pytest.fixture(scope="module", autouse=True)
def weights() -> None:
    build()  # before any thread asks


@pytest.fixture
def diffusers_default() -> Iterator[None]:
    """`set_attention_backend` of diffusers changes its default for the whole process: put it back."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = before


def checkpointing(model: Any, reentrant: bool) -> None:
    model.enable_gradient_checkpointing(
        lambda module, *args: checkpoint(module.__call__, *args, use_reentrant=reentrant)
    )


def spy(pair: rt.OpPair) -> tuple[rt.OpPair, list[str]]:
    """The pair, and a list that says which of its functions were called."""
    calls: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(name) or function(*args)  # type: ignore[func-returns-value]

    functions = {name: noting(name, getattr(pair, name)) for name in ("forward", "backward")}
    return dataclasses.replace(pair, **functions), calls


def backward(out: Tensor, model: Any, given: dict[str, Any], cp: rt.ContextParallel | None = None) -> Step:
    """The second half of `step`, at whatever place."""
    loss = (out * numbers(torch.Generator().manual_seed(9), *out.shape, dtype=out.dtype)).sum()
    (loss if cp is None else cp.loss(loss)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads |= {
        name: given[name].grad for name in ("hidden_states", "encoder_hidden_states") if given[name].requires_grad
    }
    return Step(out.detach(), grads)


# ---- gradient checkpointing: backward recomputes after every scope was left ------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_on_one_device(reentrant: bool) -> None:
    model, given, (pair, calls) = build(), inputs(7, 5), spy(rt.op_pair("native_math"))
    checkpointing(model, reentrant)
    ours.use(model, pair)
    with rt.attention_backend("native_flash"):  # what is bound to the model wins, in the recompute too
        out = model(**given)[0]
    assert error(backward(out, model, given), alone(7, 5)) < 1e-12
    assert calls.count("forward") == 8, "each of 4 calls, and its recompute"
    assert calls.count("backward") == 4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_under_a_context(mode: str, reentrant: bool) -> None:
    """The backend comes from a scope that is left before backward."""

    def on(rank: Any) -> tuple[Step, list[str]]:
        model, (pair, calls) = build(), spy(rt.op_pair("native_math"))
        checkpointing(model, reentrant)
        cp = ours.parallelize(model, rt.ContextParallelConfig(*MODES[mode], mesh=rank))
        given = with_mask(inputs(7, 5), ours.local_key_mask(ragged(5), 7, model=model))
        with rt.attention_backend(pair):
            out = model(**given)[0]
        return backward(out, model, given, cp), calls

    ulysses, ring = MODES[mode]
    results = World(ulysses * ring).run(on)
    assert error(together([each for each, _ in results]), alone(7, 5, ragged(5))) < 1e-12
    for _, calls in results:
        assert calls.count("forward") == 8 * ring


def test_a_bound_auto_asks_no_scope_in_its_recompute() -> None:
    model, given = build(), inputs(7, 5)
    checkpointing(model, False)
    ours.use(model, "auto")
    with rt.attention_backend("native_math"):
        out = model(**given)[0]
    assert error(backward(out, model, given), alone(7, 5)) < 1e-12


# ---- a frozen base: gradients for some projections only --------------------------------------------------------------

TRAINED = {
    "q and v of all": r"attn\.to_[qv]\.weight",
    "q and v of the last": r"single_transformer_blocks\.1\.attn\.to_[qv]\.weight",
    "text q, image k": r"\.0\.attn\.(add_q_proj|to_k)\.",
}


def partly_frozen(trained: str) -> Any:
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(TRAINED[trained], name) is not None)
    assert any(parameter.requires_grad for parameter in model.parameters())
    return model


def frozen_inputs() -> dict[str, Any]:
    """No input requires a gradient, so the first blocks may want none at all."""
    return {n: x.detach() if isinstance(x, Tensor) else x for n, x in inputs(3, 6).items()}


@functools.cache
def frozen_reference(trained: str) -> Step:
    model, given = partly_frozen(trained), frozen_inputs()
    return backward(model(**given)[0], model, given)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("mode", ["one device", *MODES])
def test_a_frozen_base(mode: str, trained: str, checkpointed: bool) -> None:
    """Checkpointed, the recompute must save the same tensors as the first pass (huggingface/trl#4314).

    Some ranks hold no image token at all: on these nothing that the trained weights see depends on the sequence.
    """

    def on(rank: Any) -> Step:
        model, given, cp = partly_frozen(trained), frozen_inputs(), None
        if checkpointed:
            model.enable_gradient_checkpointing()
        if rank is None:
            ours.use(model, "native_math")
        else:
            cp = ours.parallelize(model, rt.ContextParallelConfig(*MODES[mode], mesh=rank))
        return backward(model(**given)[0], model, given, cp)

    if mode == "one device":
        steps = [on(None)]
    else:
        ulysses, ring = MODES[mode]
        steps = World(ulysses * ring).run(on)
    assert error(together(steps), frozen_reference(trained)) < 1e-12


# ---- two models in one process ---------------------------------------------------------------------------------------


def test_two_bound_models_interleaved() -> None:
    """Choosing for one never changes the other (huggingface/diffusers#14249), not even between forward and backward."""
    expected = alone(7, 5, ragged(5))
    (first, one), (second, two) = spy(rt.op_pair("native_math")), spy(rt.op_pair("native_flash"))
    a, b = build(), build()
    masked = [with_mask(inputs(7, 5), ours.local_key_mask(ragged(5), 7)) for _ in range(3)]
    ours.use(a, first)
    out_a = a(**masked[0])[0]
    ours.use(b, second)
    out_b = b(**masked[1])[0]
    assert (one, two) == (["forward"] * 4, ["forward"] * 4)
    assert error(backward(out_a, a, masked[0]), expected) < 1e-12
    ours.undo(a)
    assert error(backward(out_b, b, masked[1]), expected) < 1e-12
    assert (one, two) == ([*["forward"] * 4, *["backward"] * 4],) * 2
    b(**masked[2])
    assert two.count("forward") == 8, "undoing one leaves the other bound"
    a(**masked[2])
    assert one.count("forward") == 4


def test_a_maskless_choice_is_that_model_s_alone() -> None:
    pair = rt.op_pair("native_math")
    maskless = dataclasses.replace(pair, claims=dataclasses.replace(pair.claims, masks=frozenset()), name="maskless")
    a, b, given = build(), build(), with_mask(inputs(7, 5), ours.local_key_mask(ragged(5), 7))
    ours.use(a, maskless)
    assert error(step(b, given), alone(7, 5, ragged(5))) < 1e-12
    with pytest.raises(rt.UnsupportedError, match="maskless"):
        a(**given)


@pytest.mark.usefixtures("diffusers_default")
def test_what_diffusers_chooses_for_another_model_does_not_reach_a_bound_one() -> None:
    (pair, calls), a, b = spy(rt.op_pair("native_math")), build(), build()
    ours.use(a, pair)
    b.set_attention_backend("_native_math")
    assert error(step(a, inputs(7, 5)), alone(7, 5)) < 1e-12
    assert calls.count("forward") == 4
    step(b, inputs(7, 5))
    assert calls.count("forward") == 4


def test_two_contexts_interleaved() -> None:
    """One model under Ulysses, one under a ring, one on this device alone; then the first is undone."""
    expected, shorter = alone(7, 5), alone(6, 3)

    def on(rank: Any) -> tuple[Step, Step, Step]:
        a, b, c = build(), build(), build()
        (pair, calls) = spy(rt.op_pair("native_math"))
        cp_a = ours.parallelize(a, rt.ContextParallelConfig(ulysses_degree=2, mesh=rank))
        cp_b = ours.parallelize(b, rt.ContextParallelConfig(ring_degree=2, mesh=rank))
        ours.use(c, pair)
        given = [inputs(7, 5), inputs(6, 3), inputs(7, 5)]
        outs = [model(**each)[0] for model, each in zip((a, b, c), given, strict=True)]
        ours.undo(a)
        steps = [backward(outs[1], b, given[1], cp_b), backward(outs[0], a, given[0], cp_a)]
        sent = len(rank.log)
        steps.append(backward(outs[2], c, given[2]))

        a.zero_grad()
        assert error(step(a, inputs(7, 5)), expected) < 1e-12, "undone: this device alone"
        assert len(rank.log) == sent
        assert calls.count("forward") == 4
        b(**given[1])
        assert len(rank.log) > sent, "the other one is parallelized still"
        return tuple(steps)  # type: ignore[return-value]

    results = World(2).run(on)
    assert error(together([each[1] for each in results]), expected) < 1e-12
    assert error(together([each[0] for each in results]), shorter) < 1e-12
    assert error(results[0][2], expected) < 1e-12


# ---- bfloat16: parameters and inputs, or float32 under autocast ------------------------------------------------------

IMAGE, TEXT = 24, 9


def half(model: Any, autocast: bool, cp: rt.ContextParallel | None = None) -> Step:
    dtype = torch.float32 if autocast else torch.bfloat16
    given = inputs(IMAGE, TEXT, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**given)[0]
    result = backward(out, model, given, cp)
    assert all(grad.dtype == dtype for grad in result.grads.values())
    return Step(result.out, {name: grad.float() for name, grad in result.grads.items()})


def half_model(autocast: bool) -> Any:
    return build(torch.float32 if autocast else torch.bfloat16)


@functools.cache
def yard(autocast: bool) -> Step:
    """Plain attention in bfloat16: diffusers' own maths."""
    model = half_model(autocast)
    for processor in model.attn_processors.values():
        processor._attention_backend = AttentionBackendName._NATIVE_MATH
    return half(model, autocast)


def joined(result: Step) -> dict[str, Tensor]:
    """Output, input gradients, and parameter gradients by name over all blocks: each a vector worth a norm."""
    parts: dict[str, list[Tensor]] = {"out": [result.out]}
    for name, grad in result.grads.items():
        parts.setdefault(re.sub(r"\.\d+", "", name), []).append(grad)
    return {name: torch.cat([x.double().flatten() for x in many]) for name, many in parts.items()}


def strains(result: Step, autocast: bool) -> dict[str, float]:
    """Every quantity's error as a share of what the rule allows (docs/numbers.md); at most 1 passes."""
    truth, plain, found = (joined(each) for each in (alone(IMAGE, TEXT), yard(autocast), result))
    floor = RULE.floor[torch.bfloat16]
    shares = {}
    for name, ref in truth.items():
        off, allowed = found[name] - ref, plain[name] - ref
        shares[name] = max(
            float(off.norm() / (RULE.yard_2 * allowed.norm() + floor * ref.norm())),
            float(off.abs().max() / (RULE.yard_inf * allowed.abs().max() + floor * ref.abs().max())),
        )
    return shares


BACKENDS = [support.name for support in rt.backends() if support.device == "cpu" and support.unavailable is None]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's, under autocast
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["one device", *MODES])
def test_bfloat16_loses_no_more_than_plain_attention(mode: str, autocast: bool, backend: str) -> None:
    def on(rank: Any) -> Step:
        model, cp = half_model(autocast), None
        model.enable_gradient_checkpointing()
        if rank is not None:
            cp = ours.parallelize(model, rt.ContextParallelConfig(*MODES[mode], mesh=rank))
        ours.use(model, backend)
        return half(model, autocast, cp)

    steps = [on(None)] if mode == "one device" else World(MODES[mode][0] * MODES[mode][1]).run(on)
    over = {name: share for name, share in strains(together(steps), autocast).items() if share > 1}
    assert not over


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's, under autocast
@pytest.mark.parametrize("autocast", [False, True])
def test_the_rule_catches_a_fault_in_bfloat16(autocast: bool) -> None:
    model = half_model(autocast)
    ours.use(model, plants.kv_transposed_twice(rt.op_pair("native_math")))
    assert max(strains(half(model, autocast), autocast).values()) > 1
