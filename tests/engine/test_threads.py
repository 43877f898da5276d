"""Settings of the host: the wait mode is the user's where the user chose, and malloc is told once
there is glibc.
"""

import platform
import time

import pytest

from gpurl.engine.threads import SPIN_COUNT, fastest_threads, keep_large_blocks, wait_briefly


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_the_users_choice_stays(
    before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(before)
    monkeypatch.setattr("os.environ", environment)
    wait_briefly()
    assert environment == after


def test_large_blocks_are_kept_where_there_is_glibc() -> None:
    assert keep_large_blocks() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize(
    ("most", "seconds", "expected", "tried"),
    [
        (1, {}, 1, []),
        (6, {1: 4.0, 2: 2.0, 4: 1.0, 6: 1.5}, 4, [1, 2, 4, 6]),
        (4, {1: 1.0, 2: 0.99, 4: 0.98}, 1, [1, 2, 4]),  # not worth it
        (2, {1: 2.0, 2: 1.0}, 2, [1, 2]),
    ],
)
def test_the_quickest_number_of_threads_is_taken(
    most: int,
    seconds: dict[int, float],
    expected: int,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, counts = [0.0], list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += seconds[counts[-1]]

    assert fastest_threads(most, counts.append, work) == expected
    assert counts == tried * 5
