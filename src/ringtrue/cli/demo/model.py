"""The demo's problem: a small real Flux transformer with sharpened attention, and a batch with ragged text."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from .settings import ENTROPY_LIMIT, Settings

CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 48,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (16, 24, 24),
}
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


@dataclass(frozen=True)
class Batch:
    """Two samples on their way from noise to data; the second has half as many real text tokens as the first."""

    image: Tensor
    text: Tensor
    pooled: Tensor
    time: Tensor
    target: Tensor
    image_ids: Tensor
    text_ids: Tensor
    keep_text: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Everything on the device, what is floating in `dtype`."""
        values = (getattr(self, field.name).to(device) for field in fields(self))
        return Batch(*(x.to(dtype) if x.is_floating_point() else x for x in values))

    def run(self, model: nn.Module, key_mask: Tensor) -> Tensor:
        """The model's prediction for the whole batch."""
        return model(
            hidden_states=self.image,
            encoder_hidden_states=self.text,
            pooled_projections=self.pooled,
            timestep=self.time,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            joint_attention_kwargs={"attention_mask": key_mask},
            return_dict=False,
        )[0]


def make_batch(settings: Settings) -> Batch:
    """A rectified-flow batch: image = (1 - t) data + t noise, target = noise - data."""
    draw = torch.Generator().manual_seed(settings.seed + 1)
    images, texts = settings.image_tokens, settings.text_tokens
    time = torch.tensor([0.5, 0.25])  # times a thousand they are exact in every dtype
    data, noise = (torch.randn(2, images, CONFIG["in_channels"], generator=draw) for _ in range(2))
    t = time[:, None, None]
    lengths = torch.tensor(settings.text_lengths)
    row = math.ceil(math.sqrt(images))
    place = torch.arange(images)
    return Batch(
        image=(1 - t) * data + t * noise,
        text=torch.randn(2, texts, CONFIG["joint_attention_dim"], generator=draw),
        pooled=torch.randn(2, CONFIG["pooled_projection_dim"], generator=draw),
        time=time,
        target=noise - data,
        image_ids=torch.stack([torch.zeros_like(place), place // row, place % row], 1),
        text_ids=torch.zeros(texts, 3, dtype=torch.long),
        keep_text=torch.arange(texts) < lengths[:, None],
    )


def make_model(settings: Settings) -> FluxTransformer2DModel:
    """diffusers' own class with seeded random weights, in float32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return FluxTransformer2DModel(**CONFIG)


def sharpen(model: FluxTransformer2DModel, batch: Batch, dtype: torch.dtype) -> tuple[float, float]:
    """Multiply the norms of queries and keys until attention is far from uniform -> (entropy, factor).

    Nearly uniform attention would hide wrong gradients of q and k. The entropy is relative to that of uniform attention
    over the keys that a sample can see, measured in float64 with the weights rounded to `dtype`, as they will be used.
    """
    factor, eager, cpu = 1.0, Eager(exact=True), torch.device("cpu")
    truth = empty_copy(torch.float64)
    truth.set_attn_processor(eager)
    inputs = batch.to(cpu, dtype).to(cpu, torch.float64)
    norms = [w for name, w in model.named_parameters() if name.split(".")[-2] in NORMS]
    while True:
        truth.load_state_dict({name: w.to(dtype) for name, w in model.state_dict().items()})
        eager.entropies = []
        with torch.no_grad():
            inputs.run(truth, whole_mask(inputs))
        entropy = sum(eager.entropies) / len(eager.entropies)
        if entropy < ENTROPY_LIMIT:
            return entropy, factor
        factor *= 1.1
        with torch.no_grad():
            for weight in norms:
                weight.mul_(1.1)


def empty_copy(dtype: torch.dtype) -> FluxTransformer2DModel:
    """The same model in another dtype, its weights still to be loaded."""
    return nn.Module.to(FluxTransformer2DModel(**CONFIG), dtype)  # its own `to` warns about every cast


def whole_mask(batch: Batch) -> Tensor:
    """The key mask of the whole sequence, text before image, (B, 1, 1, keys); all image tokens are real."""
    real = torch.ones(batch.image.shape[:2], dtype=torch.bool, device=batch.image.device)
    return torch.cat([batch.keep_text, real], 1)[:, None, None, :]


class Eager:
    """A processor for diffusers' Flux attention: the formula as anyone would write it, in the model's dtype.

    exact  for the truth: RoPE in the model's dtype too. diffusers applies it in float32, also to a float64 model; the
           tables of sines are float32 for everybody.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.entropies: list[float] | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        heads = (-1, attn.head_dim)
        q, k, v = (to(hidden_states).unflatten(-1, heads) for to in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_q, text_k, text_v = (to(encoder_hidden_states).unflatten(-1, heads) for to in added)
            text_q, text_k = attn.norm_added_q(text_q), attn.norm_added_k(text_k)
            q, k, v = (torch.cat(pair, 1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        assert image_rotary_emb is not None
        rotate = rotated if self.exact else partial(apply_rotary_emb, sequence_dim=1)
        q, k = (rotate(x, image_rotary_emb) for x in (q, k))
        out = self.attention(q, k, v, attention_mask).flatten(2)
        if encoder_hidden_states is None:
            return out
        text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(D)) v over the keys that are kept; (B, S, H, D) in and out."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep, -torch.inf)
        weights = scores.softmax(-1)
        if self.entropies is not None:
            self.entropies.append(relative_entropy(weights, weights.shape[-1] if keep is None else keep.sum(-1)))
        return (weights @ v).transpose(1, 2)


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE as diffusers' Flux applies it, without the detour through float32."""
    cos, sin = (table[None, :, None, :].to(x.dtype) for table in tables)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-imaginary, real], -1).flatten(3) * sin


def relative_entropy(weights: Tensor, keys: Tensor | int) -> float:
    """Mean entropy of attention weights (B, H, Sq, Sk), each as a share of uniform attention's over `keys` keys."""
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    most = torch.as_tensor(keys, dtype=weights.dtype, device=weights.device).log()
    return (entropy / most.clamp(min=1e-9)).mean().item()
