"""Run what needs GPUs and write it down: `python docs/verified/verify.py NAME` makes NAME.json and NAME.md beside it.

Runs both benches, then the tests marked gpu and multi_gpu (`--jobs` at once, by pytest-xdist), then the demo on CUDA in
float32 and bfloat16 under every mode that the GPUs here allow (none with one GPU), and keeps the numbers, the versions
and the commit they belong to (`--commit` where git is not there).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

HERE = Path(__file__).parent


def versions(commit: str) -> dict[str, str]:
    """What the numbers belong to."""
    gpus = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return {
        "commit": commit,
        "gpus": ", ".join(f"{count} x {name}" for name, count in gpus.items()),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": sys.version.split()[0],
    }


def tests(folder: str, jobs: int) -> dict[str, Any]:
    """The tests that need GPUs, per file: passed, skipped, failed."""
    report = f"{folder}/tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu or multi_gpu",
        f"--junitxml={report}",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",  # it warns beside xdist, and here warnings are errors
        *(["-n", str(jobs)] if jobs > 1 else []),
    ]
    code = subprocess.run([*command, "tests"], check=False).returncode
    files: dict[str, Counter[str]] = {}
    figures = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for found in case.iter("property"):
            figures[f"{case.get('name')}: {found.get('name')}"] = found.get("value")
        state = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        files.setdefault(case.get("classname", "").replace(".", "/") + ".py", Counter())[state] += 1
    counts = {name: dict(count) for name, count in sorted(files.items())}
    return {"exit_code": code, "files": counts, "figures": figures}


def demo(folder: str, dtype: str, modes: str) -> dict[str, Any]:
    """`ringtrue demo` on CUDA."""
    path = Path(folder) / f"{dtype}.json"
    command = [sys.executable, "-m", "ringtrue.cli", "demo", "--device", "cuda", "--dtype", dtype, "--modes", modes]
    subprocess.run([*command, "--json", str(path)], check=False)
    return json.loads(path.read_text("utf-8")) if path.exists() else {"exit_code": "no report"}


def bench(folder: str, which: str) -> dict[str, Any]:
    """`ringtrue bench`, with the medians but not every repetition."""
    path = Path(folder) / f"{which}.json"
    subprocess.run([sys.executable, "-m", "ringtrue.cli", "bench", which, "--json", str(path)], check=False)
    found = (
        json.loads(path.read_text("utf-8")) if path.exists() else {"not_measured": {which: "the bench wrote no report"}}
    )
    return _without(found, "seconds")


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(item, key) for name, item in value.items() if name != key}
    return [_without(item, key) for item in value] if isinstance(value, list) else value


def bench_page(found: dict[str, Any]) -> list[str]:
    """Two tables: pairs against torch's own calls of their kernels, and what a call costs beside its kernel."""
    lines = ["", "`ringtrue bench pair`: against the same kernel through torch, same tensors, in turn, medians:", ""]
    lines += ["| backend | (B,S,H,D) | part | ms | torch ms | ratio | extra MB | torch MB |", "| -- " * 8 + "|"]
    for m in found["pair"].get("measured", []):
        ours, theirs = m["ours"], m["torch"]
        times = f"{ours['median_s'] * 1e3:.3f} | {theirs['median_s'] * 1e3:.3f} | {m['time_ratio']:.3f}"
        memory = " | ".join(f"{side['extra_peak_bytes'] / 1e6:.1f}" for side in (ours, theirs))
        lines.append(f"| {m['backend']} | {m['shape']} | {m['part']} | {times} | {memory} |")
    lines += [
        "",
        "`ringtrue bench overhead`: microseconds a call on this machine's CPU, one thread, (1, 16, 4, 32):",
        "",
    ]
    lines += ["| way | part | us | x diffusers' dispatcher |", "| -- " * 4 + "|"]
    for part, ways in found["overhead"].get("parts", {}).items():
        for way, figures in ways.items():
            ratio = "" if figures["ratio"] is None else f"{figures['ratio']:.2f}"
            lines.append(f"| {way} | {part} | {figures['median_s'] * 1e6:.1f} | {ratio} |")
    for name, why in found["pair"].get("not_measured", {}).items():
        lines += ["", f"`{name}` not measured: {why}."]
    return lines


def page(name: str, found: dict[str, Any]) -> str:
    """The readable half."""
    lines = [f"# {name}", "", "`python docs/verified/verify.py " + name + "`", ""]
    lines += [f"- {key}: {value}" for key, value in found["versions"].items()]
    lines += ["", "| tests | passed | skipped | failed |", "| -- | -- | -- | -- |"]
    for file, count in found["tests"].get("files", {}).items():
        failed = count.get("failure", 0) + count.get("error", 0)
        lines.append(f"| {file} | {count.get('passed', 0)} | {count.get('skipped', 0)} | {failed} |")
    lines += ["", *(f"- {name} {value}" for name, value in found["tests"].get("figures", {}).items())]
    if not found["demo"]:
        return "\n".join([*lines, "", "No demo: it takes two GPUs.", *bench_page(found["bench"])]) + "\n"
    lines += ["", "The demo on CUDA, worst relative parameter gradient error against the float64 model:", ""]
    lines += [
        "| dtype | run | gradient error | x yardstick | forward error | loss off by | within |",
        "| -- " * 7 + "|",
    ]
    for dtype, report in found["demo"].items():
        for kind, run in report.get("one_process", {}).items():
            errors = f"{_number(run, 'gradient_error')} | | {_number(run, 'forward_error')}"
            lines.append(f"| {dtype} | one process, {kind} | {errors} | | |")
        for mode, run in report.get("modes", {}).items():
            if run["ran"]:
                off = max(map(float, run["loss_differences"]))
                lines.append(
                    f"| {dtype} | {mode} | {_number(run, 'gradient_error')} | {float(run['times_yardstick']):.2f} | "
                    f"{_number(run, 'forward_error')} | {off:.1e} | {'yes' if run['within'] else 'NO'} |"
                )
    return "\n".join([*lines, *bench_page(found["bench"])]) + "\n"


def write(folder: Path, name: str, found: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (folder / f"{name}.md").write_text(page(name, found), "utf-8")


def _number(run: dict[str, Any], key: str) -> str:
    return f"{float(run[key]):.2e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    commit = options.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    modes = "ulysses2,ring2" + (",2x2" if torch.cuda.device_count() >= 4 else "")
    with tempfile.TemporaryDirectory() as folder:
        found = {"versions": versions(commit), "bench": {}, "tests": {}, "demo": {}}
        for which in ("pair", "overhead"):  # first, while nothing else runs
            found["bench"][which] = bench(folder, which)
        write(options.out, options.name, found)  # what follows may be cut short
        found["tests"] = tests(folder, options.jobs)
        write(options.out, options.name, found)
        if torch.cuda.device_count() > 1:
            found["demo"] = {dtype: demo(folder, dtype, modes) for dtype in ("float32", "bfloat16")}
            write(options.out, options.name, found)
    print(page(options.name, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
