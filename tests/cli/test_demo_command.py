"""`ringtrue demo` as a command, its workers replaced: options, what is printed and written, exit codes."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

import ringtrue.cli
from ringtrue import plants
from ringtrue.cli.app import app
from ringtrue.cli.demo import command, words
from ringtrue.cli.demo.judge import Errors, Outcome, Run, judged
from ringtrue.cli.demo.progress import Progress
from ringtrue.cli.demo.run import Report
from ringtrue.cli.demo.settings import Settings
from ringtrue.cli.pool import WorkerError

PROBLEM = {
    "class": "FluxTransformer2DModel",
    "parameters": 7_000_000,
    "tensors": 2,
    "backend": "native_flash",
    "device_name": "cpu",
    "entropy": 0.75,
    "sharpened_by": 1.33,
    "config": {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64},
    "diffusers": "0.42.1",
}


class Stub:
    """Stands in for `run`: remembers the settings, and has gradients that are off by `gradient`."""

    def __init__(self) -> None:
        self.gradient, self.plant_ran = 1.2e-6, 0
        self.settings: Settings | None = None
        self.absent: tuple[str, ...] = ()
        self.error: BaseException | None = None

    def __call__(self, settings: Settings, progress: Progress) -> Report:
        self.settings = settings
        if self.error is not None:
            raise self.error
        stage = progress.begin("a stage", 1)
        progress.advance(stage)
        progress.end(stage, "a note")
        references = {name: self._run(1e-6) for name in ("float64", "eager", "single")}
        outcomes = tuple(
            Outcome(mode, reason="no GPU")
            if mode.name in self.absent
            else replace(judged(mode, self._run(self.gradient), references), plant_ran=self.plant_ran)
            for mode in settings.modes
        )
        return Report(settings, PROBLEM, references, outcomes, {"ringtrue": "0", "torch": "2"}, 12.0)

    @staticmethod
    def _run(gradient: float) -> Run:
        return Run(((2.0, 1.5),), 0.5, Errors(3e-7, {"blocks.0.to_q.weight": gradient, "proj_out.bias": 1e-8}))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(command, "run", stub)
    return stub


def ringtrue_demo(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, done.output


def test_every_option_arrives(stub: Stub) -> None:
    options = "--dtype bfloat16 --backend _native_math --modes ring2,1x3 --image-tokens 61 --text-tokens 1 --steps 2"
    code, out = ringtrue_demo(*options.split(), "--seed", "5", "--timeout", "9")
    assert code == 0, out
    settings = stub.settings
    assert settings is not None
    assert [mode.name for mode in settings.modes] == ["ring2", "ring3"]
    assert (settings.dtype, settings.backend, settings.plant) == ("bfloat16", "native_math", None)
    numbers = settings.image_tokens, settings.text_tokens, settings.steps, settings.seed, settings.timeout
    assert numbers == (61, 1, 2, 5, 9.0)


def test_the_report_of_a_good_run(stub: Stub) -> None:
    code, out = ringtrue_demo()
    assert code == 0
    assert "7.0 M random weights" in out
    assert "entropy 0.75 of uniform" in out
    assert "a stage: a note" in out
    assert "ring2: within bounds. Worst gradient error 1.2e-06 at blocks.0.to_q.weight, 1.20 x the yardstick" in out
    assert "ulysses2, ring2 and 2x2 train this Flux with the gradients of one process. (12 s, exit 0)" in out


def test_out_of_bounds(stub: Stub) -> None:
    stub.gradient = 2e-6
    code, out = ringtrue_demo("--modes", "ring2")
    assert code == 1
    assert "ring2: OUT OF BOUNDS. Worst gradient error 2.0e-06 at blocks.0.to_q.weight, 2.00 x the yardstick" in out
    assert "ring2: the numbers are out of bounds. (12 s, exit 1)" in out


@pytest.mark.parametrize("plant", plants.PLANTS)
def test_a_plant(stub: Stub, plant: str) -> None:
    stub.gradient, stub.plant_ran = 2.0, 16
    code, out = ringtrue_demo("--plant", plant, "--modes", "ring2")
    assert code == 1
    assert words.HISTORY[plant] in out
    assert "It changed 16 attention calls here: the worst gradient error is 2.00, 2.0e+06 x the yardstick" in out
    assert f"The planted fault ({plant}) did this." in out


def test_a_plant_that_never_ran_proves_nothing(stub: Stub) -> None:
    code, out = ringtrue_demo("--plant", "lse-missing")
    assert code == 3
    assert "It never ran here" in out
    assert "This proves nothing: the planted fault never ran. (12 s, exit 3)" in out


def test_a_plant_that_is_not_noticed_is_told(stub: Stub) -> None:
    stub.plant_ran = 4
    code, out = ringtrue_demo("--plant", "lse-missing")
    assert code == 0
    assert "The fault went unnoticed" in out


def test_a_mode_that_did_not_run_is_no_pass(stub: Stub) -> None:
    stub.absent = ("2x2",)
    code, out = ringtrue_demo()
    assert code == 3
    assert "2x2: not run: no GPU." in out
    assert "This proves nothing about 2x2: not run. (12 s, exit 3)" in out


def test_the_record_is_strict_json(stub: Stub, tmp_path: Path) -> None:
    stub.gradient = math.nan
    path = tmp_path / "demo.json"
    code, out = ringtrue_demo("--json", str(path), "--modes", "ring2")
    assert code == 1
    assert "OUT OF BOUNDS. Worst gradient error nan at blocks.0.to_q.weight (bound 1.5 x)." in out

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    assert f"written: {path}" in out
    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found["exit_code"] == 1
    assert found["versions"] == {"ringtrue": "0", "torch": "2"}
    assert found["settings"]["modes"] == ["ring2"]
    mode = found["modes"]["ring2"]
    assert (mode["gradient_error"], mode["times_yardstick"], mode["within"]) == ("nan", "nan", False)
    assert mode["parameter"] == "blocks.0.to_q.weight"
    assert mode["loss_allowed"] == pytest.approx([1e-6, 1e-6])
    assert found["one_process"]["eager"]["gradient_errors"]["proj_out.bias"] == 1e-8


def test_a_broken_worker_and_an_interrupt(stub: Stub) -> None:
    stub.error = WorkerError("ring2: failed in worker 1\nTraceback ...")
    code, out = ringtrue_demo()
    assert code == 4
    assert "ring2: failed in worker 1" in out
    stub.error = KeyboardInterrupt()
    code, out = ringtrue_demo()
    assert code == 130
    assert "all processes are ended" in out


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ("--modes flat", "ulyssesU, ringR and UxR"),
        ("--modes ring1", "has 1 rank; 2 to 16"),
        ("--dtype int8", "float32, bfloat16, float16, float64"),
        ("--device tpu", "cpu, cuda"),
        ("--backend nothing", "auto, native_flash, native_math"),
        ("--plant weed", "kv-transposed-twice, mask-as-bias, lse-missing, stale-kv"),
        ("--json no/such/folder/x.json", "there is no folder"),
        ("--json .", "is a folder; name a file"),
        ("--text-tokens 0", "greater than or equal to 1"),
        ("--steps 0", "greater than or equal to 1"),
        ("--seed x", "--seed"),
        ("--colour", "--colour"),
    ],
)
def test_bad_usage_lists_what_is_valid(stub: Stub, arguments: str, valid: str) -> None:
    code, out = ringtrue_demo(*arguments.split())
    assert code == 2
    assert valid in " ".join(out.replace("│", " ").split())
    assert stub.settings is None


def test_cuda_needs_a_device(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = ringtrue_demo("--device", "cuda")
    assert code == 2
    assert "no CUDA device" in out


def test_every_plant_has_its_history() -> None:
    assert words.HISTORY.keys() == plants.PLANTS.keys()


def test_without_diffusers(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out = ringtrue_demo()
    assert code == 2
    assert out.strip() == 'ringtrue demo needs diffusers: pip install "ringtrue[cli,diffusers]"'


@pytest.mark.parametrize("library", ringtrue.cli.NEEDED)
def test_without_typer_or_rich(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("ringtrue.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as ended:
        ringtrue.cli.main()
    assert ended.value.code == 2
    line = f'ringtrue: the command line needs {library}: pip install "ringtrue[cli,diffusers]"'
    assert capsys.readouterr().err.strip() == line
