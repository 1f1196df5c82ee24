"""pytest --ringtrue-subject=package.module:function: an audit as tests.

pytest loads this module in every run where ringtrue is installed, so it imports nothing (torch least of all) until a
subject is named.
"""

from __future__ import annotations

import pytest

OPTIONS = (
    ("--ringtrue-group", "smoke", "GROUP", "smoke or full"),
    ("--ringtrue-only", "*", "PATTERN", "only checks whose id matches, such as 'call/causal*'"),
    ("--ringtrue-device", "cpu", "DEVICE", "cpu or cuda"),
    ("--ringtrue-layout", "bshd", "LAYOUT", "of package.module:function: bshd, bhsd or packed"),
    ("--ringtrue-claims", None, "FILE", "what the function says it can do, as TOML"),
    ("--ringtrue-waive", None, "FILE", "known faults, as TOML, each with a reason and a link"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringtrue", "audits of attention (ringtrue)")
    group.addoption(
        "--ringtrue-subject",
        action="append",
        metavar="SUBJECT",
        help="audit package.module:function, or a family such as torch/flash; may be given several times."
        " Without paths on the command line nothing else is run",
    )
    for option, default, metavar, text in OPTIONS:
        group.addoption(option, default=default, metavar=metavar, help=f"of --ringtrue-subject: {text}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("ringtrue_subject"):
        from .items import Audit

        config.pluginmanager.register(Audit(config), "ringtrue-audit")
