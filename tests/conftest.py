"""What holds for every test: a skip needs a good reason.

The suite fails when a test (or a whole file) is skipped for a reason that has none of the words in
GOOD_SKIP_REASONS, so that a test cannot quietly stop testing. Works with and without xdist.

Tests that are marked slow (they install or start something large) run where CI=true, as in .ci/run
on a server, and with --slow.
"""

from __future__ import annotations

import os
import re

import pytest

# A skip that says one of these is one that a plain machine cannot help.
GOOD_SKIP_REASONS = {
    "GPU": r"\bGPUs?\b|\bCUDA\b",
    "shared data": r"\bshared\b",
    "slow services": r"\bslow service",
}

# On a worker of xdist: skipped files, which xdist does not report. On the main process: all skips.
_skips: list[tuple[str, str]] = []


def reason_is_good(reason: str) -> bool:
    return any(re.search(pattern, reason, re.I) for pattern in GOOD_SKIP_REASONS.values())


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skips.append((report.nodeid, where.removeprefix("Skipped: ")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or os.environ.get("CI") == "true":
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow service: runs in CI and with --slow"))


def pytest_configure(config: pytest.Config) -> None:
    # One thread in every process of a test: bits depend on the number, and one is the fastest on
    # these small models. Torch reads it when it is imported, which is later.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(_SkippedFilesOfWorkers())


class _SkippedFilesOfWorkers:
    """Collects, on the main process, the skipped files that the workers met."""

    def pytest_testnodedown(self, node: object, error: object) -> None:
        for skip in getattr(node, "workeroutput", {}).get("skipped_files", []):
            if tuple(skip) not in _skips:
                _skips.append(tuple(skip))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["skipped_files"] = [skip for skip in _skips if "::" not in skip[0]]
    elif exitstatus == pytest.ExitCode.OK and any(not reason_is_good(why) for _, why in _skips):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    bad = [(name, why) for name, why in _skips if not reason_is_good(why)]
    if bad:
        terminalreporter.section("skipped without a good reason: the suite fails", red=True)
        for name, why in bad:
            terminalreporter.line(f"{name}: {why}")
        terminalreporter.line(f"good reasons: {', '.join(GOOD_SKIP_REASONS)} (tests/conftest.py)")
