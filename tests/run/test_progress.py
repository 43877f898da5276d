"""How far a training is and how long it still takes."""

import math

import pytest

from gpurl.run import progress as module
from gpurl.run.progress import SECONDS_OF_SPEED, Progress


class Clock:
    """A clock that tests set."""

    now = 500.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_the_speed_is_that_of_the_last_minute(clock: Clock) -> None:
    progress = Progress(100_000)
    progress.update(50_000)  # a resumed run: the steps before do not count
    assert progress.seconds_left(steps_per_second=500.0) == 100.0
    # 10 steps a second for a long time, then 100
    for _ in range(100):
        clock.now += 1.0
        progress.update(progress.step + 10)
    assert progress.seconds_left(0.0) == pytest.approx((50_000 - 1000) / 10)
    for _ in range(int(SECONDS_OF_SPEED)):
        clock.now += 1.0
        progress.update(progress.step + 100)
    assert progress.seconds_left(0.0) == pytest.approx((50_000 - 7000) / 100)


def test_a_pause_counts(clock: Clock) -> None:
    progress = Progress(1000)
    progress.update(0)
    clock.now += 10.0
    progress.update(100)
    clock.now += 190.0  # an evaluation
    progress.update(200)
    assert progress.seconds_left(0.0) == pytest.approx(800 / (100 / 190))


@pytest.mark.parametrize("speed", [0.0, math.nan, math.inf])
def test_without_a_speed_nothing_is_said(clock: Clock, speed: float) -> None:
    progress = Progress(1000)
    progress.update(100)
    assert progress.seconds_left(speed) is None
    assert progress.share() == 0.1


def test_the_first_limit_counts(clock: Clock) -> None:
    progress = Progress(1000, max_seconds=50.0)
    progress.update(100)
    clock.now += 10.0
    assert progress.share() == 0.2
    assert progress.seconds_left(100.0) == 9.0
    assert progress.seconds_left(1.0) == 40.0
    clock.now += 100.0
    assert progress.share() == 1.0
    assert progress.seconds_left(1.0) == 0.0


def test_a_run_without_an_end(clock: Clock) -> None:
    progress = Progress(None)
    progress.update(7)
    assert progress.share() is None
    assert progress.seconds_left(10.0) is None
