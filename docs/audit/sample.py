"""Remakes sample.json, sample.html and sample.png: the audit of attentions.py.

python docs/audit/sample.py              # the picture too, where there is a chromium
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ringtrue.audit.record import from_json
from ringtrue.cli.audit.page import to_html

HERE = Path(__file__).parent
SUBJECTS = ("attentions:right", "attentions:transposed_twice")
CASES = (
    *(
        "call/length-1/float32",
        "call/length-16/float32",
        "call/heads-equal-length/float32",
        "call/cross-longer-keys/float32",
    ),
    *("call/heads-outermost-heads-equal-length/float32", "call/heads-equal-length-64/float32", "call/peaked/float32"),
    *("call/causal/float32", "call/bool-qk/float32", "call/gqa/float32", "call/misaligned/float32"),
    *("call/heads-equal-length/bfloat16", "call/length-16/bfloat16"),
    *("linear/length-33/float32", "heads/length-33/float32", "poison/length-33/float32", "twice/length-129/float32"),
)
SHOWN = "call/heads-equal-length/float32"


def main() -> None:
    made = HERE / "sample.json"
    cases = [word for case in CASES for word in ("--case", case)]
    command = [sys.executable, "-m", "ringtrue.cli", "audit", *SUBJECTS, *cases, "--json", made.name]
    done = subprocess.run(command, cwd=HERE, check=False)
    if done.returncode != 1:
        raise SystemExit(f"the audit ended with {done.returncode}; one of the two is wrong, so it must be 1")
    report = from_json(made.read_text("utf-8"))
    (HERE / "sample.html").write_text(to_html(report), "utf-8")
    browser = shutil.which("chromium")
    if browser is None:
        print("no chromium: sample.png is as it was")
        return
    index = next(i for i, o in enumerate(report.outcomes) if o.check == SHOWN and o.bad)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = (HERE / "sample.html").resolve().as_uri() + f"#show={index}"
        options = (
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            "--window-size=1280,960",
        )
        subprocess.run(
            [browser, *options, f"--screenshot={HERE / 'sample.png'}", address], check=True, stderr=subprocess.DEVNULL
        )


if __name__ == "__main__":
    main()
