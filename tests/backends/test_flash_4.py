"""flash_4's glue around a module with the arguments of flash-attn-4 4.0.0b36, and why the package cannot be used."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.backends import _hub, flash_4
from ringtrue.contract import Mask, Options, Package, Reason, Wanted
from ringtrue.edge import edge
from standins import flash_attn_4

FORWARD = """q k v qv=None cu_seqlens_q=None cu_seqlens_k=None seqused_q=None seqused_k=None max_seqlen_q=None
    max_seqlen_k=None min_seqlen_k=None page_table=None softmax_scale=None causal=False softcap=None
    window_size_left=None window_size_right=None learnable_sink=None tile_mn=None mma_pv_is_rs=None
    intra_wg_overlap=None num_threads=384 num_splits=1 pack_gqa=None _arch=None score_mod=None mask_mod=None
    block_sparse_tensors=None return_lse=False out=None lse=None aux_tensors=None aux_scalars=None q_descale=None
    k_descale=None v_descale=None gather_kv_indices=None scheduler_metadata=None seqlen_k_per_split=None
    disable_scheduler_metadata=False gather_bwd_recompute_p=False"""
BACKWARD = """q k v out dout lse softmax_scale=None causal=False softcap=0.0 window_size_left=None
    window_size_right=None m_block_size=64 n_block_size=128 num_threads=256 pack_gqa=False num_stages_Q=2
    num_stages_dO=2 SdP_swapAB=False dKV_swapAB=False dQ_swapAB=False AtomLayoutMSdP=2 AtomLayoutNdKV=2
    AtomLayoutMdQ=2 V_in_regs=False cu_seqlens_q=None cu_seqlens_k=None seqused_q=None seqused_k=None
    max_seqlen_q=None max_seqlen_k=None deterministic=False dq=None dk=None dv=None score_mod=None
    score_mod_bwd=None mask_mod=None aux_tensors=None aux_scalars=None block_sparse_tensors=None dlse=None
    learnable_sink=None"""


@pytest.mark.parametrize(("name", "released"), [("_flash_attn_fwd", FORWARD), ("_flash_attn_bwd", BACKWARD)])
def test_the_stand_in_has_the_arguments_of_4_0_0b36(name: str, released: str) -> None:
    parameters = inspect.signature(getattr(flash_attn_4, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    own = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert own == released.split()


def test_the_stand_in_refuses_what_it_does_not_compute() -> None:
    q = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="num_splits"):
        flash_attn_4._flash_attn_fwd(q, q, q, num_splits=2)


forward, backward = flash_attn_4._flash_attn_fwd, flash_attn_4._flash_attn_bwd
Broken = Callable[..., Any]


def with_arguments(function: Broken, **change: Callable[[Any], Any]) -> Broken:
    def broken(*args: Any, **given: Any) -> Any:
        return function(*args, **{name: change[name](x) if name in change else x for name, x in given.items()})

    return broken


def top_left(function: Broken) -> Broken:
    def broken(q: Any, k: Any, *args: Any, window_size_right: int | None = None, **given: Any) -> Any:
        keys = slice(0, q.shape[1] if window_size_right == 0 else None)
        return function(q, k[:, keys], args[0][:, keys], *args[1:], window_size_right=window_size_right, **given)

    return broken


def lse_of_tokens_first(*args: Any, **given: Any) -> Any:
    out, lse, *rest = forward(*args, **given)
    return out, lse.transpose(1, 2).reshape(lse.shape), *rest


def none(x: object) -> None:
    return None


MUTANTS: dict[str, tuple[str, Broken, Broken]] = {
    "lse of another layout": ("length-33", lse_of_tokens_first, backward),
    "lse in log2": ("length-33", lambda *a, **g: (lambda o, s, *_: (o, s * 1.4427))(*forward(*a, **g)), backward),
    "causal from the first key": ("causal-bottom-right", top_left(forward), backward),
    "window without a beginning": ("window", with_arguments(forward, window_size_left=none), backward),
    "window without an end": ("window", with_arguments(forward, window_size_right=none), backward),
    "window one key early": (
        "window-past",
        forward,
        with_arguments(backward, window_size_left=lambda n: n if n is None else n + 1),
    ),
    "no window in backward": ("window", forward, with_arguments(backward, window_size_left=none)),
    "no softcap": ("softcap", with_arguments(forward, softcap=lambda c: 0.0), backward),
    "no softcap in backward": ("softcap", forward, with_arguments(backward, softcap=lambda c: 0.0)),
    "no gradient of lse": ("grad-lse", forward, with_arguments(backward, dlse=none)),
    "gradient of lse with the other sign": ("grad-lse", forward, with_arguments(backward, dlse=torch.neg)),
    "the default scale": ("scale-one", forward, with_arguments(backward, softmax_scale=none)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, first, second = MUTANTS[mutant]
    found = judged_with(case(name), first, second)
    assert not all(found), mutant
    assert all(judged_with(case(name), forward, backward))


def test_head_dims_that_the_kernel_gets_wrong_are_padded() -> None:
    """The stand-in misreads dq as the kernel does: a pair that claims every multiple of 8 is found out."""
    tried = replace(case("length-129"), dtype=torch.bfloat16)
    assert tried.head_dim % 32
    careless = flash_4.make_pair("flash_4", lambda: flash_attn_4, replace(flash_4.CLAIMS, head_dim_multiple=8))
    assert [v.quantity for v in verdicts(edge(careless), tried, "cpu") if not v.ok] == ["dq"]
    assert all(judged_with(tried, forward, backward))


def judged_with(tried: Case, first: Broken, second: Broken) -> list[bool]:
    module = SimpleNamespace(_flash_attn_fwd=first, _flash_attn_bwd=second)
    pair = edge(flash_4.make_pair("flash_4", lambda: module))
    return [v.ok for v in verdicts(pair, replace(tried, dtype=torch.bfloat16), "cpu")]


def test_what_the_kernel_is_handed() -> None:
    """A window's ends from the bottom-right diagonal, options, the gradient of lse; and the tensors as they are."""
    seen: dict[str, Any] = {}

    def noted(*args: Any, **given: Any) -> Any:
        seen.update(given, given=args)
        return backward(*args, **given)

    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=noted)
    pair = flash_4.make_pair("flash_4", lambda: module)
    q, k, v, g = (torch.randn(2, n, 2, 8, dtype=torch.bfloat16) for n in (4, 9, 9, 4))
    mask, options = Mask(causal=6, since=-2), Options(0.5, softcap=3.0, deterministic=True)
    out, lse, *_ = pair.forward(q, k, v, mask, None, options)
    g_lse = torch.randn_like(lse)
    grads = pair.backward(g, g_lse, q, k, v, mask, out, lse, None, (), options, Wanted(True, False, True))
    assert [x is None for x in grads] == [False, True, False, True]
    assert all(a is b for a, b in zip(seen["given"], (q, k, v, out, g, lse), strict=True))
    assert (seen["window_size_left"], seen["window_size_right"]) == (7, 1)
    assert (seen["softmax_scale"], seen["softcap"], seen["deterministic"]) == (0.5, 3.0, True)
    assert seen["dlse"] is g_lse


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Releases of the distributions that are installed; none of the others is."""
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(flash_4, "version", version)
    flash_4.mixed.cache_clear()
    yield there
    flash_4.mixed.cache_clear()


def reasons(monkeypatch: pytest.MonkeyPatch, given: dict[str, Reason]) -> None:
    monkeypatch.setattr(flash_4, "why_not", lambda package: given.get(package.module))


BROKEN = Reason("package-broken", "flash-attn-4 cannot be imported: ModuleNotFoundError: No module named 'cutlass'")
MISSING = Reason("package-missing", "it is not installed")


def test_parts_of_two_releases_are_told(parts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    reasons(monkeypatch, {flash_4.PACKAGE.module: BROKEN})
    parts |= {"nvidia-cutlass-dsl": "4.10.0", "nvidia-cutlass-dsl-libs-base": "4.8.1"}
    reason = flash_4.unavailable("cuda")
    assert reason is not None
    assert reason.value == "nvidia-cutlass-dsl 4.10.0, nvidia-cutlass-dsl-libs-base 4.8.1"
    assert reason.remedy.endswith("nvidia-cutlass-dsl==4.10.0 nvidia-cutlass-dsl-libs-base==4.10.0")


@pytest.mark.parametrize("needed", flash_4.NEEDED, ids=lambda p: p.module)
def test_what_the_package_itself_lacks_is_told(
    needed: Package, parts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts |= {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-base": "4.8.1"}
    reasons(monkeypatch, {flash_4.PACKAGE.module: BROKEN, needed.module: MISSING})
    assert flash_4.unavailable("cuda") is MISSING
    reasons(monkeypatch, {needed.module: MISSING})  # too old a release: imports, and fails when a kernel is compiled
    assert flash_4.unavailable("cuda") is MISSING


@pytest.mark.usefixtures("parts")
def test_the_packages_own_reason_where_all_it_needs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons(monkeypatch, {flash_4.PACKAGE.module: BROKEN})
    assert flash_4.unavailable("cuda") is BROKEN
    reasons(monkeypatch, {flash_4.PACKAGE.module: MISSING, flash_4.DSL.module: BROKEN})
    assert flash_4.unavailable("cuda") is MISSING


@pytest.mark.usefixtures("parts")
def test_other_arguments_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons(monkeypatch, {})
    monkeypatch.setattr(flash_4, "loaded", lambda package: flash_attn_4)
    assert flash_4.unavailable("cuda") is None
    older = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=lambda q, k, v, out, dout, lse: None)
    reason = flash_4.unlike(older)
    assert reason is not None
    assert (reason.code, reason.value[-4:]) == ("schema-moved", "dlse")


@pytest.mark.parametrize(
    ("version", "code"), [("4.0.0.beta30", None), ("4.0.0.beta8", "package-version"), (None, "package-version")]
)
def test_an_older_build_of_the_hub_is_refused(
    version: str | None, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = SimpleNamespace(__version__=version) if version else SimpleNamespace()
    kernel = SimpleNamespace(__package__="a_build", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "a_build", build)  # type: ignore[arg-type]
    monkeypatch.setattr(_hub, "fetch", lambda kernel, device: None)
    monkeypatch.setattr(_hub, "module", lambda pinned: kernel)
    reason = flash_4.fetch("cuda")
    assert (None if reason is None else reason.code) == code


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("needed", flash_4.FLASH_4_HUB.packages, ids=lambda p: p.module)
def test_what_the_hubs_build_needs_is_told(needed: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons(monkeypatch, {needed.module: MISSING})
    assert flash_4.hub_unavailable("cuda") is MISSING
    reasons(monkeypatch, {})
    assert flash_4.hub_unavailable("cuda") is None
