"""A small video transformer, trained with its sequence split over processes: copy from here.

    python examples/video_transformer.py                                                            # one process
    torchrun --standalone --nproc-per-node 2 examples/video_transformer.py --ring 2
    torchrun --standalone --nproc-per-node 4 examples/video_transformer.py --ulysses 2 --ring 2

All of them print the same losses; --ulysses times --ring is the number of processes. Each block attends over text and
video jointly, then from the video to a condition (an image, say), then has a feed-forward layer. Every process makes
the same whole batch and keeps a part of the video; lines that are there for context parallelism are marked `# cp`. On
CUDA the same code runs over NCCL.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringtrue as rt

FRAMES, ROWS, COLUMNS = 3, 5, 5  # 75 video tokens: they need not divide by the number of processes
TEXT, CONDITION, CHANNELS = 7, 11, 8
WIDTH, HEADS, BLOCKS = 48, 3, 2  # 3 heads: nor need they


@dataclass(frozen=True)
class Batch:
    """noisy, target (B, video tokens, CHANNELS); text (B, TEXT, WIDTH), text_keep (B, TEXT) bool; condition
    (B, CONDITION, WIDTH); time (B,)."""

    noisy: Tensor
    target: Tensor
    text: Tensor
    text_keep: Tensor
    condition: Tensor
    time: Tensor


def make_batch(device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
    """The same on every process: ranks of one context work on one sample, so they must draw alike."""
    numbers = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(device, dtype)

    video, noise = draw(2, FRAMES * ROWS * COLUMNS, CHANNELS), draw(2, FRAMES * ROWS * COLUMNS, CHANNELS)
    time = torch.tensor([0.3, 0.7], device=device, dtype=dtype)
    noisy = torch.lerp(video, noise, time[:, None, None])
    text_keep = torch.arange(TEXT, device=device) < torch.tensor([[TEXT], [4]], device=device)  # the second is padded
    return Batch(noisy, noise - video, draw(2, TEXT, WIDTH), text_keep, draw(2, CONDITION, WIDTH), time)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.cross_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.cross_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.cross_out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(
        self,
        x: Tensor,
        angles: Tensor,
        keep: rt.KeyPadding,
        condition: Tensor,
        cp: rt.ContextParallel,
        shard_condition: bool,
    ) -> Tensor:
        """x (B, TEXT + this rank's video tokens, WIDTH): the text first, the same on every rank."""
        joint = cp.call(joint_prefix=TEXT)  # cp: it is one text, not one a rank
        cross = cp.call(kv_replicated=not shard_condition)  # cp
        q, k, v = _heads(self.qkv(self.norms[0](x)), 3)
        out = rt.attention(rotate(q, angles), rotate(k, angles), v, keep, parallel=joint)
        x = x + self.out(out.flatten(2))
        text, video = x[:, :TEXT], x[:, TEXT:]
        (q,), (k, v) = _heads(self.cross_q(self.norms[1](video)), 1), _heads(self.cross_kv(condition), 2)
        video = video + self.cross_out(rt.attention(q, k, v, parallel=cross).flatten(2))
        x = torch.cat([text, video], 1)
        return x + self.mlp(self.norms[2](x))


class VideoTransformer(nn.Module):
    """noisy video (B, all tokens, CHANNELS) -> its velocity, whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, CHANNELS)

    def forward(self, batch: Batch, cp: rt.ContextParallel, shard_condition: bool = False) -> Tensor:
        video = cp.shard(batch.noisy, dim=1)  # cp
        place = cp.positions(batch.noisy.shape[1]).to(video.device)  # cp: where these tokens are in the whole video
        x = torch.cat([batch.text, self.embed(video)], 1) + self.time(batch.time[:, None])[:, None]
        keep = torch.cat([batch.text_keep, batch.text_keep.new_ones(video.shape[:2])], 1)
        # cp: a short condition stays whole on every rank; a long one is split like the video
        condition = cp.shard(batch.condition, dim=1) if shard_condition else batch.condition
        angles = rope(place, WIDTH // HEADS, video.dtype)
        for block in self.blocks:
            x = block(x, angles, rt.KeyPadding(keep), condition, cp, shard_condition)
        return cp.gather(self.last(x[:, TEXT:]), dim=1)  # cp


def rope(place: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Angles (TEXT + tokens, head_dim / 2) from frame, row and column; the text is not rotated."""
    axes = (place // (ROWS * COLUMNS), place // COLUMNS % ROWS, place % COLUMNS)
    sizes = (head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6)
    angles = [
        axis[:, None] * 100.0 ** -torch.linspace(0, 1, size, device=place.device, dtype=dtype)
        for axis, size in zip(axes, sizes, strict=True)
    ]
    return F.pad(torch.cat(angles, 1), (0, 0, TEXT, 0))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x (B, S, H, D), angles (S, D / 2)."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _heads(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """(B, S, parts x WIDTH) -> parts times (B, S, HEADS, WIDTH / HEADS)."""
    return tuple(part.unflatten(2, (HEADS, -1)) for part in x.chunk(parts, 2))


def sum_gradients(model: nn.Module, cp: rt.ContextParallel) -> None:
    """The one rule: every gradient is a part, and the SUM over the ranks of the context is the gradient.

    With data parallelism beside it: this sum over the context's ranks, then the mean over data-parallel ones.
    """
    if cp.size > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # here the context is the whole world


def backward(model: VideoTransformer, batch: Batch, cp: rt.ContextParallel, shard_condition: bool = False) -> float:
    """Leave the gradients in the parameters; the loss."""
    loss = F.mse_loss(model(batch, cp, shard_condition), batch.target)
    cp.loss(loss).backward()  # cp: every rank computed this same loss, so each contributes its share
    sum_gradients(model, cp)  # cp
    return loss.item()


def train(
    model: VideoTransformer, batch: Batch, cp: rt.ContextParallel, steps: int = 5, shard_condition: bool = False
) -> list[float]:
    """AdamW; the loss before each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        losses.append(backward(model, batch, cp, shard_condition))
        optimiser.step()  # equal gradients on every rank: the weights stay equal
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small video transformer under context parallelism.")
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--ring", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shard-condition", action="store_true", help="split the condition instead of repeating it")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # equal weights on every rank
    model = VideoTransformer().to(device)
    cp = rt.ContextParallel(rt.ContextParallelConfig(options.ulysses, options.ring))
    losses = train(model, make_batch(device), cp, options.steps, options.shard_condition)
    if cp.rank == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}  loss {loss:.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
