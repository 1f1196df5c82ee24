"""One test item a check, and what a run of them comes to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ringtrue.audit import waivers
from ringtrue.audit.outcome import NOT_RUN, QUIET, WAIVED, Outcome
from ringtrue.testing import Question, WrongError, checks_for, told

VERDICT = "ringtrue"  # the property of a test's report that holds its verdict, before waivers
NAMES = ("group", "only", "device", "layout", "claims")


class Audit:
    """The plugin of a run in which a subject was named."""

    def __init__(self, config: pytest.Config) -> None:
        self.subjects: list[str] = config.getoption("ringtrue_subject")
        self.options = {name: config.getoption(f"ringtrue_{name}") for name in NAMES}
        file = config.getoption("ringtrue_waive")
        try:
            self.waivers = waivers.read(file) if file else []
        except (OSError, ValueError) as error:
            raise pytest.UsageError(str(error)) from error
        self.outcomes: list[Outcome] = []
        self.stale: list[str] = []
        here = str(config.invocation_params.dir)
        if here not in sys.path:  # as python -m pytest has it
            sys.path.insert(0, here)
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # no path was named: the audit alone

    @pytest.hookimpl(tryfirst=True)  # before -k and -m choose
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        for subject in self.subjects:
            try:
                questions = checks_for(subject, **self.options)
            except (OSError, ValueError) as error:
                raise pytest.UsageError(str(error)) from error
            for name in dict.fromkeys(question.subject.name for question in questions):
                node = SubjectNode.from_parent(session, name=name, nodeid=name)
                node.questions = [question for question in questions if question.subject.name == name]
                node.audit = self
                found = list(node.collect())
                session.ihook.pytest_collectreport(report=pytest.CollectReport(name, "passed", None, [*found]))
                items.extend(found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Every outcome, also those of other processes (xdist): by the test's own name, "subject::check"."""
        verdict = dict(report.user_properties).get(VERDICT)
        if report.when == "call" and verdict is not None:
            subject, _, check = report.nodeid.partition("::")
            self.outcomes.append(Outcome(subject, check, str(verdict)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run that found nothing out is not green, nor is one whose waivers are stale."""
        if hasattr(session.config, "workerinput"):
            return
        _, self.stale = waivers.apply(self.outcomes, self.waivers)
        if session.exitstatus == pytest.ExitCode.OK:
            if self.stale:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            elif self.outcomes and all(o.verdict in QUIET for o in self.outcomes):
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        verdicts = [waivers.waived(o, self.waivers).verdict for o in self.outcomes]
        if verdicts:
            counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
            nothing = "; nothing ran, so nothing is proven" if set(verdicts) <= QUIET else ""
            terminalreporter.write_line(f"ringtrue: {counts}{nothing}")
        for text in self.stale:
            terminalreporter.write_line(f"ringtrue: {text}", red=True)


class SubjectNode(pytest.Collector):
    """A subject and its checks."""

    questions: list[Question]
    audit: Audit

    def collect(self) -> Iterator[CheckItem]:
        for question in self.questions:
            yield CheckItem.from_parent(self, name=question.id, question=question, audit=self.audit)


class CheckItem(pytest.Item):
    """One check of one subject."""

    def __init__(self, *, question: Question, audit: Audit, **rest: Any) -> None:
        super().__init__(**rest)
        self.question, self.audit = question, audit

    def runtest(self) -> None:
        found = self.question.outcome()
        self.user_properties.append((VERDICT, found.verdict))
        outcome = waivers.waived(found, self.audit.waivers)
        if outcome.bad:
            raise WrongError(told(outcome))
        if outcome.verdict == WAIVED:
            pytest.xfail(outcome.reason)
        if outcome.verdict in QUIET:
            pytest.skip(outcome.reason if outcome.verdict == NOT_RUN else f"{outcome.verdict}: {outcome.reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What was found, without a traceback of the audit's own code."""
        return str(excinfo.value) if isinstance(excinfo.value, WrongError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.question.subject.name} {self.name}"
