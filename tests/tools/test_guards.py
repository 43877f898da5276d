"""tests/tools/guards.py counts the seconds inside the guards: a slow one shows, and in its own
share.
"""

import time

import pytest

from gpurl.guards.finite import FiniteGuard
from tests.tools.guards import LIMIT, Watch, percentages


class Sleeper:
    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        if seconds > 0.04:
            raise ValueError("too long")
        return "rested"


def test_seconds_inside_are_added_up_whatever_comes_of_it() -> None:
    watch, sleeper = Watch(), Sleeper()
    watch.wrap(sleeper, "nap")
    assert sleeper.nap(0.03) == sleeper.nap(seconds=0.03) == "rested"
    with pytest.raises(ValueError, match="too long"):
        sleeper.nap(0.05)
    assert watch.seconds >= 0.11


def test_a_slow_guard_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = FiniteGuard.clean

    def slow(*arguments: object) -> object:
        time.sleep(0.3)
        return clean(*arguments)  # type: ignore[arg-type]

    usual = percentages("sac pendulum", 0.1)
    assert list(usual) == ["values, starting", "form, starting", "values, running", "form, running"]
    assert all(0.0 < share < 100.0 for share in usual.values())
    monkeypatch.setattr(FiniteGuard, "clean", slow)
    slowed = percentages("sac pendulum", 0.1)
    assert slowed["values, running"] > 30.0 > LIMIT
    assert slowed["form, running"] < slowed["values, running"]
