"""NaN and infinity in losses, gradients and weights: nothing of them is learnt, and what was first
is named in the same iteration.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms import algorithm_names
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.api import resume, train
from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from gpurl.cli.main import main
from gpurl.engine.cpu_ppo import PpoInC
from gpurl.engine.statistics import to_host
from gpurl.envs.registry import make_env
from gpurl.errors import DivergedError, UsageError
from gpurl.guards.steps import StepGuard
from gpurl.nn.optimizer import FlatAdam
from gpurl.run.display import Display
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer
from tests.small_runs import ITERATION, SMALL, small_settings, some_demonstrations

ENVS = dict.fromkeys(("dqn", "rainbow", "pqn", "discrete_sac"), "cart_pole") | {
    "vdn": "two_step_game"
}


def small_trainer(name: str, folder: Path, **changes: Any) -> Trainer:
    """Of an algorithm that learns from its second iteration on at the latest."""
    env = ENVS.get(name, "pendulum")
    values = small_settings(name) | {
        "num_envs": 8,
        "horizon": 4,
        "device": "cpu",
        "threads": 1,
        "total_steps": 10**6,
        "eval_episodes": 0,
    }
    if name == "bc":
        values["dataset"] = some_demonstrations(folder, make_env(env, 1))
    trainer = make_trainer(make_settings(name, env, **(values | changes)), torch.device("cpu"))
    trainer.folder = folder
    trainer.start()
    trainer.iterate()
    trainer.iterate()
    return trainer


def trained(algorithm: Algorithm) -> dict[str, torch.Tensor]:
    """All that a step moves: weights, targets and moments."""
    moments = {
        f"{name}.{key}": value
        for name, each in algorithm.optimizers.items()
        for key, value in each.state_dict().items()
    }
    weights = {
        name: value for name, value in algorithm.state_dict().items() if "normalizer" not in name
    }
    return {
        key: value.clone()
        for key, value in (weights | moments).items()
        if not key.endswith("learning_rate")
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", algorithm_names())
def test_a_weight_that_is_not_finite_ends_the_run_at_once_and_is_named(
    name: str, tmp_path: Path
) -> None:
    """Of every algorithm, and with --nan reset-envs too: nothing can be learnt with such
    weights.
    """
    trainer = small_trainer(name, tmp_path, nan="reset-envs")
    key, optimizer = next(iter(trainer.algorithm.optimizers.items()))
    weight, parameter = next(iter(optimizer.module.named_parameters()))
    with torch.no_grad():
        parameter.view(-1)[-1] = torch.nan
    iteration, poisoned = trainer.engine.iteration + 1, trained(trainer.algorithm)
    with pytest.raises(DivergedError, match=rf"iteration {iteration}\b") as caught:
        trainer.iterate()
    prefix = "" if key == "policy" else f"{key}."
    assert f"{prefix}{weight} (1 of " in str(caught.value)
    changed = {
        at
        for at, value in trained(trainer.algorithm).items()
        if not torch.equal(value.nan_to_num(), poisoned[at].nan_to_num())
    }
    assert not any(bool(trained(trainer.algorithm)[at].isnan().any()) for at in changed)


@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, torch.nan) for name in algorithm_names()), ("ppo", torch.inf), ("sac", -torch.inf)],
)
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_told_once(
    name: str, bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second step of each optimiser after the start; the run goes on and says so in the same
    iteration.
    """
    trainer = small_trainer(name, tmp_path)
    algorithm, calls = trainer.algorithm, dict[int, int]()
    trainer.engine.learn = algorithm.learn  # type: ignore[method-assign]  # not in C: see below
    real = FlatAdam.step_along_gradient

    def step(self: FlatAdam, *arguments: Any, **named: Any) -> torch.Tensor:
        calls[id(self)] = calls.get(id(self), 0) + 1
        if calls[id(self)] == 2:
            list(self.module.parameters())[-1].grad.view(-1)[0] = bad  # type: ignore[union-attr]
        kept = {at: value.clone() for at, value in moved(self).items()}
        norm = real(self, *arguments, **named)
        losses = named.get("losses")
        is_due = losses is None or bool(losses.isfinite().all())  # of ModSAC's actor it may not be
        assert same(kept, moved(self)) == (calls[id(self)] == 2 or not is_due)
        return norm

    monkeypatch.setattr(FlatAdam, "step_along_gradient", step)
    while min(calls.get(id(each), 0) for each in algorithm.optimizers.values()) < 2:
        trainer.iterate()
    (message,) = trainer.engine.guards.warnings
    optimizer = next(iter(algorithm.optimizers.values()))
    assert (
        f"1 optimiser steps were skipped, first at minibatch {1 if name == 'a2c' else 2} of "
        in message
    )
    assert message.count(f"iteration {trainer.engine.iteration}") == 1
    assert f"{list(optimizer.parts_of(optimizer.flat))[-1]} (1 of " in message
    trainer.iterate()
    assert len(trainer.engine.guards.warnings) == 1
    assert all(bool(value.isfinite().all()) for value in trained(algorithm).values())


def pay(trainer: Trainer, reward: float) -> None:
    """From now on."""
    real = trainer.env.step

    def step(actions: torch.Tensor) -> Any:
        timestep = real(actions)
        timestep.reward.fill_(reward)
        return timestep

    trainer.env.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "form", [{}, {"squash": True}, {"network": {"memory": "gru"}}, {"precision": "bf16"}], ids=str
)
def test_a_loss_that_overflows_moves_no_form_of_ppo(form: dict[str, Any], tmp_path: Path) -> None:
    """A clip bounds the gradient, which is finite. Nor does the rate of steps that were not taken
    grow, though the policy stayed near.
    """
    trainer = small_trainer(
        "ppo",
        tmp_path,
        nan="skip",
        max_grad_norm=0.5,
        normalize_value=False,
        minibatches=2,
        epochs=4,
        **form,
    )
    pay(trainer, 1e22)
    rate = trainer.algorithm.optimizer.learning_rate  # type: ignore[attr-defined]
    before, rate_before = trained(trainer.algorithm), float(rate)
    trainer.iterate()
    (message,) = trainer.engine.guards.warnings
    assert (
        "8 optimiser steps were skipped, first at minibatch 1 of 8 of iteration 3: the loss "
        "value_loss is inf" in message
    )
    assert "the gradient of" not in message
    assert same(before, trained(trainer.algorithm))
    assert float(rate) == rate_before


def moved(optimizer: FlatAdam) -> dict[str, torch.Tensor]:
    """What a step of `optimizer` moves."""
    parts = (
        optimizer.state_dict()
        | {"flat": optimizer.flat}
        | ({} if optimizer.target is None else {"target": optimizer.target})
    )
    return {name: value for name, value in parts.items() if name != "learning_rate"}


@pytest.mark.parametrize(
    ("column", "what"),
    [("returns", "the loss value_loss is "), ("log_prob", "the loss surrogate is ")],
)
def test_a_minibatch_of_ppo_in_c_that_is_not_finite(column: str, what: str, tmp_path: Path) -> None:
    """Epochs of two minibatches: the row is in one of each, so every second step is skipped and no
    other.
    """
    trainer = small_trainer("ppo", tmp_path, minibatches=2, epochs=4)
    engine = PpoInC(trainer.algorithm)  # type: ignore[arg-type]
    trainer.algorithm.learn = engine.learn  # type: ignore[method-assign]
    real = trainer.algorithm.prepare

    def prepare(buffer: Any) -> dict[str, torch.Tensor]:
        data = real(buffer)
        place = trainer.algorithm.minibatches.rows.places[column]  # type: ignore[attr-defined]
        data["packed"][5, place] = torch.nan
        return data

    trainer.algorithm.prepare = prepare  # type: ignore[method-assign]
    before = trained(trainer.algorithm)
    trainer.iterate()
    (message,) = trainer.engine.guards.warnings
    assert (
        f"4 optimiser steps were skipped, first at minibatch "
        f"{message.partition('at minibatch ')[2][0]} of 8 of iteration 3: {what}" in message
    )
    assert "the gradient of " in message
    after = trained(trainer.algorithm)
    assert int(after["policy.step"]) == int(before["policy.step"]) + 4
    assert all(bool(value.isfinite().all()) for value in after.values())


def test_many_steps_left_out_in_a_row_end_the_run_and_are_dumped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of an iteration; --nan skip goes on and counts them. The weights are those of the
    start.
    """
    settings: dict[str, Any] = SMALL | {
        "total_steps": 3 * ITERATION,
        "value_coef": 1e38,
        "normalize_value": False,
        "eval_episodes": 0,
    }
    with pytest.raises(
        DivergedError,
        match="8 optimiser steps in a row were skipped, at minibatch 1 of 8 of iteration 1: ",
    ) as caught:
        train("ppo", "pendulum", **settings, run_dir=str(tmp_path / "run"))
    assert (
        "There is no checkpoint yet: start again with a lower learning_rate. For the steps that "
        "led there: gpurl doctor " in str(caught.value)
    )
    assert latest_checkpoint(tmp_path / "run") is None
    assert main(["doctor", str(caught.value).rpartition("gpurl doctor ")[2]]) == 0
    text = capsys.readouterr().out
    assert (
        "environment 'pendulum': optimiser step of policy skipped at minibatch 1 of 8 of iteration "
        "1, which ended at env step 128; 8 such" in text
    )
    assert "weights that are not finite: none" in text
    assert "loss value_loss " in text
    assert "critic.weight " in text.partition("parameter ")[2]
    run = train("ppo", "pendulum", **settings, run_dir=str(tmp_path / "skip"), nan="skip")
    assert capsys.readouterr().err.count("8 optimiser steps were skipped") == 1
    resume(run.folder, total_steps=4 * ITERATION)  # counts on, and warns again
    assert capsys.readouterr().err.count("8 optimiser steps were skipped") == 1
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [
        record["train/skipped_steps"] for record in records if "train/skipped_steps" in record
    ] == [8, 16, 24, 32]
    assert all(
        bool(value.isfinite().all()) for value in load_checkpoint(run.folder)[0]["model"].values()
    )


def test_a_diverged_run_is_told_of_checkpoints_that_latest_does_not_name(tmp_path: Path) -> None:
    trainer = small_trainer("sac", tmp_path)
    with Display("", 1, quiet=True) as display:
        assert trainer.save(display) == ""
        (tmp_path / "checkpoints" / "LATEST").unlink()
        with pytest.raises(
            DivergedError,
            match=r"weights\. To continue from the last checkpoint with smaller steps: gpurl train "
            r"--resume",
        ):
            trainer._save_and_reraise(DivergedError("weights"), display)


def test_one_step_of_an_iteration_is_not_many(tmp_path: Path) -> None:
    """Where an iteration has one step, eight in a row end the run and not the first."""
    trainer = small_trainer("sac", tmp_path, updates=1)
    trainer.algorithm.config.__dict__["reward_scale"] = 1e30
    for number in range(8):
        if number == 7:
            with pytest.raises(
                DivergedError,
                match="8 optimiser steps in a row were skipped, at minibatch 1 of 1 of iteration "
                "10: the loss c",
            ):
                trainer.iterate()
        else:
            trainer.iterate()


def test_a_device_tells_with_the_next_log_entry(tmp_path: Path) -> None:
    """Nothing is looked at before; what is told then has the iteration and minibatch of the
    first.
    """
    trainer = small_trainer("dqn", tmp_path)
    optimizer = trainer.algorithm.optimizers["network"]
    trainer.engine.guards.steps.begin(trainer.engine.iteration)
    guard, iterations = trainer.engine.guards.steps, trainer.engine.iteration
    for iteration in range(3):
        for minibatch in range(4):
            optimizer.gradient[5] = torch.inf if (iteration, minibatch) in ((1, 2), (2, 0)) else 0.1
            optimizer.step_along_gradient()
    values = to_host(guard.metrics())
    (message,) = guard.report(values, iterations + 3, "cart_pole", True)
    assert (
        f"2 optimiser steps were skipped, first at minibatch 3 of 4 of iteration "
        f"{iterations + 2}: " in message
    )
    assert to_host(guard.metrics())["skipped of network"] == 0
    assert (
        guard.report(
            to_host(guard.metrics()),
            iterations + 3,
            "cart_pole",
            True,
        )
        == []
    )


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """LATEST stays what one can go on from, on a device too, which has not told of them yet."""
    trainer = small_trainer("sac", tmp_path)
    with Display("", 1, quiet=True) as display:
        assert trainer.save(display) == ""
        trainer.iterate()
        next(trainer.algorithm.target_critic.parameters()).data.fill_(torch.nan)  # type: ignore[operator, union-attr]
        assert "the weights are not finite: target_critic." in trainer.save(display)
    _, manifest = load_checkpoint(tmp_path)
    assert manifest["step"] == trainer.steps - 32


def test_buffers_may_be_infinite_from_the_start_and_never_nan() -> None:
    env = make_env("cart_pole", 4)
    spaces = env.single_observation_space, env.single_action_space
    algorithm = PPO(PPOConfig(), *spaces, 4, torch.device("cpu"))
    algorithm.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    algorithm.register_buffer("scale", torch.ones(1))
    guard = StepGuard(algorithm)
    assert guard.bad_weights() == ""
    for name, bad in (("mask", torch.nan), ("scale", torch.inf)):
        getattr(algorithm, name)[0] = bad
        assert guard.bad_weights().startswith(f"{name} (")
        getattr(algorithm, name)[0] = 1.0


def test_returns_that_overflow_leave_the_running_scale_finite(tmp_path: Path) -> None:
    trainer = small_trainer("ppo", tmp_path, nan="skip")
    normalizer = trainer.algorithm.value_normalizer  # type: ignore[attr-defined]
    before = [value.clone() for value in normalizer.buffers()]
    normalizer.update(torch.tensor([[1.0], [torch.inf]]))
    normalizer.update(torch.tensor([[torch.nan], [2.0]]), torch.tensor([True, True]))
    assert all(torch.equal(value, kept) for value, kept in zip(normalizer.buffers(), before))


@pytest.mark.parametrize(("name", "log"), [("sac", 1e3), ("discrete_sac", -1e3), ("mod_sac", 40.0)])
def test_a_temperature_far_out_comes_back(name: str, log: float, tmp_path: Path) -> None:
    """What is learned with it in the meantime is skipped and reported, or finite."""
    trainer = small_trainer(name, tmp_path)
    algorithm: Any = trainer.algorithm
    algorithm.temperature.log.data.fill_(log)
    trainer.iterate()
    least, most = algorithm.log_temperature_limits
    assert least <= float(algorithm.temperature.log.detach()) <= most
    assert bool(trainer.engine.guards.warnings) == (log > 0)
    before = trained(algorithm)
    trainer.iterate()
    after = trained(algorithm)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert not same(before, after)


def test_a_temperature_beyond_its_limits_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"initial_temperature must be from 1.1e-07 to 7.4, between which a learned "
        r"temperature stays, got 8",
    ):
        small_trainer("mod_sac", tmp_path, initial_temperature=8.0)
    with pytest.raises(UsageError, match=r"initial_temperature must be from 1.5e-08 to 6.6e"):
        small_trainer("sac", tmp_path, initial_temperature=1e30)


@pytest.mark.parametrize("name", ["ppo", "a2c", "dqn", "sac", "pqn"])
def test_returns_of_any_size_are_learnt_from_or_told(name: str, tmp_path: Path) -> None:
    """Rewards of 1e30 from one iteration on."""
    trainer = small_trainer(name, tmp_path, nan="skip")
    pay(trainer, 1e30)
    before = trained(trainer.algorithm)
    for _ in range(3):
        trainer.iterate()
    after = trained(trainer.algorithm)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert all(bool(value.isfinite().all()) for value in trainer.algorithm.state_dict().values())
    assert trainer.engine.guards.warnings or not same(before, after)
