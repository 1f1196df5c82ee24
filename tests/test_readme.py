"""What README.md shows runs as pasted, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringtrue.cli.pool import Pool, Task

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SCRIPTS = dict(re.findall(r"Save as `(\w+\.py)`[^\n]*\n+```python\n(.*?)```", README, re.DOTALL))
START = re.search(r"^torchrun (.*) two\.py$", README, re.MULTILINE)


def launch(script: str, folder: Path, name: str) -> str:
    """Start a script with the command that README.md gives; its output. A run that hangs is an error."""
    assert START is not None
    (folder / name).write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(START[1]), name],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes that have imported what the scripts import, as torchrun would start them, but once for all scripts."""
    with Pool(4, "ringtrue", "cpu", timeout=180) as made:
        made.ready()
        yield made


def spread(pool: Pool, script: str, processes: int) -> str:
    """What the ranks of a script print when it runs in so many processes under torchrun's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = [Task(f"rank {r}", f"{__name__}:as_rank", (script, r, processes, port)) for r in range(processes)]
    return "".join(out for (out,) in pool.run(tasks))


def as_rank(job: object, script: str, rank: int, world: int, port: int) -> str:
    """Run a script as that rank of its own process group; what it prints."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}})
    torch.set_num_threads(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})
    if dist.is_initialized():
        dist.destroy_process_group()
    return printed.getvalue()


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


def test_two_processes_with_a_ring(pool: Pool) -> None:
    out = spread(pool, SCRIPTS["two.py"].replace("ulysses_degree", "ring_degree"), 2)
    assert max(numbers(r"largest difference of .*?:", out)) < 1e-5


def test_the_training_script_gives_the_losses_of_one_process(pool: Pool) -> None:
    two = numbers("loss", spread(pool, SCRIPTS["train.py"], 2))
    alone = SCRIPTS["train.py"].replace("ulysses_degree=2", "ulysses_degree=1")
    one = numbers("loss", spread(pool, alone, 1))
    assert len(one) == 3
    assert one[0] > one[-1]
    assert two == pytest.approx(one, rel=1e-5)


def test_data_parallel_beside_it(pool: Pool) -> None:
    out = spread(pool, SCRIPTS["mesh.py"], 4)
    assert numbers("largest difference of a gradient:", out)[0] < 1e-5
