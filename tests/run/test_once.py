"""Warnings of a run: each once, although training and evaluation have environments of their own."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gpurl.run.once import warn_once
from tests.small_runs import small_run
from tests.tiny_envs import RandomWalk

log = logging.getLogger("gpurl")


class Grumbling(RandomWalk):
    """Warns when it is made and when it is reset."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        super().__init__(num_envs, **options)
        log.warning("%s was made", type(self).__name__)

    def reset(self, **options: Any) -> Any:
        log.warning("%s was reset", type(self).__name__)
        return super().reset(**options)


def test_the_environments_of_a_run_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):  # and the next run again
        small_run(tmp_path / str(number), 2, env=Grumbling)
        assert caplog.messages == number * ["Grumbling was made", "Grumbling was reset"]
    Grumbling(1, device="cpu", seed=0)
    Grumbling(1, device="cpu", seed=0)
    assert len(caplog.messages) == 6


def test_other_texts_and_what_comes_after_an_error_are_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing() -> None:
        with warn_once():
            for number in (1, 2, 1):
                log.warning("number %d", number)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    log.warning("number %d", 1)
    assert caplog.messages == ["number 1", "number 2", "number 1"]
