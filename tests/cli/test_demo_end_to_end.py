"""The real command with real processes, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("typer")

SMALL = ("--image-tokens", "29", "--text-tokens", "11", "--steps", "2")


def ringtrue_demo(path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, "-m", "ringtrue.cli", "demo", *SMALL, "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads(path.read_text())


def test_a_small_flux_trains_with_the_gradients_of_one_process(tmp_path: Path) -> None:
    code, out, found = ringtrue_demo(tmp_path / "demo.json", "--modes", "ulysses2,ring2")
    assert code == found["exit_code"] == 0, out
    assert "ulysses2 and ring2 train this Flux" in out
    assert found["versions"].keys() == {"ringtrue", "torch", "python", "diffusers"}
    assert found["problem"]["class"] == "FluxTransformer2DModel"
    assert found["problem"]["entropy"] < 0.8
    assert found["problem"]["text_lengths"] == [11, 5]
    alone = found["one_process"]
    assert alone["float64"]["gradient_error"] == 0
    assert 0 < alone["eager"]["gradient_error"] < 1e-5
    assert alone["single"]["losses"][0] > alone["single"]["losses"][-1]
    for mode in found["modes"].values():
        assert mode["within"]
        assert mode["ranks"] == 2
        assert mode["times_yardstick"] <= 1.5
        assert len(mode["gradient_errors"]) == found["problem"]["tensors"]
        assert mode["gradient_error"] == max(mode["gradient_errors"].values())
        assert len(mode["loss_differences"]) == 3
        pairs = zip(mode["loss_differences"], mode["loss_allowed"], strict=True)
        assert all(off <= allowed for off, allowed in pairs)
        assert len(mode["losses_by_rank"]) == 2
        assert mode["plant_ran"] == 0


def test_a_planted_fault_is_found_by_the_numbers(tmp_path: Path) -> None:
    code, out, found = ringtrue_demo(tmp_path / "demo.json", "--modes", "ulysses2,ring2", "--plant", "stale-kv")
    assert code == found["exit_code"] == 1, out
    assert "ulysses2: not run: stale-kv is a fault of rings" in out
    assert not found["modes"]["ulysses2"]["ran"]
    ring = found["modes"]["ring2"]
    assert ring["plant_ran"] > 0
    assert ring["times_yardstick"] > 1000
    assert ring["loss_differences"][0] <= ring["loss_allowed"][0]  # forward is right
    assert ring["loss_differences"][1] > ring["loss_allowed"][1]
    assert found["one_process"]["single"]["gradient_error"] < 1e-5  # the reference has no plant
