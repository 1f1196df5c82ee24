"""Checksums of a model's inputs: what they see, and that ranks which were given different inputs all say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_flux import failures
from tiny_flux import build, inputs, ragged, with_mask

import ringtrue as rt
from gloo import Failure, Pool
from ringtrue.integrations import diffusers as ours
from ringtrue.integrations.diffusers import checksums
from ringtrue.integrations.diffusers.models import FLUX
from ringtrue.parallel.twin import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def weights() -> None:
    build()  # before any thread asks


def of(*tensors: torch.Tensor) -> str:
    found = checksums.of_inputs({"x": list(tensors) if len(tensors) > 1 else tensors[0]}, FLUX, CPU)
    assert found is not None
    return found["x"]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_every_bit_counts_and_storage_does_not(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(2, 3, 4).remainder(5).to(dtype)
    assert of(x) == of(x.clone()) == of(x.transpose(0, 1).contiguous().transpose(0, 1)) == of(x[:, :, :].detach())
    for place in ((0, 0, 0), (1, 2, 3)):
        other = x.clone()
        other[place] = other[place] + 1 if dtype != torch.bool else ~other[place]
        assert of(other) != of(x)
    assert of(x.flip(0)) != of(x), "the same samples in another order"


def test_the_least_bits_and_sums_that_would_cancel() -> None:
    one = torch.ones(3)
    assert of(one) != of(torch.nextafter(one, 2 * one))
    assert of(torch.zeros(3)) != of(-torch.zeros(3))
    assert of(torch.tensor([500, 500])) != of(torch.tensor([502, 499])), "weights 1 and 2 would cancel"
    assert of(torch.tensor([500, 500])) != of(torch.tensor([501, 499]))
    assert of(torch.tensor([torch.nan])) == of(torch.tensor([torch.nan]))
    assert of(one, 2 * one) != of(2 * one, one), "tensors of a list, in their order"
    assert of(torch.ones(0)) == of(torch.ones(0, 5))


def test_pieces_are_joined_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    whole = of(x)
    monkeypatch.setattr(checksums, "_PIECE", 4)
    assert of(x) == whole


def test_everything_but_the_mask_is_looked_at() -> None:
    given = {
        **inputs(7, 5),
        "controlnet_block_samples": [torch.ones(1)],
        "guidance": None,
        "controlnet_blocks_repeat": True,
    }
    given |= {"joint_attention_kwargs": {"attention_mask": torch.ones(1), "scale": 0.5}}
    found = checksums.of_inputs(given, FLUX, CPU)
    assert found is not None
    expected = inputs(7, 5).keys() - {"return_dict"} | {"controlnet_block_samples", "controlnet_blocks_repeat"}
    assert found.keys() == expected | {"joint_attention_kwargs['scale']"}


def other_noise(rank: int) -> dict[str, Any]:
    """The mutant: each rank draws its own noise."""
    noise = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return {**inputs(7, 5), "hidden_states": noise.requires_grad_()}


def changed(name: str, change: Any) -> Any:
    return lambda rank: {**inputs(7, 5), name: change(inputs(7, 5)[name], rank)}


DIFFERENT = {
    "hidden_states": other_noise,
    "timestep": changed("timestep", lambda x, rank: x - 1e-9 * rank),
    "pooled_projections": changed("pooled_projections", lambda x, rank: x.roll(rank, 0)),
    "img_ids": changed("img_ids", lambda x, rank: x + rank),
    "joint_attention_kwargs['scale']": lambda rank: {**inputs(7, 5), "joint_attention_kwargs": {"scale": 1.0 - rank}},
}


@pytest.mark.parametrize("which", DIFFERENT)
def test_different_inputs_are_named_on_all_ranks(which: str) -> None:
    first, second = failures(lambda rank, model: DIFFERENT[which](rank))
    assert type(first) is type(second) is rt.DisagreementError
    assert str(first) == str(second)
    text = str(first)
    assert f"checksums of {which} (rank 0: " in text
    assert text.count("(rank 0: ") == 1, "the others are equal"
    for words in ("; rank 1: ", "seed the generator", "check_inputs=0"):
        assert words in text


def run(rank: Any, forwards: int, make: Any, **options: Any) -> list[str]:
    """What became of each forward: "ok", or the error's type."""
    model = build()
    ours.parallelize(model, rt.ContextParallelConfig(ulysses_degree=2, mesh=rank), **options)
    said = []
    for number in range(forwards):
        try:
            model(**make(rank.rank, number, model))
            said.append("ok")
        except rt.RingtrueError as error:
            said.append(type(error).__name__)
    return said


@pytest.mark.parametrize(("options", "caught"), [({}, 3), ({"check_inputs": 0}, 0), ({"check_inputs": 1}, 1)])
def test_the_first_forwards_are_checked(options: dict[str, int], caught: int) -> None:
    for said in World(2).run(lambda rank: run(rank, 4, lambda r, number, model: other_noise(r), **options)):
        assert said == ["DisagreementError"] * caught + ["ok"] * (4 - caught)


def test_legal_differences_are_no_difference() -> None:
    """Own key masks or none, storage, return_dict, and a number of checks that one rank chose for itself."""

    def make(rank: int, number: int, model: Any) -> dict[str, Any]:
        given = {**inputs(7, 5), "return_dict": bool(rank)}
        if rank:
            image = given["hidden_states"].detach()
            given["hidden_states"] = torch.stack([image, image], -1)[..., 0].requires_grad_()
        return with_mask(given, ours.local_key_mask(ragged(5), 7, model=model) if number else None)

    assert World(2).run(run, 3, make) == [["ok"] * 3] * 2

    def on(rank: Any) -> list[str]:
        return run(rank, 2, lambda rank, number, model: other_noise(rank), check_inputs=rank.rank)

    assert World(2).run(on) == [["ok"] * 2] * 2, "compared where all ranks bring theirs"


def test_a_rank_that_fails_before_it_has_a_checksum_does_not_hang_the_others() -> None:
    def make(rank: int, number: int, model: Any) -> dict[str, Any]:
        return {**inputs(7, 5), "img_ids": None} if (rank, number) == (1, 0) else inputs(7, 5)

    assert World(2).run(run, 2, make) == [["PeerError", "ok"], ["ArgumentError", "ok"]]


def on_process(rank: int, world: int) -> None:
    model = build()
    ours.parallelize(model, rt.ContextParallelConfig(ring_degree=2))
    model(**inputs(7, 5))
    model(**other_noise(rank))


def test_real_processes(pool: Pool) -> None:
    for result in pool.run(on_process, 2, check=False, timeout=120):
        assert isinstance(result, Failure)
        assert result.type_name == "DisagreementError"
        assert "checksums of hidden_states (rank 0: " in result.text


@pytest.mark.parametrize("number", [-1, True, 1.5, None])
def test_a_number_of_checks_that_is_none(number: Any) -> None:
    with pytest.raises(rt.ArgumentError, match="check_inputs is not a number of forwards"):
        ours.parallelize(build(), rt.ContextParallelConfig(), check_inputs=number)
