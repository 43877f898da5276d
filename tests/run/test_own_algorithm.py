"""Errors in an algorithm or a callback of the user's: one line with class, method, file and line;
those of gpurl itself pass unchanged.
"""

import linecache
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import gpurl
from gpurl.algorithms.ppo import PPO
from gpurl.cli.main import main
from gpurl.errors import EnvError, UsageError
from tests.small_runs import SMALL, exit_code
from tests.tiny_envs import RandomWalk

SHORT: dict[str, Any] = SMALL | {"total_steps": 256}


class MissingColumn(PPO):
    def loss(self, batch: Any) -> Any:
        loss, metrics = super().loss(batch)
        return loss + batch.missing, metrics


class WrongShapes(PPO):
    def loss(self, batch: Any) -> Any:
        loss, metrics = super().loss(batch)
        return loss + self.term(), metrics

    def term(self) -> Any:
        return torch.zeros(3) + torch.zeros(4)  # of torch, in a function of its own


class WithoutMemory(PPO):
    def act(self, obs: Any) -> Any:  # type: ignore[override]
        return super().act(obs)


class FailsToMake(PPO):
    def make_networks(self) -> None:
        _raise_error()


class GivesNoBatch(PPO):
    def loss(self, batch: Any) -> Any:
        return super().loss(3)  # type: ignore[arg-type]


def _raise_error() -> None:
    raise RuntimeError("no network")


@pytest.mark.parametrize(
    ("kind", "said", "source"),
    [
        (
            MissingColumn,
            "MissingColumn.loss raised AttributeError: ",
            "return loss + batch.missing",
        ),
        (WrongShapes, "WrongShapes.term raised RuntimeError: ", "return torch.zeros(3) + torch"),
        (WithoutMemory, "WithoutMemory.act raised TypeError: ", "def act(self, obs: Any)"),
        (FailsToMake, "FailsToMake.make_networks raised RuntimeError: no network", "raise Runtime"),
    ],
)
def test_an_error_in_an_own_algorithm_names_its_line(
    kind: type[PPO], said: str, source: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        gpurl.train(kind, "pendulum", run_dir=str(tmp_path / "run"), **SHORT)
    text = str(caught.value)
    assert text.startswith(f"algorithm {said}")
    place = re.search(rf"\({re.escape(__file__)}:(\d+): {re.escape(source)}", text)
    assert place
    assert source in linecache.getline(__file__, int(place[1]))
    assert type(caught.value.__cause__).__name__ in said


def test_an_error_inside_gpurl_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"'int' object has no attribute 'obs'"):
        gpurl.train(
            GivesNoBatch, "pendulum", run_dir=str(tmp_path / "run"), total_steps=256, **SMALL
        )


def test_a_callback_that_cannot_be_made_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = ["import gpurl", "class Needs(gpurl.Callback):", "    def __init__(self, x): ..."]
    Path("callback_that_needs.py").write_text("\n".join(source))
    words = ["train", "ppo", "pendulum", "--callback", "callback_that_needs:Needs"]
    assert exit_code(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpurl: callback Needs.__init__ raised TypeError: ")
    assert line.endswith("callback_that_needs.py:3: def __init__(self, x): ...)")


def test_a_call_that_a_method_does_not_take_names_the_method(tmp_path: Path) -> None:
    class Wrong(gpurl.Callback):
        def on_start(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(UsageError, match=rf"Wrong.on_start .*\({re.escape(__file__)}:\d+: def on_"):
        gpurl.train(
            "ppo", "pendulum", [Wrong()], run_dir=str(tmp_path / "run"), total_steps=256, **SMALL
        )

    class NoSeed(RandomWalk):
        def reset(self) -> Any:  # type: ignore[override]
            pass

    with pytest.raises(EnvError, match=rf"NoSeed.reset .*\({re.escape(__file__)}:\d+: def reset"):
        gpurl.train("ppo", NoSeed(16), run_dir=str(tmp_path / "other"), **SHORT)


class BreaksLater(PPO):
    """Its `act` and its network can be broken after the training."""

    breaks: ClassVar[str] = ""

    def make_networks(self) -> None:
        if self.breaks == "make_networks":
            raise TypeError("no network today")
        super().make_networks()

    def act(self, *arguments: Any, **named: Any) -> Any:
        if self.breaks == "act":
            raise RuntimeError("no action today")
        return super().act(*arguments, **named)


@pytest.mark.parametrize("method", ["act", "make_networks"])
def test_commands_on_a_run_name_the_line_too(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = gpurl.train(BreaksLater, "pendulum", run_dir=str(tmp_path / "run"), **SHORT)
    monkeypatch.setattr(BreaksLater, "breaks", method)
    for command in ("eval", "play"):
        assert main([command, str(run.folder), "--device", "cpu"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"gpurl: algorithm BreaksLater.{method} raised "), command
