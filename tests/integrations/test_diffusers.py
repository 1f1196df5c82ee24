"""diffusers' Flux under ringtrue: what is bound, what stays as it was, what is refused. Numbers are in test_flux.py."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import sys
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from tiny_flux import HEAD_DIM, HEADS, build, inputs, ragged, with_mask

import ringtrue as rt
from ringtrue.integrations import diffusers as ours
from ringtrue.parallel.twin import World


def forward(model: torch.nn.Module, **changed: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{**inputs(7, 5), **changed})[0]


def registry() -> tuple[Any, ...]:
    """Everything that diffusers keeps about backends for the whole process, without what is to be swept."""
    if entries := sys.modules.get("ringtrue.integrations.diffusers.entry"):
        entries.sweep()
    tables = (_AttentionBackendRegistry._backends, _AttentionBackendRegistry._constraints)
    names = (
        dict(_AttentionBackendRegistry._supported_arg_names),
        set(_AttentionBackendRegistry._supports_context_parallel),
    )
    members = list(AttentionBackendName), dict(AttentionBackendName._value2member_map_)
    return (*map(dict, tables), *names, *members, _AttentionBackendRegistry._active_backend, dispatch_attention_fn)


def state(model: torch.nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """Every attribute of every module, in order; containers copied, everything else by identity."""
    return {
        name: [(k, list(v.items()) if isinstance(v, dict) else v) for k, v in vars(module).items()]
        for name, module in model.named_modules()
    }


def is_same(a: object, b: object) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return a is b or (not isinstance(a, torch.Tensor) and type(a).__eq__ is not object.__eq__ and bool(a == b))


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    gc.collect()  # models of other files that still wait for it


@pytest.fixture(autouse=True)
def found_as_left() -> Iterator[None]:
    """Whatever a test binds, nothing of it stays in the process once its models are gone."""
    before = registry()
    yield
    if registry() != before:
        gc.collect()
    assert registry() == before


def counting() -> tuple[rt.OpPair, list[int]]:
    """A pair, and a list that gets the number of keys of each of its calls."""
    pair, calls = rt.op_pair("native_math"), []

    def spy(q: Any, k: Any, *rest: Any) -> rt.ForwardOut:
        calls.append(k.shape[1])
        return pair.forward(q, k, *rest)

    return dataclasses.replace(pair, forward=spy), calls


def config(rank: object = None, **degrees: int) -> rt.ContextParallelConfig:
    return rt.ContextParallelConfig(**degrees, mesh=rank)


def of_one(model: torch.nn.Module, plan: Any = None) -> rt.ContextParallel:
    """Parallelize over a context of one rank."""
    return World(1).run(lambda rank: ours.parallelize(model, config(rank), plan))[0]


# ---- bound and undone ------------------------------------------------------------------------------------------------


def test_use_binds_one_model_and_undo_is_bitwise() -> None:
    model, other = build(), build()
    expected, before, entries = forward(model), state(model), registry()
    keys = list(model.state_dict())
    pair, calls = counting()
    ours.use(model, pair)
    assert torch.allclose(forward(model), expected, rtol=0, atol=1e-12)
    assert calls == [12] * 4
    assert list(model.state_dict()) == keys
    assert torch.equal(forward(other), expected), "another model keeps diffusers' default"
    assert calls == [12] * 4
    assert _AttentionBackendRegistry._active_backend is entries[6]
    assert list(AttentionBackendName) == entries[4]
    ours.undo(model)
    assert is_same(list(state(model).items()), list(before.items()))
    assert torch.equal(forward(model), expected)
    assert registry() == entries
    assert calls == [12] * 4


def test_parallelize_and_undo_is_bitwise() -> None:
    model, other = build(), build()
    expected, before, entries, others = forward(model), state(model), registry(), state(other)
    of_one(model)
    assert torch.allclose(forward(model), expected, rtol=0, atol=1e-12)
    assert not any(hasattr(module, "_diffusers_hook") for module in model.modules())
    assert is_same(list(state(other).items()), list(others.items()))
    ours.undo(model)
    assert is_same(list(state(model).items()), list(before.items()))
    assert torch.equal(forward(model), expected)
    assert registry() == entries


def test_use_and_parallelize_compose_in_any_order() -> None:
    expected = forward(build())
    for order in ("use first", "parallelize first"):
        model, (first, early), (second, late) = build(), counting(), counting()
        if order == "use first":
            ours.use(model, first)
        of_one(model)
        ours.use(model, second)
        assert torch.allclose(forward(model), expected, rtol=0, atol=1e-12)
        assert (early, late) == ([], [12] * 4)
        ours.undo(model)
        assert torch.equal(forward(model), expected)


def test_shared_processors_are_cloned() -> None:
    model, other, shared = build(), build(), FluxAttnProcessor()
    model.set_attn_processor(shared)
    other.set_attn_processor(shared)
    expected, (pair, calls) = forward(other), counting()
    ours.use(model, pair)
    assert torch.equal(forward(other), expected)
    assert calls == []
    assert vars(shared) == {}
    ours.undo(model)
    assert all(processor is shared for processor in model.attn_processors.values())


def test_a_processor_that_somebody_set_meanwhile_stays() -> None:
    model, mine = build(), FluxAttnProcessor()
    ours.use(model, "native_math")
    model.transformer_blocks[0].attn.set_processor(mine)
    ours.undo(model)
    assert model.transformer_blocks[0].attn.processor is mine


def test_a_backend_may_carry_diffusers_name_or_enum() -> None:
    model = build()
    for backend in ("_native_math", "native_math", AttentionBackendName._NATIVE_MATH, "auto"):
        ours.use(model, backend)
        forward(model)


def test_a_deep_copy_is_bound_on_its_own() -> None:
    def on(rank: Any) -> None:
        model = build()
        ours.parallelize(model, config(rank, ring_degree=2))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.proj_out.bias += 1.0
        assert torch.allclose(forward(twin), forward(model) + 1.0)
        ours.undo(model)
        sent = len(rank.log)
        assert torch.allclose(forward(twin), forward(model) + 1.0)
        assert len(rank.log) > sent
        ours.undo(twin)
        sent = len(rank.log)
        assert torch.allclose(forward(twin), forward(model) + 1.0)
        assert len(rank.log) == sent

    World(2).run(on)


@pytest.mark.parametrize("bind", [of_one, lambda model: ours.use(model, "native_math")])
def test_a_bound_model_is_not_pickled(bind: Any) -> None:
    model = build()
    bind(model)
    with pytest.raises(rt.UnsupportedError, match=r"cannot be pickled[\s\S]*undo\(model\) first"):
        pickle.dumps(model)
    ours.undo(model)
    pickle.loads(pickle.dumps(model))


def test_a_failure_half_way_leaves_the_model_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    before = state(model)

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(type(model.proj_out), "register_forward_hook", fails)
        with pytest.raises(RuntimeError, match="half-way"):
            of_one(model)
    assert is_same(list(state(model).items()), list(before.items()))


# ---- the entry in diffusers' registry --------------------------------------------------------------------------------


def entry_of(model: torch.nn.Module) -> AttentionBackendName:
    name = model.transformer_blocks[0].attn.processor._attention_backend
    assert isinstance(name, AttentionBackendName)
    assert name not in list(AttentionBackendName)
    return name


def test_no_argument_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build(), {}
    ours.use(model, "native_math")
    q = torch.randn(2, 3, 4, 8)
    attention = rt.attention
    monkeypatch.setattr(rt, "attention", lambda *args, **kwargs: seen.update(kwargs) or attention(*args, **kwargs))
    kv, mask = q[:, :, :2], torch.ones(3, 3, dtype=torch.bool)
    extras = {"attention_kwargs": {"deterministic": True, "softcap": 0.0}, "enable_gqa": True}
    dispatch_attention_fn(q, kv, kv, mask, 0.0, True, 0.5, backend=entry_of(model), **extras)
    assert seen == {
        "attn_mask": mask, "dropout_p": 0.0, "is_causal": True, "scale": 0.5, "enable_gqa": True, "softcap": 0.0,
        "deterministic": True, "backend": "native_math", "parallel": False,
    }  # fmt: skip
    with pytest.raises(rt.UnsupportedError, match="nonsense"):
        dispatch_attention_fn(q, q, q, backend=entry_of(model), attention_kwargs={"nonsense": 1})
    dispatch_attention_fn(q, q, q, dropout_p=0.1, backend=entry_of(model))
    assert seen["dropout_p"] == 0.1


def test_a_key_mask_means_what_it_means_to_diffusers() -> None:
    """(B, keys) as well as (B, 1, 1, keys), without a context."""
    model, mask = build(), ours.local_key_mask(ragged(5), 7)
    four, two = with_mask({}, mask), with_mask({}, mask[:, 0, 0])
    expected = forward(model, **four)
    assert not torch.allclose(expected, forward(model), atol=1e-3), "the mask matters"
    ours.use(model, "native_math")
    for given in (four, two):
        assert torch.allclose(forward(model, **given), expected, rtol=0, atol=1e-12)


class Local(FluxAttnProcessor):
    """A processor that says of its call what diffusers says of a call with whole keys on every rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        marked, self._parallel_config = self._parallel_config, None
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._parallel_config = marked


def test_a_call_without_parallel_config_is_local() -> None:
    def on(rank: Any) -> list[str]:
        model, (pair, calls) = build(), counting()
        model.set_attn_processor(Local())
        cp = ours.parallelize(model, config(rank, ring_degree=2))
        ours.use(model, pair)
        mask = ours.local_key_mask(ragged(5), 7, model=model)
        with cp:
            forward(model, **with_mask({}, mask))
        assert calls == [mask.shape[-1]] * 4
        return [event.kind for event in rank.log]

    assert World(2).run(on) == [["exchange", "exchange"]] * 2, "the header, the gathered output, no ring"


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_other_classes_are_refused_by_name() -> None:
    for model in (torch.nn.Linear(2, 2), torch.nn.Sequential(build()), diffusers.FluxPipeline):
        for call in (lambda m: ours.use(m, "auto"), lambda m: ours.parallelize(m, config())):
            name = type(model).__name__
            with pytest.raises(rt.UnsupportedError, match=rf"{name} is not supported[\s\S]*FluxTransformer2DModel"):
                call(model)


def test_a_subclass_with_a_forward_of_its_own_is_refused() -> None:
    class Changed(diffusers.FluxTransformer2DModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = build()
    model.__class__ = Changed
    with pytest.raises(rt.UnsupportedError, match="Changed is not supported"):
        ours.use(model, "auto")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Whether diffusers can be used is asked once a process: forget the answer, before and after."""
    rt.optional.why_not.cache_clear()
    yield
    rt.optional.why_not.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("version", ["0.38.0", "0.43.0", "0.42.0.dev0", "1.39.0"])
def test_other_releases_are_refused_by_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", version)
    for call in (lambda: ours.parallelize(build(), config()), lambda: ours.use(build(), "auto")):
        with pytest.raises(rt.UnsupportedError, match=rf"package-version[\s\S]*>= 0\.39, < 0\.43[\s\S]*{version}"):
            call()


@pytest.mark.usefixtures("asked_anew")
def test_without_diffusers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(rt.UnsupportedError, match=r"not installed[\s\S]*ringtrue\[diffusers\]"):
        ours.use(torch.nn.Linear(1, 1), "auto")


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("broken", ["models.attention_dispatch", "models._modeling_parallel"])
def test_a_broken_diffusers_costs_only_its_own_calls(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that moved a name we need, and one that fails otherwise when it is loaded."""
    monkeypatch.delitem(sys.modules, "ringtrue.integrations.diffusers.theirs", raising=False)
    monkeypatch.delattr(ours, "theirs", raising=False)
    monkeypatch.setitem(sys.modules, f"diffusers.{broken}", types.ModuleType("moved"))
    for call in (lambda: ours.use(torch.nn.Linear(1, 1), "auto"), lambda: ours.undo(torch.nn.Linear(1, 1))):
        with pytest.raises(rt.UnsupportedError, match=r"package-broken[\s\S]*cannot import name"):
            call()


def test_double_and_unbound_are_refused() -> None:
    model = build()
    with pytest.raises(rt.ArgumentError, match="not bound"):
        ours.undo(model)
    of_one(model)
    before = state(model)
    with pytest.raises(rt.ArgumentError, match=r"parallelized already[\s\S]*undo"):
        of_one(model)
    assert is_same(list(state(model).items()), list(before.items()))
    ours.undo(model)
    of_one(model)


def test_what_cannot_be_bound_is_refused_and_left_alone() -> None:
    model = build()
    before = state(model)
    with pytest.raises(rt.ArgumentError, match=r"unknown backend[\s\S]*native_math[\s\S]*'nativ'"):
        ours.use(model, "nativ")
    with pytest.raises(rt.ArgumentError, match="not a configuration of context parallelism"):
        ours.parallelize(model, {"ring_degree": 2})
    with pytest.raises(rt.ArgumentError, match="gather_backward"):
        ours.parallelize(model, config(), gather_backward="mean")
    model._parallel_config = object()
    with pytest.raises(rt.ArgumentError, match="enable_parallelism is active"):
        ours.use(model, "auto")
    del model._parallel_config
    assert is_same(list(state(model).items()), list(before.items()))


def test_processors_that_would_go_past_us_are_refused() -> None:
    model = build()
    model.transformer_blocks[1].attn.set_processor(FluxIPAdapterAttnProcessor(HEADS * HEAD_DIM, 4))
    with pytest.raises(rt.UnsupportedError, match="FluxIPAdapterAttnProcessor is not supported: its calls have other"):
        ours.parallelize(model, config())
    before = state(model)
    ours.use(model, "native_math")
    ours.undo(model)
    assert is_same(list(state(model).items()), list(before.items()))
    model.transformer_blocks[1].attn.set_processor(lambda *args: args)
    with pytest.raises(rt.UnsupportedError, match="function is not supported: it does not let its backend be chosen"):
        ours.use(model, "auto")


PLAN = diffusers.FluxTransformer2DModel._cp_plan
SPLIT = ContextParallelInput(split_dim=1, expected_dims=3)
BAD_PLANS = {
    "no such input": ({**PLAN, "": {**PLAN[""], "hidden_stats": SPLIT}}, "no input of this name"),
    "no such module": ({**PLAN, "proj_in": ContextParallelOutput(1)}, "no such module"),
    "an input of a module": ({**PLAN, "x_embedder": {"nothing": SPLIT}}, "Linear has no input of this name"),
    "positions left whole": (
        {**PLAN, "": {n: x for n, x in PLAN[""].items() if n != "txt_ids"}},
        "does not split txt_ids",
    ),
    "another dim": ({**PLAN, "": {**PLAN[""], "img_ids": ContextParallelInput(1, 2)}}, "does not split img_ids"),
    "an output by name": (
        {**PLAN, "": {**PLAN[""], "guidance": ContextParallelInput(0, 1, True)}},
        "no entry of a plan",
    ),
    "no plan": ([], "not a plan"),
    "no output": ({**PLAN, "proj_out": 1}, "neither a dict of inputs nor an output"),
}


@pytest.mark.parametrize("which", BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused(which: str) -> None:
    model, (plan, text) = build(), BAD_PLANS[which]
    before = state(model)
    with pytest.raises(rt.ArgumentError, match=text):
        ours.parallelize(model, config(), plan)
    assert is_same(list(state(model).items()), list(before.items()))


def test_another_plan_that_fits_gives_the_same() -> None:
    """Controlnet may be added; a stream that is split once more, where it is embedded, is found out by its length."""
    samples = [
        torch.randn(2, 7, HEADS * HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        for s in (0, 1)
    ]
    expected = forward(build(), controlnet_block_samples=samples)
    plan = {**PLAN, "": {**PLAN[""], "controlnet_block_samples": SPLIT}}

    def on(rank: Any, plan: Any, **given: Any) -> torch.Tensor:
        model = build()
        ours.parallelize(model, config(rank, ulysses_degree=2), plan)
        return forward(model, **given)

    for out in World(2).run(lambda rank: on(rank, plan, controlnet_block_samples=samples)):
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    with pytest.raises(rt.ArgumentError, match="controlnet_block_samples would not be split"):
        World(2).run(lambda rank: on(rank, None, controlnet_block_samples=samples))
    twice = {**PLAN, "x_embedder": {0: ContextParallelInput(1, 3, split_output=True)}}
    with pytest.raises((rt.ArgumentError, RuntimeError)):
        World(2).run(lambda rank: on(rank, twice))


@pytest.mark.parametrize(
    ("text", "image", "problem"),
    [
        (torch.ones(2, 5), 7, r"text is no mask of keys[\s\S]*float32[\s\S]*mask.bool\(\)"),
        (torch.ones(5, dtype=torch.bool), 7, "text is no mask of keys"),
        (
            torch.ones(2, 5, dtype=torch.bool),
            torch.ones(3, 7, dtype=torch.bool),
            r"image is no mask of keys[\s\S]*\(3, 7\)",
        ),
        ([True], 7, r"text is no mask of keys[\s\S]*list"),
    ],
)
def test_local_key_mask_refuses_what_is_no_mask(text: Any, image: Any, problem: str) -> None:
    with pytest.raises(rt.ArgumentError, match=problem):
        ours.local_key_mask(text, image)
