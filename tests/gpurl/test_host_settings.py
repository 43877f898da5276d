"""Settings of the host: the wait mode is the user's where the user chose, and malloc is told once there is glibc."""

import platform

import pytest

from gpurl.host_settings import SPIN_COUNT, keep_large_blocks, wait_briefly


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_the_users_choice_stays(before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(before)
    monkeypatch.setattr("os.environ", environment)
    wait_briefly()
    assert environment == after


def test_large_blocks_are_kept_where_there_is_glibc() -> None:
    assert keep_large_blocks() == (platform.libc_ver()[0] == "glibc")
