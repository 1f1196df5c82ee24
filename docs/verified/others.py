"""What other attention does with the reported calls of tests/test_cases.py: `python docs/verified/others.py NAME`.

Each call runs in a process of its own on the first GPU, in bfloat16: some of these calls lose the device. Judged like
our own backends, on out and the gradients. Subjects: torch's default F.scaled_dot_product_attention, and diffusers'
dispatcher with its flex backend. Writes NAME.json and NAME.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from ringtrue.audit.inputs import Inputs, build  # noqa: E402
from ringtrue.audit.judge import judged, truth_of  # noqa: E402
from ringtrue.audit.truth import Quantities  # noqa: E402
from test_cases import CASES, SPECIAL  # noqa: E402
from test_cases_cuda import moved  # noqa: E402

NAMES = [*(case.id for case in CASES), *(make.__doc__ or make.__name__ for make in SPECIAL)]
RIGHT, REFUSED, WRONG, LOST = "right", "refused", "WRONG", "LOST THE DEVICE"


def inputs(number: int) -> Inputs:
    if number < len(CASES):
        return build(replace(CASES[number], dtype=torch.bfloat16), "cuda", dbias=False)
    return moved(SPECIAL[number - len(CASES)](), torch.bfloat16)


def mask_of(x: Inputs) -> tuple[Tensor | None, bool]:
    """The mask as torch's call takes it: a tensor, or is_causal where that says it."""
    q_len, k_len = x.q.shape[1], x.k.shape[1]
    mask = x.mask.dense
    if x.mask.key_keep is not None:
        keep = x.mask.key_keep[:, None, None, :]
        mask = keep if mask is None else mask & keep
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(x.q.dtype)
    if x.mask.causal is None:
        return mask, False
    if mask is None and x.mask.causal == 0:
        return None, True
    band = torch.ones(q_len, k_len, dtype=torch.bool, device=x.q.device).tril(x.mask.causal)
    return band if mask is None else mask & band, False


def torchs_default(x: Inputs) -> Tensor:
    mask, causal = mask_of(x)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    gqa = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=x.options.scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)


def diffusers_flex(x: Inputs) -> Tensor:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    mask, causal = mask_of(x)
    gqa = x.q.shape[2] != x.k.shape[2]
    return dispatch_attention_fn(
        x.q, x.k, x.v, mask, is_causal=causal, scale=x.options.scale, enable_gqa=gqa, backend=AttentionBackendName.FLEX
    )


SUBJECTS: dict[str, Callable[[Inputs], Tensor]] = {"torch-default": torchs_default, "diffusers-flex": diffusers_flex}


def one(subject: str, number: int) -> tuple[str, str]:
    """The outcome of one call, and what is behind it."""
    x = inputs(number)
    asked = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    try:
        out = SUBJECTS[subject](x)
        grads = torch.autograd.grad(out, asked, x.grad_out)
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        return LOST, str(error).splitlines()[0]
    except Exception as error:  # whatever a subject says: it is its answer
        return REFUSED, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    found = judged(Quantities(out.detach(), truth_of(x).values.lse.to(torch.float32), *grads), x)  # type: ignore[union-attr]
    bad = [v.quantity for v in found if not v.ok]
    return (WRONG, ", ".join(bad)) if bad else (RIGHT, "")


def apart(subject: str, number: int, seconds: float) -> tuple[str, str]:
    command = [sys.executable, __file__, "--one", subject, str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "not run", f"not done in {seconds:.0f} s"
    try:
        outcome, detail = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return LOST, f"the process ended with {done.returncode}"
    return outcome, detail


def page(name: str, found: dict[str, dict[str, list[str]]], versions: dict[str, str]) -> str:
    lines = [
        f"# {name}: the reported calls through others",
        "",
        f"`python docs/verified/others.py {name}`",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in versions.items()]
    for subject, rows in found.items():
        counts = {o: sum(r[0] == o for r in rows.values()) for o in (RIGHT, REFUSED, WRONG, LOST, "not run")}
        lines.append(f"- `{subject}`: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    lines += ["", "| call | " + " | ".join(found) + " |", "| -- " * (1 + len(found)) + "|"]
    for number, call in enumerate(NAMES):
        cells = [": ".join(filter(None, found[subject][str(number)])) for subject in found]
        if any(not cell.startswith(RIGHT) for cell in cells):
            lines.append(f"| {call.splitlines()[0]} | " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, "", "Calls that are right everywhere are left out of the table.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--seconds", type=float, default=300, help="of one call")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], int(options.one[1]))))
        return 0
    found: dict[str, dict[str, list[str]]] = {}
    versions = {
        "commit": options.commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
    }  # fmt: skip
    with ThreadPoolExecutor(options.jobs) as pool:
        for subject in options.subjects.split(","):
            outcomes = pool.map(lambda n, s=subject: apart(s, n, options.seconds), range(len(NAMES)))
            found[subject] = {str(n): list(outcome) for n, outcome in enumerate(outcomes)}
            report = {"versions": versions, "calls": NAMES, "found": found}
            (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
            (options.out / f"{options.name}.md").write_text(page(options.name, found, versions), "utf-8")
    print(page(options.name, found, versions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
