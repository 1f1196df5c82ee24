"""One check of one subject: from the question to the verdict. Runs in whatever process calls it; a crash is seen by
whoever started that process (cli/audit).

A 16-bit result that is beyond its bound by little may be so by chance: the largest of a few rounding errors is now and
then more than twice that of another. So what is off by less than half is wrong only if one of two other sets of numbers
for the same case is off as well; those that pass only so say it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from . import order
from .asked import call_of, revealed, run, tensors, within
from .checks import Check
from .diagnosis import diagnose
from .differences import differences
from .inputs import Inputs, build
from .judge import Verdict, judge, judged, truth_of
from .laws import chunk_law, whole
from .maps import maps_of
from .outcome import CLAIMED_BUT_REFUSED, CRASH, NOT_RUN, PASS, RAN_UNCLAIMED, REFUSED, WRONG, Outcome, writable
from .repeats import REPEATS
from .snippet import snippet_of
from .subject import Subject
from .symmetries import SYMMETRIES
from .truth import Quantities, Truth
from .yardstick import yardstick

CHANCE = 1.5  # up to this share of the bound, in 16 bits, other numbers are asked before it is called wrong
TRIES = 2


@dataclass(frozen=True, eq=False)
class Found:
    """What a law found: verdicts, and the inputs and result that they are of, where there is one such."""

    verdicts: list[Verdict]
    inputs: Inputs | None = None
    result: Quantities | None = None
    told: str = ""

    @property
    def ok(self) -> bool:
        return all(v.ok for v in self.verdicts)

    @property
    def strain(self) -> float:
        return max((v.strain for v in self.verdicts if not v.ok), default=0.0)


def examine(subject: Subject, check: Check, device: torch.device | str = "cpu", *, explain: bool = True) -> Outcome:
    """The verdict. Nothing a subject raises gets out; what ends the process does.

    explain  with heat maps, snippet and diagnosis of what is wrong, which cost more than the check
    """
    outcome, _ = found_by(subject, check, device, explain=explain)
    return outcome


def found_by(
    subject: Subject, check: Check, device: torch.device | str = "cpu", *, explain: bool = True
) -> tuple[Outcome, Found | None]:
    """The verdict, and what it was found on, for who wants to explain or shrink a wrong one."""
    start = perf_counter()

    def made(verdict: str, reason: str = "", found: Found | None = None) -> tuple[Outcome, Found | None]:
        outcome = Outcome(subject.name, check.id, verdict, reason, seconds=perf_counter() - start)
        if found is None:
            return outcome, None
        outcome = replace(outcome, quantities=tuple(found.verdicts))
        wrong = explain and outcome.bad and found.inputs is not None
        return explained(outcome, subject, check, found) if wrong else outcome, found

    missing = subject.unavailable()
    if missing:
        return made(NOT_RUN, missing)
    inputs = within(subject.says, build(check.case, device))
    against = subject.against(call_of(inputs, check.ranks))
    try:
        found = _with_state_kept(subject, check, inputs)
    except NotApplicableError as error:
        return made(NOT_RUN, str(error))
    except torch.OutOfMemoryError as error:
        return made(NOT_RUN, f"out of memory: {_first_line(error)}")
    except Exception as error:
        text = f"{type(error).__name__}: {_first_line(error)}"
        if lost := fatal(error) or _device_lost(inputs.q.device):
            return made(CRASH, text if lost is True else f"{text}, and then {lost}")
        if against:
            return made(REFUSED, f"{against} ({text})")
        outcome, _ = made(CLAIMED_BUT_REFUSED, text)
        return explained(outcome, subject, check, Found([], inputs)) if explain else outcome, None
    if found.ok:
        return made(PASS, f"beyond its claims: {against}" if against else found.told, found)
    near = not against and _may_be_chance(check, found)
    if near and all(_right_with(seed, subject, check, device) for seed in range(1, TRIES + 1)):
        return made(PASS, f"off by {found.strain:.2f} x its bound on one of {TRIES + 1} sets of numbers", found)
    return made(RAN_UNCLAIMED if against else WRONG, against or found.told, found)


def explained(outcome: Outcome, subject: Subject, check: Check, found: Found) -> Outcome:
    """With a script, maps and the likely fault, as far as there is something to make them of."""
    assert found.inputs is not None
    try:
        outcome = replace(outcome, snippet=snippet_of(subject, check, found.inputs))
        if found.result is not None:
            maps = maps_of(found.inputs, found.result, found.verdicts)
            likely = diagnose(found.inputs, found.result, ranks=check.ranks.size > 1)
            outcome = replace(outcome, maps=maps, diagnosis=likely)
    except Exception as error:  # the subject's lines, or numbers that no explanation was made for
        told = f"[explaining it failed: {type(error).__name__}: {_first_line(error)}]"
        outcome = replace(outcome, reason=f"{outcome.reason} {told}".strip())
    return outcome


def _with_state_kept(subject: Subject, check: Check, inputs: Inputs) -> Found:
    """What the law finds, and that the process is as it was; else it is put back, so that no later check is misled."""
    before, quiet = _state(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        found = LAWS[check.law](subject, check, inputs)
        left = [name for name, value in _state().items() if value != before[name]]
    finally:
        torch.set_default_dtype(before["the default dtype"])
        torch.set_grad_enabled(before["grad mode"])
        torch.use_deterministic_algorithms(before["the deterministic switch"], warn_only=quiet)
    if not left:
        return found
    return replace(
        found, verdicts=[*found.verdicts, Verdict("state", ok=False, problem=f"left {', '.join(left)} changed")]
    )


def _state() -> dict[str, Any]:
    return {
        "the default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "the deterministic switch": torch.are_deterministic_algorithms_enabled(),
    }


class NotApplicableError(Exception):
    """A law that has nothing to ask of this subject; the text says why."""


def fatal(error: Exception) -> bool:
    """Whether the process is of no more use: CUDA errors stick."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in _text(error)


def _device_lost(device: torch.device) -> str:
    """What a kernel that failed on its way leaves behind: errors of a GPU are told to whoever waits for it next."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in _text(error).splitlines() if line.strip()]
    return writable(lines[0]) if lines else ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # somebody else's class
        return "(its text cannot be made)"


def _may_be_chance(check: Check, found: Found) -> bool:
    return check.case.dtype in (torch.bfloat16, torch.float16) and found.strain <= CHANCE


def _right_with(more: int, subject: Subject, check: Check, device: torch.device | str) -> bool:
    """Whether the same check with other numbers is right; one that raises is not."""
    case = replace(check.case, seed=check.case.seed + 1000 * more)
    try:
        return _with_state_kept(subject, replace(check, case=case), within(subject.says, build(case, device))).ok
    except Exception:
        return False


# The laws


def _call(subject: Subject, check: Check, inputs: Inputs) -> Found:
    """The subject's answer against the truth; with dropout, the truth of the mask that it drew."""
    before = {name: tensor.clone() for name, tensor in tensors(inputs).items()}
    if check.case.dropout:
        inputs = replace(inputs, dropout=revealed(subject, inputs, check.ranks))
        if problem := _too_little_dropped(inputs) or _dropped_alike(inputs, check.ranks.size):
            return Found([Verdict("dropout", ok=False, problem=problem)], inputs)
    result = run(subject, inputs, check.ranks)
    changed = [name for name, tensor in tensors(inputs).items() if not torch.equal(tensor, before[name])]
    if changed:  # the truth of what is there now would call it right
        return Found([Verdict(name, ok=False, problem="was changed in place") for name in changed], inputs)
    if inputs.dropout is None:
        right, yard = _reference(check, inputs)
        return Found(judge(result, right, yard, inputs), inputs, result)
    return Found(judged(result, inputs), inputs, result)


def _too_little_dropped(inputs: Inputs) -> str:
    """A subject that takes dropout_p and drops nothing would be right by the mask it did not draw."""
    assert inputs.dropout is not None
    p, weights = inputs.options.dropout_p, inputs.dropout.numel()
    share = float((inputs.dropout == 0).double().mean())
    return f"dropout_p={p} dropped {share:.0%} of the weights" if weights > 500 and share < p / 2 else ""


def _dropped_alike(inputs: Inputs, ranks: int) -> str:
    """Over several ranks, no two blocks of queries, keys and heads may drop the same places: they would share a state.

    Gradients of equal masks are right by the masks that were drawn, so nothing else shows it.
    """
    assert inputs.dropout is not None
    if ranks == 1:
        return ""
    parts = (block for rows in inputs.dropout.tensor_split(ranks, 2) for block in rows.tensor_split(ranks, 3))
    heads = [head == 0 for block in parts for head in block.unbind(1) if head.numel() >= 64]
    alike = sum(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
    return f"{alike} pairs of blocks of {ranks} ranks drop the same places" if alike else ""


_references: dict[tuple[object, ...], tuple[Truth, Quantities | None]] = {}


def _reference(check: Check, inputs: Inputs) -> tuple[Truth, Quantities | None]:
    """Truth and yardstick of a case: the same for all subjects that are asked the same of it."""
    key = (check.case, str(inputs.q.device), inputs.wanted, inputs.grad_lse is None, inputs.arithmetic)
    if key not in _references:
        if len(_references) > 2000:
            _references.clear()
        _references[key] = truth_of(inputs), yardstick(inputs)
    return _references[key]


def _chunk(subject: Subject, check: Check, inputs: Inputs) -> Found:
    """Parts of different lengths, one of them a single key and one of them empty."""
    if subject.pair is None:
        raise NotApplicableError("it has no op pair")
    if against := subject.against(call_of(inputs)):  # a pair's functions trust their caller, who asks the claims first
        raise NotApplicableError(against)
    if not subject.says.lse:
        raise NotApplicableError("it gives no lse, by which parts are joined")
    middle = check.case.k_len // 2
    result = chunk_law(subject.pair, inputs, [min(1, middle), middle, middle])
    right, yard = _reference(check, inputs)
    return Found(judge(result, right, yard, inputs), inputs, result)


def _order(subject: Subject, check: Check, inputs: Inputs) -> Found:
    """Each call of the order judged; the first wrong one is what is found."""
    steps = order.named_order(check.case.id, check.case.dtype, inputs.q.device, check.case.seed)
    steps = [replace(step, inputs=within(subject.says, step.inputs)) for step in steps]
    for step in steps:
        against = subject.against(call_of(step.inputs))
        if subject.pair is None and step.stored is not order.Step.stored:
            against = "it has no op pair, whose backward could be handed an out"
        if against:
            raise NotApplicableError(f"{step.name}: {against}")
    found = Found([])
    for number, step in enumerate(steps):
        found = _answer(subject, step)
        if not found.ok:
            ran = " and ".join(before.name for before in steps[:number])
            return replace(
                found, told=f"call {number + 1} of {len(steps)}, {step.name}, {f'after {ran}' if ran else 'first'}"
            )
    return found


def _answer(subject: Subject, step: order.Step) -> Found:
    """One call of an order, judged."""
    x = step.inputs
    if x.options.dropout_p:
        x = replace(x, dropout=revealed(subject, x))
    result = whole(subject.pair, x, step.stored) if subject.pair is not None else run(subject, x)
    return Found(judged(result, x), x, result)


def _law(law: Callable[[Subject, Inputs], list[Verdict]]) -> Callable[[Subject, Check, Inputs], Found]:
    def of(subject: Subject, check: Check, inputs: Inputs) -> Found:
        against = subject.against(call_of(inputs))
        if against:
            raise NotApplicableError(against)
        if inputs.options.dropout_p and law is not REPEATS["twice"]:
            raise NotApplicableError("this law is for calls without dropout")
        return Found(law(subject, inputs), inputs)

    return of


def _alone(number: int) -> Callable[[Subject, Check, Inputs], Found]:
    """One call of an order without those before it: in a fresh process it tells what they did."""

    def of(subject: Subject, check: Check, inputs: Inputs) -> Found:
        steps = order.named_order(check.case.id, check.case.dtype, inputs.q.device, check.case.seed)
        return _answer(subject, replace(steps[number], inputs=within(subject.says, steps[number].inputs)))

    return of


LAWS: dict[str, Callable[[Subject, Check, Inputs], Found]] = {
    **{f"alone-{number}": _alone(number) for number in range(3)},
    "call": _call,
    "ranks": _call,
    "chunk": _chunk,
    "truth": lambda subject, check, inputs: Found(differences(inputs)),
    "order": _order,
    **{name: _law(law) for name, law in (*SYMMETRIES.items(), *REPEATS.items())},
}
