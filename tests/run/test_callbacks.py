"""Callbacks: they stop a run, log, change a curriculum, and what they raise is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpurl
from gpurl.algorithms.base import Metrics
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.envs.torch_env import State
from gpurl.errors import UsageError
from gpurl.kernels import c_library
from gpurl.kernels.random import CounterRandom
from gpurl.run.callbacks import Callback, RunView
from tests.small_runs import ITERATION, exit_code, small_run
from tests.tiny_envs import HiddenAlternating, RandomWalk


class StopAtThree(Callback):
    """Ends the run after its third iteration."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        assert all(value.dim() == 0 for value in metrics.values())
        run.log("own/iteration", float(run.iteration))
        run.log("own/entropy", metrics["train/entropy_loss"] * 2.0)
        if run.iteration == 3:
            run.stop("enough")


class StopsAtOnce(Callback):
    """Ends the run before its first iteration."""

    def on_start(self, run: RunView) -> None:
        run.stop("nothing to do")


class Hard(RandomWalk):
    """Its pay is an attribute, a tensor that graphs can read."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device, seed)
        self.wage = torch.ones(())

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        return next_state, torch.zeros_like(reward) + self.wage, terminated


class Curriculum(Callback):
    """Pays more from the second iteration on."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        self.seen.append(float(run.engine.buffer["reward"].mean()))
        run.env.wage.fill_(5.0)  # type: ignore[attr-defined]


class Order(Callback):
    """Notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, run: RunView) -> None:
        self.calls.append("start")

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        self.calls.append("iteration")

    def after_evaluation(self, run: RunView, values: dict[str, float]) -> None:
        assert "eval/mean_reward" in values
        self.calls.append("evaluation")

    def before_save(self, run: RunView) -> None:
        self.calls.append("save")

    def on_end(self, run: RunView) -> None:
        self.calls.append("end")


class Breaks(Callback):
    """Raises in the second iteration."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        if run.iteration == 2:
            raise ValueError("what now")  # the line that fails


def test_one_stops_the_run_and_logs_scalars(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 10, callbacks=[StopAtThree()], log_every=0.0)
    assert (run.outcome.reason, run.outcome.steps) == ("enough", 3 * ITERATION)
    assert load_checkpoint(run.folder)[0]["trainer"]["steps"] == 3 * ITERATION
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    logged = [entry for line in lines if "own/iteration" in (entry := json.loads(line))]
    assert [entry["own/iteration"] for entry in logged] == [1.0, 2.0, 3.0]
    for entry in logged:
        assert entry["own/entropy"] == pytest.approx(2.0 * entry["train/entropy_loss"])


def test_one_stops_the_run_before_its_first_iteration(tmp_path: Path) -> None:
    """It is evaluated and saved."""
    order = Order()
    run = small_run(tmp_path / "run", 10, callbacks=[order, StopsAtOnce()])
    assert (run.outcome.reason, run.outcome.steps) == ("nothing to do", 0)
    assert order.calls == ["start", "evaluation", "save", "save", "end"]
    assert load_checkpoint(run.folder)[0]["trainer"]["steps"] == 0


def test_one_changes_a_curriculum(tmp_path: Path) -> None:
    curriculum = Curriculum()
    env = f"{__name__}:Hard"
    small_run(tmp_path / "run", 3, "ppo", env, callbacks=[curriculum], eval_episodes=0)
    assert curriculum.seen == [1.0, 5.0, 5.0]


def test_they_are_called_in_their_places(tmp_path: Path) -> None:
    order = Order()
    small_run(tmp_path / "run", 2, callbacks=[order], eval_every=ITERATION)
    assert order.calls[:3] == ["start", "iteration", "evaluation"]
    assert order.calls[-2:] == ["save", "end"]
    assert order.calls.count("iteration") == order.calls.count("evaluation") == 2


def test_what_one_raises_names_its_line_and_the_checkpoint_stays(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"Breaks.after_iteration raised ValueError: what now"
    ) as e:
        small_run(tmp_path / "run", 4, callbacks=[Breaks()])
    assert "test_callbacks.py" in str(e.value)
    assert "the line that fails" in str(e.value)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 2 * ITERATION


class BreaksAtSave(Callback):
    """Raises before every checkpoint."""

    def __init__(self) -> None:
        self.calls = 0

    def before_save(self, run: RunView) -> None:
        self.calls += 1
        raise ValueError("nothing to save")


@pytest.mark.parametrize(
    ("changes", "iterations"),
    [({"save_every": "1i"}, 1), ({"eval_every": ITERATION}, 1), ({"eval_episodes": 0}, 2)],
    ids=str,
)
def test_one_that_raises_before_a_save_does_not_prevent_it(
    changes: dict[str, Any], iterations: int, tmp_path: Path
) -> None:
    """In a save between iterations, in that of the best policy and in the last one."""
    callback = BreaksAtSave()
    with pytest.raises(UsageError, match=r"BreaksAtSave.before_save raised ValueError: nothing"):
        small_run(tmp_path / "run", 2, callbacks=[callback], **changes)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == iterations * ITERATION
    assert callback.calls == 1


class Stops(Callback):
    """Raises an error that a user is to read as it is."""

    def on_start(self, run: RunView) -> None:
        raise UsageError("choose a larger arena")


def test_an_error_for_the_user_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^choose a larger arena$"):
        small_run(tmp_path / "run", 1, callbacks=[Stops()])


class Logs(Callback):
    """Logs one number in each iteration."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        run.log(self.name, self.value)


@pytest.mark.parametrize(
    "name", ["returns", "episodes", "non_finite_rows", "skipped of policy", "steps of policy"]
)
def test_a_logged_number_changes_no_other(name: str, tmp_path: Path) -> None:
    """Episode sums and counts of guards have these names before they are logged."""
    plain = small_run(tmp_path / "plain", 3, log_every=0.0).folder
    run = small_run(tmp_path / "run", 3, callbacks=[Logs(name, torch.tensor(7.0))], log_every=0.0)
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (plain, run.folder)
    ]
    for expected, got in zip(*lines, strict=True):
        if "time/fps" in expected:  # not of an evaluation
            assert got.pop(name) == 7.0
        for line in (expected, got):
            for tag in [tag for tag in line if tag.startswith("time")]:
                del line[tag]
        assert got == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("step", 1.0, "'step' is a name of gpurl"),
        ("time", 1.0, "'time' is a name of gpurl"),
        ("rollout/ep_rew_mean", 1.0, "choose another one, for example my/ep_rew_mean"),
        ("my/pair", torch.zeros(2), r"wanted a number or a 0-d tensor as 'my/pair', got shape"),
        ("my/text", "high", "wanted a number or a 0-d tensor as 'my/text', got 'high'"),
    ],
)
def test_what_cannot_be_logged_is_named(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        small_run(tmp_path / "run", 2, callbacks=[Logs(name, value)])
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == ITERATION


class Patches(Callback):
    """Replaces the loss on the object."""

    def on_start(self, run: RunView) -> None:
        loss = run.algorithm.loss  # type: ignore[attr-defined]
        run.algorithm.loss = lambda batch: loss(batch)  # type: ignore[attr-defined]


@pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
def test_a_change_that_the_engine_would_ignore_is_refused(tmp_path: Path) -> None:
    """The engine is chosen before."""
    with pytest.raises(UsageError, match="engine C would ignore it: PPO overrides loss"):
        small_run(tmp_path / "run", 1, callbacks=[Patches()])


class SeesEnv(Callback):
    """Notes the class of the environments."""

    def __init__(self) -> None:
        self.kinds: list[type] = []

    def on_start(self, run: RunView) -> None:
        self.kinds.append(type(run.env))


def test_they_see_the_users_environment_behind_privileged_observations(tmp_path: Path) -> None:
    callback = SeesEnv()
    small_run(
        tmp_path / "run",
        1,
        env="tests.tiny_envs:HiddenAlternating",
        callbacks=[callback],
        eval_episodes=0,
    )
    assert callback.kinds == [HiddenAlternating]


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    words = [
        "num_envs=4",
        "horizon=8",
        "minibatches=1",
        "total_steps=3200",
        "device=cpu",
        "quiet=true",
    ]
    words += [f"run_dir={tmp_path / 'run'}", "--callback", f"{__name__}:StopAtThree"]
    assert exit_code(["train", "ppo", "cart_pole", *words]) == 0
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 3 * 32


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a callback is a gpurl.Callback, got 3"):
        small_run(tmp_path / "run", 1, callbacks=[3])
    assert gpurl.Callback is Callback


def test_one_callback_or_its_class_is_told_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"callbacks is a list, as callbacks=\[MyCallback\(\)\]"):
        small_run(tmp_path / "run", 1, callbacks=StopsAtOnce())
    with pytest.raises(UsageError, match=r"got <class .*StopsAtOnce'>; make one, StopsAtOnce\(\)"):
        small_run(tmp_path / "run", 1, callbacks=[StopsAtOnce])


class CopiedStep(Callback):
    """Of stable-baselines3, whose names are others."""

    def on_step(self) -> bool:
        raise AssertionError


class CopiedEnd(Callback):
    """Ends a run as in stable-baselines3."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> bool:  # type: ignore[override]
        return False


class CopiedPlural(Callback):
    """One name is wrong."""

    def after_iterations(self, run: RunView, metrics: Metrics) -> None:
        raise AssertionError

    def on_end(self, run: RunView) -> None:
        pass


def test_callbacks_that_do_nothing_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooked = Callback()
    hooked.on_start = lambda run: None  # type: ignore[method-assign]
    callbacks = [CopiedStep(), CopiedEnd(), CopiedPlural(), StopAtThree(), hooked]
    small_run(tmp_path / "run", 3, callbacks=callbacks)
    assert [record.message for record in caplog.records if "Copied" in record.message] == [
        "callback CopiedStep overrides none of on_start, after_iteration, after_evaluation, "
        "before_save, on_end: nothing calls it",
        "callback CopiedPlural.after_iterations: nothing calls it; did you mean after_iteration?",
        "callback CopiedEnd.after_iteration returned False, which is ignored: run.stop(reason) "
        "ends a run",
    ]
    said = [record.message for record in caplog.records]
    assert not any("StopAtThree" in text or "callback Callback" in text for text in said)
