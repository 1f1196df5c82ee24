"""The demo from start to end: start the processes, prepare, train the references, train every mode, judge."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ringtrue as rt

from ..pool import Pool, Task
from .judge import Errors, Outcome, Run, errors, exit_code, judged
from .progress import Progress
from .settings import Mode, Settings

REFERENCES = ("float64", "eager", "single")
JOBS = f"{__package__}.jobs"


@dataclass(frozen=True)
class Report:
    """Everything that the demo found out.

    problem     what the workers say of model, backend and device; empty when no mode could run
    references  one process: "float64" (the truth), "eager" (the yardstick), "single" (the backend)
    """

    settings: Settings
    problem: Mapping[str, Any]
    references: Mapping[str, Run]
    outcomes: tuple[Outcome, ...]
    versions: Mapping[str, str]
    seconds: float

    @property
    def exit_code(self) -> int:
        return exit_code(self.outcomes, self.settings.plant)


def why_not(mode: Mode, settings: Settings, gpus: int) -> str:
    """Why a mode cannot run here; empty if it can."""
    if settings.device == "cuda" and mode.ranks > gpus:
        return f"needs {mode.ranks} GPUs, this machine has {gpus}"
    if settings.plant == "stale-kv" and mode.ring == 1:
        return "stale-kv is a fault of rings, and this mode has none"
    return ""


def run(settings: Settings, progress: Progress) -> Report:
    """Raises WorkerError when a worker fails."""
    start = time.perf_counter()
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    reasons = {mode: why_not(mode, settings, gpus) for mode in settings.modes}
    possible = [mode for mode in settings.modes if not reasons[mode]]
    problem: dict[str, Any] = {}
    references: dict[str, Run] = {}
    outcomes = {mode: Outcome(mode, reason=reason) for mode, reason in reasons.items()}
    if possible:
        size = max(mode.ranks for mode in possible)
        stage = progress.begin(f"start {size} processes and import diffusers in each", size)
        with Pool(size, JOBS, settings.device, settings.timeout) as pool:
            pool.ready(lambda: progress.advance(stage))
            progress.end(stage)
            problem = _prepare(pool, settings, progress)
            references = _references(pool, settings, problem["backend"], progress)
            for mode in possible:
                outcomes[mode] = _mode(pool, settings, mode, problem["backend"], references, progress)
    versions = {"ringtrue": rt.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    versions |= {"diffusers": problem["diffusers"]} if problem else {}
    return Report(settings, problem, references, tuple(outcomes.values()), versions, time.perf_counter() - start)


def _prepare(pool: Pool, settings: Settings, progress: Progress) -> dict[str, Any]:
    stage = progress.begin("make the model, sharpen its attention", 1)
    problem: dict[str, Any] = pool.run([Task("prepare", f"{JOBS}:prepare", (settings,))])[0][0]
    progress.end(stage, f"entropy {problem['entropy']:.2f} of uniform")
    return problem


def _references(pool: Pool, settings: Settings, backend: str, progress: Progress) -> dict[str, Run]:
    stage = progress.begin(f"one process: float64, eager, {backend}", settings.steps * len(REFERENCES))
    tasks = [Task(name, f"{JOBS}:reference", (settings, name, backend)) for name in REFERENCES]
    results = pool.run(tasks, lambda name, step: progress.advance(stage))
    truth = _saved(pool.folder, "float64")
    runs = {name: _as_run(pool.folder, name, ranks, truth) for name, ranks in zip(REFERENCES, results, strict=True)}
    progress.end(stage, f"loss {runs['single'].losses[0][0]:.4f} -> {runs['single'].losses[0][-1]:.4f}")
    return runs


def _mode(
    pool: Pool, settings: Settings, mode: Mode, backend: str, references: Mapping[str, Run], progress: Progress
) -> Outcome:
    stage = progress.begin(f"{mode.name}: {mode.ranks} processes", settings.steps)
    task = Task(mode.name, f"{JOBS}:parallel", (settings, mode, backend), mode.ranks)
    (ranks,) = pool.run([task], lambda name, step: progress.advance(stage))
    run = _as_run(pool.folder, mode.name, ranks, _saved(pool.folder, "float64"))
    outcome = judged(mode, run, references, sum(rank["plant_ran"] for rank in ranks))
    progress.end(stage, f"worst gradient error {run.errors.gradient:.1e}")
    return outcome


def _as_run(folder: Path, name: str, ranks: Sequence[Mapping[str, Any]], truth: Mapping[str, Any]) -> Run:
    saved = _saved(folder, name)
    found: Errors = errors(saved["out"], saved["grads"], truth["out"], truth["grads"])
    return Run(tuple(tuple(rank["losses"]) for rank in ranks), max(rank["seconds"] for rank in ranks), found)


def _saved(folder: Path, name: str) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return saved
