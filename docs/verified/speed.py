"""Every backend that trains on this GPU, in turn: `python docs/verified/speed.py NAME` makes NAME.json and NAME.md.

Forward and backward in bfloat16 through `rt.attention`, and where there is one, through the kernel's own public call;
all of them take turns on the same tensors, so that clocks and other load are the same for each. What `auto` prefers is
taken from these tables.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringtrue as rt
from ringtrue.bench.environment import environment
from ringtrue.bench.pair import TORCH
from ringtrue.bench.timing import Work, extra_peak, in_turn

HERE = Path(__file__).parent
BASE = "native_cudnn"  # what F.scaled_dot_product_attention takes on these GPUs
LENGTHS, HEADS, DIMS = (512, 1024, 4608, 16384, 32768), 24, (128, 64)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def own_calls(name: str, *, causal: bool) -> Attend | None:
    """The public call of a backend's kernel outside this library, (B, S, H, D) in and out; None where there is none."""
    if name in TORCH:

        def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel([TORCH[name]]):
                seen = (x.transpose(1, 2) for x in (q, k, v))
                return scaled_dot_product_attention(*seen, is_causal=causal).transpose(1, 2)

        return torchs
    if name == "flash_4":
        call = importlib.import_module("flash_attn.cute.interface").flash_attn_func
        return lambda q, k, v: call(q, k, v, causal=causal)[0]
    return None


def work(attend: Attend, tensors: Sequence[Tensor], grad_out: Tensor) -> Work:
    """One forward and one backward."""
    return lambda: torch.autograd.grad(attend(*tensors), tensors, grad_out)


def measured(length: int, dim: int, *, causal: bool, names: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    """One row a backend; a backend that raises has its text instead of figures."""
    draw = torch.Generator("cuda").manual_seed(0)
    size = (1, length, HEADS, dim)
    *tensors, grad = (torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in tensors:
        x.requires_grad_()
    calls: dict[str, Work] = {}
    rows = {name: {"backend": name, "tokens": length, "head_dim": dim, "causal": causal} for name in names}
    for name in names:
        ways = {"ours": partial(rt.attention, is_causal=causal, backend=name, parallel=False)}
        try:
            ways |= {"own": own} if (own := own_calls(name, causal=causal)) is not None else {}
            for way, attend in ways.items():
                work(attend, tensors, grad)()
                calls[f"{name} {way}"] = work(attend, tensors, grad)
        except Exception as error:  # one kernel's trouble is its own row
            rows[name]["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            calls = {key: call for key, call in calls.items() if key.split()[0] != name}
    times = in_turn(calls, "cuda", repetitions)
    for name, row in rows.items():
        if "error" in row:
            continue
        ours, own = times[f"{name} ours"], times.get(f"{name} own")
        row |= {"ms": ours.median * 1e3, "spread": ours.spread, "extra_mb": extra_peak(calls[f"{name} ours"], "cuda")}
        row["extra_mb"] = None if row["extra_mb"] is None else row["extra_mb"] / 1e6
        row |= {} if own is None else {"own_ms": own.median * 1e3, "over_own": ours.over(own)}
        if f"{BASE} ours" in times:
            row["over_base"] = ours.over(times[f"{BASE} ours"])
    return list(rows.values())


def page(name: str, found: dict[str, Any]) -> str:
    """The readable half."""
    lines = [f"# {name}", "", f"`python docs/verified/speed.py {name}`", ""]
    lines += [f"- {key}: {value}" for key, value in found["versions"].items()]
    lines += ["", f"Forward and backward, bfloat16, (1, S, {HEADS}, D), medians of {found['repetitions']}, in turn. "]
    lines[-1] += f"own: the kernel's own public call. x {BASE}: its time over that of `{BASE}` in the same run."
    lines += ["", f"| S | D | causal | backend | ms | own ms | x own | x {BASE} | extra MB |", "| -- " * 9 + "|"]
    for row in found["rows"]:
        head = f"| {row['tokens']} | {row['head_dim']} | {'yes' if row['causal'] else ''} | {row['backend']} | "
        if "error" in row:
            lines.append(f"{head}{row['error'][:120]} | | | | |")
            continue
        cells = [f"{row['ms']:.3f}", _cell(row, "own_ms"), _cell(row, "over_own"), _cell(row, "over_base")]
        lines.append(head + " | ".join([*cells, "" if row["extra_mb"] is None else f"{row['extra_mb']:.0f}"]) + " |")
    return "\n".join([*lines, ""])


def _cell(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.3f}" if key in row else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--backends", default="", help="separated by commas; without it all that train here")
    parser.add_argument("--repetitions", type=int, default=7)
    asked = parser.parse_args()
    here = [s.name for s in rt.backends() if s.device == "cuda" and s.unavailable is None and s.claims.backward]
    names = asked.backends.split(",") if asked.backends else [n for n in here if n != "native_math"]
    rows: list[dict[str, Any]] = []
    found = {"versions": environment("cuda", asked.commit), "repetitions": asked.repetitions, "rows": rows}
    asked.out.mkdir(parents=True, exist_ok=True)
    for dim in DIMS:
        for length in LENGTHS:
            for causal in (False, True):
                rows += measured(length, dim, causal=causal, names=names, repetitions=asked.repetitions)
                print(length, dim, causal, flush=True)
                (asked.out / f"{asked.name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
                (asked.out / f"{asked.name}.md").write_text(page(asked.name, found), "utf-8")


if __name__ == "__main__":
    main()
