"""What Ulysses' rounds cost on one GPU: `python docs/verified/rounds.py NAME` writes NAME.json and NAME.md beside it.

The attention of one rank's share of 24 heads, forward and backward in bfloat16: all heads in one call, and in two calls
of half of them, which is what hiding an exchange behind the other half costs before it hides anything. And the parts of
a ring step that are not its kernel: merging a partial result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import ringtrue as rt
from ringtrue.bench.environment import environment
from ringtrue.bench.timing import Work, in_turn
from ringtrue.contract import Mask, OpPair, Options, Wanted
from ringtrue.merge import Merged

HERE = Path(__file__).parent
BACKENDS = ("native_cudnn", "native_flash")
LENGTHS, HEADS, DIM = (4608, 16384, 65536), (12, 6, 3), 128


def step(pair: OpPair, heads: tuple[int, ...], length: int) -> Work:
    """Forward and backward of the same heads, in one call or several."""
    tensors = [[torch.randn(1, length, h, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(4)] for h in heads]
    options, wanted = Options(DIM**-0.5), Wanted(True, True, True)

    def run() -> None:
        for q, k, v, g in tensors:
            r = pair.forward(q, k, v, Mask(), None, options)
            pair.backward(g, None, q, k, v, Mask(), r.out, r.lse, None, r.saved, options, wanted)

    return run


def merging(length: int) -> Work:
    """One part of a ring of two added to a total, (1, length, 24, 128)."""
    q = torch.randn(1, length, 24, DIM, dtype=torch.bfloat16, device="cuda")
    lse = torch.randn(1, 24, length, device="cuda")
    merged = Merged(q, DIM)
    merged.add(slice(0, length), q, lse)
    merged.add(slice(0, length), q, lse)
    return lambda: merged.add(slice(0, length), q, lse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    asked = parser.parse_args()
    rows, merges = [], []
    for backend in BACKENDS:
        pair = rt.op_pair(backend, "cuda")
        for length in LENGTHS:
            for heads in HEADS:
                halves = (heads - heads // 2, heads // 2)
                times = in_turn({"one": step(pair, (heads,), length), "two": step(pair, halves, length)}, "cuda", 7)
                one, two = times["one"], times["two"]
                ratio = two.over(one)
                rows.append([backend, length, heads, one.median * 1e3, two.median * 1e3, ratio])
    for length in LENGTHS:
        merges.append([length, in_turn({"merge": merging(length)}, "cuda", 7)["merge"].median * 1e6])
    found = {"commit": asked.commit, "versions": environment("cuda", asked.commit), "rounds": rows, "merge_us": merges}
    (asked.out / f"{asked.name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    lines = [f"# {asked.name}", "", f"`python docs/verified/rounds.py {asked.name}`, commit {asked.commit}", ""]
    lines += [f"- {key}: {value}" for key, value in found["versions"].items()]
    lines += ["", "Forward and backward of a rank's heads, bfloat16, head dim 128, medians:", ""]
    lines += ["| backend | tokens | heads | one call, ms | two calls, ms | ratio |", "| -- " * 6 + "|"]
    lines += [f"| {b} | {n} | {h} | {one:.3f} | {two:.3f} | {ratio:.3f} |" for b, n, h, one, two, ratio in rows]
    lines += ["", "Merging one part into the total of a ring, (1, tokens, 24, 128), bfloat16 part:", ""]
    lines += ["| tokens | us |", "| -- | -- |", *(f"| {n} | {us:.0f} |" for n, us in merges), ""]
    (asked.out / f"{asked.name}.md").write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
