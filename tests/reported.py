"""Reports for tests: one outcome of every verdict, with texts that a careless writer would break on."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ringtrue.audit.checks import checks
from ringtrue.audit.examine import examine
from ringtrue.audit.judge import Verdict
from ringtrue.audit.outcome import VERDICTS, HeatMap, Outcome, Report
from ringtrue.audit.subject import Call, Plain, Says

NASTY = "</script><script>alert(1)</script> & \"quoted\" 'text' \x1b[31mred\x00 \u2028 ]]> {{ 7 * 7 }} é"
CLAIMS = Says(masks=frozenset({"bool", "float"}), causal="any", lse=False, mask_grad=False, value_dim=True)


def attend(call: Call) -> torch.Tensor:
    """Right for what CLAIMS says."""
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    scores = (q @ k.mT).float() * call.scale
    mask = call.dense(places=True)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def without_scale(call: Call) -> torch.Tensor:
    """Wrong: the scale is forgotten on its way."""
    return attend(Call(**{**call.__dict__, "scale": 1.0}))


RIGHT = Plain("test/right", attend, CLAIMS, "a right one")
WRONG = Plain("test/no-scale", without_scale, CLAIMS, "without a scale")


def measured(only: str = "call/length-5/float32") -> Report:
    """A real audit of a right and a wrong subject."""
    outcomes = [
        replace(examine(subject, check), replay=f"ringtrue audit {subject.name} --case {check.id}")
        for subject in (RIGHT, WRONG)
        for check in checks("smoke", dtypes=["float32", "bfloat16"], only=only)
    ]
    about = {s.name: s.about for s in (RIGHT, WRONG)}
    return Report(tuple(outcomes), {"torch": torch.__version__, "device": "cpu"}, about, "ringtrue audit test", 1.5)


def composed() -> Report:
    """Every verdict once, for two subjects; names and texts as nasty as can be."""
    quantities = (
        Verdict("out", True, 1.25e-7, 5.0e-7, 2.5e-8, 1.0e-7),
        Verdict("dq", False, 3.25, 1.0e-3, math.inf, 2.0e-4),
        Verdict("dk", False, problem=f"NaN in 3 of 64 places {NASTY}"),
    )
    heat = HeatMap("dq", ((0.25, 3.5, math.inf), (math.nan, 0.0, 12.0)), 2)
    outcomes = [
        Outcome(
            subject,
            f"call/case-{i}<b>/float32",
            verdict,
            reason=NASTY,
            quantities=quantities,
            diagnosis="dq is what a scale of 1 gives" if verdict == "wrong" else "",
            maps=(heat,) if verdict == "wrong" else (),
            seconds=0.25,
            replay=f"ringtrue audit {subject} --case 'call/case-{i}<b>/float32'",
            snippet="import torch\n# </script>\nprint('dq')\n" if verdict == "wrong" else "",
        )
        for subject in ("one/<i>name</i>", "two/right")
        for i, verdict in enumerate(VERDICTS)
        if subject.startswith("one") or verdict == "pass"
    ]
    about = {"one/<i>name</i>": NASTY, "two/right": "fine"}
    return Report(tuple(outcomes), {"torch": NASTY}, about, "ringtrue audit 'one/<i>name</i>'", 2.5)
