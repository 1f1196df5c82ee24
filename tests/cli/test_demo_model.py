"""The demo's model: truth and yardstick compute what diffusers computes, attention is sharp, text ragged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ringtrue as rt

pytest.importorskip("diffusers")

from diffusers.models.embeddings import apply_rotary_emb

from ringtrue.cli.demo.model import (
    NORMS,
    Eager,
    empty_copy,
    make_batch,
    make_model,
    relative_entropy,
    rotated,
    sharpen,
    whole_mask,
)
from ringtrue.cli.demo.settings import ENTROPY_LIMIT, Settings
from ringtrue.cli.demo.train import forward, sum_gradients, train

SETTINGS = Settings(image_tokens=13, text_tokens=5, steps=2)
CPU = torch.device("cpu")


def test_relative_entropy() -> None:
    keep = torch.tensor([[True] * 4, [True, True, False, False]])[:, None, None]
    uniform = keep / keep.sum(-1, keepdim=True)
    assert relative_entropy(uniform.double(), keep.sum(-1)) == pytest.approx(1.0)
    one = torch.tensor([1.0, 0, 0, 0]).expand(2, 3, 5, 4)
    assert relative_entropy(one, 4) == 0.0
    assert relative_entropy(torch.ones(1, 1, 1, 1), 1) == 0.0  # one key: no choice, and no NaN


def test_sharpen_stops_just_below_the_limit() -> None:
    plain, model = make_model(SETTINGS), make_model(SETTINGS)
    entropy, factor = sharpen(model, make_batch(SETTINGS), torch.float32)
    assert ENTROPY_LIMIT - 0.1 < entropy < ENTROPY_LIMIT
    assert factor > 1
    for (name, before), after in zip(plain.named_parameters(), model.parameters(), strict=True):
        by = factor if name.split(".")[-2] in NORMS else 1.0
        assert torch.allclose(after, before * by, rtol=1e-6), name


def test_the_batch_is_ragged_and_every_position_is_its_own() -> None:
    batch = make_batch(SETTINGS)
    assert batch.keep_text.sum(-1).tolist() == [5, 2]
    assert whole_mask(batch).shape == (2, 1, 1, 18)
    assert len(batch.image_ids.unique(dim=0)) == 13
    again = make_batch(SETTINGS)
    assert torch.equal(batch.image, again.image)
    assert not torch.equal(batch.image, make_batch(Settings(image_tokens=13, seed=1)).image)


def test_weights_follow_the_seed_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = make_model(SETTINGS), make_model(SETTINGS)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_exact_rope_is_that_of_diffusers() -> None:
    x, angle = torch.randn(2, 7, 3, 8), torch.randn(7, 4).repeat_interleave(2, -1)
    tables = angle.cos(), angle.sin()
    exact = rotated(x.double(), tables)
    assert exact.dtype == torch.float64
    assert torch.allclose(exact.float(), apply_rotary_emb(x, tables, sequence_dim=1), atol=1e-6)


def gradients(model: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = make_batch(SETTINGS).to(CPU, dtype)
    out, loss = forward(model, batch, whole_mask(batch))
    loss.backward()
    return out, sum_gradients(model, lambda flat: flat, 1.0)


def test_the_eager_model_is_the_one_of_diffusers() -> None:
    plain, eager = make_model(SETTINGS), make_model(SETTINGS)
    eager.set_attn_processor(Eager())
    (out, grads), (eager_out, eager_grads) = gradients(plain, torch.float32), gradients(eager, torch.float32)
    assert torch.allclose(out, eager_out, atol=1e-5)
    for name, grad in grads.items():
        assert (grad - eager_grads[name]).norm() <= 1e-4 * grad.norm() + 1e-7, name


def test_the_truth_is_exact_in_rope_too() -> None:
    weights = make_model(SETTINGS).state_dict()
    results = {}
    for exact in (True, False):
        model = empty_copy(torch.float64)
        model.load_state_dict(weights)
        model.set_attn_processor(Eager(exact))
        results[exact] = gradients(model, torch.float64)[0]
    error = (results[True] - results[False]).norm() / results[True].norm()
    assert 1e-11 < error < 1e-7  # diffusers' RoPE goes through float32


def test_training_lowers_the_loss_and_reports_every_step() -> None:
    model, batch = make_model(SETTINGS), make_batch(SETTINGS)
    rt.integrations.diffusers.use(model, backend="native_math")
    seen: list[int] = []
    found = train(model, batch, whole_mask(batch), 2, on_step=seen.append)
    assert seen == [1, 2]
    assert len(found.losses) == 3
    assert found.losses[-1] < found.losses[0]
    assert found.grads.keys() == dict(model.named_parameters()).keys()


def test_the_loss_scale_of_float16_leaves_no_trace() -> None:
    results = []
    for dtype in (torch.float32, torch.float16):
        model = nn.Module.to(make_model(SETTINGS), dtype)
        batch = make_batch(SETTINGS).to(CPU, dtype)
        results.append(train(model, batch, whole_mask(batch), 1))
    for name, grad in results[0].grads.items():
        assert results[1].grads[name].dtype == torch.float32
        assert (results[1].grads[name] - grad).norm() <= 0.05 * grad.norm() + 1e-6, name


def test_a_parameter_without_gradient_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"1 parameters have no gradient, the first is weight"):
        sum_gradients(nn.Linear(2, 2, bias=False), lambda flat: flat, 1.0)
