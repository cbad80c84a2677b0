"""What every test may rely on, whatever started the test run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from dsv4_repro.tests.standin.run import StandIn

# A run started in the background of a script (``… &``, nohup) inherits an ignored SIGINT, and so would every child that a test
# interrupts on purpose. A handler, unlike "ignore", is not inherited: children start with the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)


# A busy machine makes an example slow; that says nothing of the code (one example in a run on two busy cores took over 0.2 s).
settings.register_profile("dsv4-repro", deadline=None)
settings.load_profile("dsv4-repro")

#: Live servers in trouble, for minutes: run on purpose, skipped visibly otherwise.
SERVER_FAULTS = "DSV4_REPRO_SERVER_FAULTS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get(SERVER_FAULTS):
        skipped = pytest.mark.skip(reason=f"minutes of live stand-in servers in trouble: {SERVER_FAULTS}=1 runs it")
        for item in items:
            if item.get_closest_marker("server_faults") is not None:
                item.add_marker(skipped)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """``-n auto``: an idle worker takes tests from a busy one; the long ones lie together in a few files."""
    if getattr(config.option, "numprocesses", None) and getattr(config.option, "dist", "") == "no":
        config.option.dist = "worksteal"


def _standin() -> ModuleType:
    """The package tests/standin (a test double of ``vllm serve``), imported by path: tests are no part of what is installed."""
    if "standin" not in sys.modules:
        folder = Path(__file__).parent / "standin"
        spec = importlib.util.spec_from_file_location("standin", folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["standin"] = module
        spec.loader.exec_module(module)
    return sys.modules["standin"]


# From here on a test module may say ``from standin.played import Scene``.
_standin()


@pytest.fixture(scope="session")
def standin() -> ModuleType:
    """The package tests/standin."""
    return _standin()


@pytest.fixture
def stand_in(standin: ModuleType) -> Callable[..., AbstractContextManager[StandIn]]:
    """``with stand_in(wedge=3, agent=True) as server:`` see tests/standin/__init__.py."""
    found: Callable[..., AbstractContextManager[StandIn]] = importlib.import_module("standin.run").stand_in
    return found
