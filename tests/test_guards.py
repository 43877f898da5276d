"""benchmarks/guards.py counts the seconds inside the guards: a slow one shows, and only in its own share."""

import time

import pytest

from benchmarks.guards import LIMIT, shares
from gpurl.finite_guard import FiniteGuard


def test_a_slow_guard_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = FiniteGuard.clean

    def slow(*arguments: object) -> object:
        time.sleep(0.05)
        return clean(*arguments)  # type: ignore[arg-type]

    usual = shares("sac pendulum", 0.3)
    monkeypatch.setattr(FiniteGuard, "clean", slow)
    slowed = shares("sac pendulum", 0.3)
    assert list(usual) == ["values, starting", "form, starting", "values, running", "form, running"]
    assert all(0.0 < share < 20.0 for share in usual.values())
    assert slowed["values, running"] > 30.0 > LIMIT
    assert slowed["form, running"] < 10.0
