"""Ranks that disagree: every rank raises, within seconds, and names the rank and the difference. Real processes."""

from __future__ import annotations

from time import monotonic

import pytest
import torch

import ringtrue as rt
from gloo import Pool
from ringtrue.parallel.twin import Rank, World

LIMIT = 10  # seconds; a hang would be the pool's timeout

# what rank 1 does otherwise -> what every rank's error says
DIFFERENCES = {
    "batch": ("DisagreementError", "batch: rank 0 2, rank 1 1"),
    "heads": ("DisagreementError", "heads: rank 0 2, rank 1 4"),
    "key heads": ("DisagreementError", "key heads: rank 0 2, rank 1 1"),
    "head dim": ("DisagreementError", "head dim: rank 0 8, rank 1 4"),
    "value dim": ("DisagreementError", "value dim: rank 0 8, rank 1 4"),
    "dtype": ("DisagreementError", "dtype: rank 0 float32, rank 1 bfloat16"),
    "causal": ("DisagreementError", 'causal: rank 0 [], rank 1 ["top_left"]'),
    "scale": ("DisagreementError", "scale: rank 0 0.5, rank 1 0.25"),
    "return_lse": ("DisagreementError", "return_lse: rank 0 false, rank 1 true"),
    "backend": ("DisagreementError", "backend: rank 0 auto, rank 1 native_math"),
    "mask kind": ("DisagreementError", "rank 0 none, or KeyPadding, rank 1 KeyBias float32"),
    "float beside bool": ("DisagreementError", "rank 1 KeyBias float32"),
    "a mask with rows": ("DisagreementError", "rank 0 none, or KeyPadding, rank 1 tensor bool"),
    "segments": ("DisagreementError", "rank 0 none, or KeyPadding, rank 1 Segments"),
    "window": ("DisagreementError", "window: rank 0 [null, null], rank 1 [-2, 0]"),
    "dropout": ("DisagreementError", "dropout_p: rank 0 0.0, rank 1 0.1"),
    "softcap": ("DisagreementError", "softcap: rank 0 0.0, rank 1 2.0"),
    "deterministic": ("DisagreementError", "deterministic: rank 0 false, rank 1 true"),
    "joint prefix": ("DisagreementError", "joint_prefix: rank 0 0, rank 1 1"),
    "replicated keys": ("DisagreementError", "kv_replicated: rank 0 false, rank 1 true"),
    "grad mode": ("DisagreementError", "rank 1: grad mode off"),
    "own mistake": ("PeerError", "rank 1"),
    "another call": ("DisagreementError", "gather"),
}


def other_arguments(cp: rt.ContextParallel, how: str) -> dict[str, object]:
    """What rank 1 passes otherwise."""
    table: dict[str, dict[str, object]] = {
        "causal": {"is_causal": True},
        "scale": {"scale": 0.25},
        "return_lse": {"return_lse": True},
        "backend": {"backend": "native_math"},
        "mask kind": {"attn_mask": rt.KeyBias(torch.zeros(2, 3))},
        "float beside bool": {"attn_mask": rt.KeyBias(torch.zeros(2, 3))},
        "a mask with rows": {"attn_mask": torch.ones(3, 3 * cp.size, dtype=torch.bool)},
        "segments": {"attn_mask": rt.Segments(torch.zeros(2, 3, dtype=torch.int64))},
        "window": {"attn_mask": rt.Window(2, 0)},
        "dropout": {"dropout_p": 0.1},
        "softcap": {"softcap": 2.0},
        "deterministic": {"deterministic": True},
        "joint prefix": {"parallel": cp.call(joint_prefix=1)},
        "replicated keys": {"parallel": cp.call(kv_replicated=True)},
    }
    return table.get(how, {})


def call(cp: rt.ContextParallel, how: str) -> str:
    """One attention call that rank 1 makes in another way; the error's type and text."""
    other = cp.rank == 1
    shapes = [[2, 3, 2, 8] for _ in "qkv"]
    changes = {"batch": (0, 1, "qkv"), "heads": (2, 4, "q"), "key heads": (2, 1, "kv"), "head dim": (3, 4, "qk"),
               "value dim": (3, 4, "v")}  # fmt: skip
    if other and how in changes:
        axis, value, of = changes[how]
        for name in of:
            shapes["qkv".index(name)][axis] = value
    dtype = torch.bfloat16 if other and how == "dtype" else torch.float32
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    if other and how == "own mistake":
        k = k[:, :2]
    beside = rt.KeyPadding(torch.ones(2, 3, dtype=torch.bool)) if how == "float beside bool" else None
    arguments = {"attn_mask": beside, "scale": 0.5, "parallel": cp, "enable_gqa": True, "backend": "auto"}
    arguments |= other_arguments(cp, how) if other else {}
    before = q.clone()
    try:
        if other and how == "another call":
            cp.gather(q, 1)
        else:
            with torch.set_grad_enabled(not (other and how == "grad mode")):
                rt.attention(q, k, v, **arguments)  # type: ignore[arg-type]
    except rt.RingtrueError as error:
        assert torch.equal(q, before)
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def check(texts: list[str], how: str) -> None:
    kind, said = DIFFERENCES[how]
    own = {"own mistake": "ArgumentError"}.get(how, kind)
    for rank, text in enumerate(texts):
        assert text.startswith(own if rank == 1 else kind), text
        assert (rank == 1 and own != kind) or said in text, text


def on_gloo(rank: int, world: int, degrees: tuple[int, int]) -> list[tuple[str, float]]:
    """All differences in one context: an error leaves it usable."""
    cp = rt.ContextParallel(rt.ContextParallelConfig(*degrees, timeout=LIMIT))
    found = []
    for how in DIFFERENCES:
        start = monotonic()
        found.append((call(cp, how), monotonic() - start))
    assert call(cp, "nothing") == "nothing raised"
    return found


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["ulysses", "ring"])
def test_all_ranks_raise_and_name_the_difference(pool: Pool, degrees: tuple[int, int]) -> None:
    results = pool.run(on_gloo, 2, degrees, timeout=60)
    for i, how in enumerate(DIFFERENCES):
        check([ranks[i][0] for ranks in results], how)
        assert all(ranks[i][1] < LIMIT for ranks in results)


@pytest.mark.parametrize("how", DIFFERENCES)
def test_the_same_on_the_twin(how: str) -> None:
    def body(mesh: Rank) -> str:
        return call(rt.ContextParallel(rt.ContextParallelConfig(2, 2, mesh=mesh)), how)

    texts = World(4).run(body)
    kind, _ = DIFFERENCES[how]
    assert all(text.startswith(kind) for rank, text in enumerate(texts) if rank != 1), texts
    assert texts[1] != "nothing raised"


def mask_call(mask: object, arguments: dict[str, object] | None = None) -> list[str]:
    def body(mesh: Rank) -> str:
        cp = rt.ContextParallel(rt.ContextParallelConfig(1, 2, mesh=mesh))
        q, k, v = (torch.randn(2, 3, 2, 8) for _ in range(3))
        with pytest.raises(rt.RingtrueError) as caught:
            rt.attention(q, k, v, mask, parallel=cp, **(arguments or {}))  # type: ignore[arg-type]
        return f"{type(caught.value).__name__}: {caught.value}"

    return World(2).run(body)


def test_mask_in_the_wrong_form() -> None:
    """A tensor mask has the columns of all keys; a key mask that is sharded like the keys is KeyPadding."""
    for text in mask_call(torch.ones(2, 1, 1, 3, dtype=torch.bool)):
        assert text.startswith("ArgumentError")
        assert "6 columns" in text
        assert "3 columns" in text
        assert "KeyPadding" in text
    for text in mask_call(rt.KeyPadding(torch.ones(2, 6, dtype=torch.bool))):
        assert "(2, 3)" in text
        assert "sharded like the keys" in text


def test_degrees_that_do_not_fit() -> None:
    def body(mesh: Rank) -> str:
        with pytest.raises(rt.ArgumentError) as caught:
            rt.ContextParallel(rt.ContextParallelConfig(2, 2, mesh=mesh))
        return str(caught.value)

    for text in World(3).run(body):
        assert "3" in text
        assert "4" in text
    with pytest.raises(rt.ArgumentError, match=r"initiali[sz]ed|process group"):
        rt.ContextParallel(rt.ContextParallelConfig(ulysses_degree=2))


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"ulysses_degree": 0}, rt.ArgumentError, "ulysses_degree"),
        ({"ring_degree": 1.5}, rt.ArgumentError, "ring_degree"),
        ({"load_balance": "zigzag"}, rt.ArgumentError, "zigzag"),
        ({"load_balance": "zigzag"}, rt.ArgumentError, "load_balance"),
        ({"lengths": "guess"}, rt.ArgumentError, "lengths"),
        ({"timeout": 0}, rt.ArgumentError, "timeout"),
    ],
)
def test_config_says_what_it_takes(options: dict[str, object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        rt.ContextParallelConfig(**options)  # type: ignore[arg-type]
