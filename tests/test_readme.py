"""What README.md shows runs as pasted, and prints what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SCRIPTS = dict(re.findall(r"Save as `(\w+\.py)`[^\n]*\n+```python\n(.*?)```", README, re.DOTALL))
START = re.search(r"^torchrun (.*) two\.py$", README, re.MULTILINE)


def launch(script: str, folder: Path, name: str, processes: int = 2) -> str:
    """Start a script with the command that README.md gives; its output. A run that hangs is an error."""
    assert START is not None
    (folder / name).write_text(script)
    flags = [str(processes) if flag == "2" else flag for flag in shlex.split(START[1])]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, name],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern + r" ([-+.\de]+)", text)]


def test_every_python_block_is_run_here() -> None:
    assert len(re.findall(r"```python\n", README)) == 1 + len(SCRIPTS)
    assert SCRIPTS.keys() == {"two.py", "train.py", "mesh.py"}


def test_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    exec(compile(block[1], "README.md", "exec"), {"__name__": "__main__"})
    assert numbers("two backends:", capsys.readouterr().out)[0] < 1e-5


def test_two_processes(tmp_path: Path) -> None:
    out = launch(SCRIPTS["two.py"], tmp_path, "two.py")
    differences = numbers(r"largest difference of .*?:", out)
    assert len(differences) == 2
    assert max(differences) < 1e-5


def test_two_processes_with_a_ring(tmp_path: Path) -> None:
    out = launch(SCRIPTS["two.py"].replace("ulysses_degree", "ring_degree"), tmp_path, "two.py")
    assert max(numbers(r"largest difference of .*?:", out)) < 1e-5


def test_the_training_script_gives_the_losses_of_one_process(tmp_path: Path) -> None:
    two = numbers("loss", launch(SCRIPTS["train.py"], tmp_path, "train.py"))
    alone = SCRIPTS["train.py"].replace("ulysses_degree=2", "ulysses_degree=1")
    one = numbers("loss", launch(alone, tmp_path, "train.py", processes=1))
    assert len(one) == 3
    assert one[0] > one[-1]
    assert two == pytest.approx(one, rel=1e-5)


def test_data_parallel_beside_it(tmp_path: Path) -> None:
    out = launch(SCRIPTS["mesh.py"], tmp_path, "mesh.py", processes=4)
    assert numbers("largest difference of a gradient:", out)[0] < 1e-5
