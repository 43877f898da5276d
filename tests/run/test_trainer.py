"""What the training loop keeps beside the weights: the best return over resumes, and no memory of a
NaN.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.checkpoints.folders import best_checkpoint, load_checkpoint
from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import Timestep
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.display import Display
from gpurl.run.logger import Logger
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Outcome
from tests.tiny_envs import Endless, RandomWalk

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "horizon": 8,
    "minibatches": 1,
    "eval_episodes": 4,
    "device": "cpu",
    "quiet": True,
}
ITERATION = 4 * 8


class Paid(RandomWalk):
    """Pays `wage` at each of an episode's 7 steps, whatever is done."""

    wage = 0.0

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        return next_state, torch.full_like(reward, self.wage), torch.zeros_like(terminated)


class LostSight(Endless):
    """Environment 3 shows NaN from its third step until it is reset; no episode ends and empties
    the memory.
    """

    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        timestep.obs[3] = torch.where(self.episode_length_buf[3] >= 3, torch.nan, timestep.obs[3])
        return timestep


class Blinking(Endless):
    """Environment 3 shows NaN once, at its third step."""

    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        timestep.obs[3] = torch.where(self.episode_length_buf[3] == 3, torch.nan, timestep.obs[3])
        return timestep


def one_more_iteration(folder: Path, number: int, wage: float) -> Outcome:
    """Iteration `number` of the run in `folder`, in a trainer of its own, then an evaluation that
    pays `wage`.
    """
    settings = make_settings(
        "ppo", "tests.run.test_trainer:Paid", **SMALL, total_steps=number * ITERATION
    )
    evaluated = Paid(4)
    evaluated.wage = wage
    trainer = make_trainer(settings, CPU, evaluated)
    trainer.folder = folder
    if number == 1:
        trainer.start()
    else:
        trainer.restore(load_checkpoint(folder)[0])
    logger = Logger(folder, "sb3", trainer.steps)
    try:
        return trainer.run(logger, Display("", None, quiet=True))
    finally:
        logger.close()


def test_a_resumed_run_replaces_best_only_by_a_better_policy(tmp_path: Path) -> None:
    """Of 14, 7 and 21 the second is the best of its process and not of its run."""
    best = []
    for number, wage in enumerate((2.0, 1.0, 3.0), start=1):
        outcome = one_more_iteration(tmp_path, number, wage)
        assert (outcome.steps, outcome.evaluation["eval/mean_reward"]) == (
            number * ITERATION,
            7 * wage,
        )
        chosen = best_checkpoint(tmp_path)
        assert chosen is not None
        best.append(int(chosen.name.removeprefix("step_")) // ITERATION)
    assert best == [1, 1, 3]


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_memory_that_saw_nan_is_emptied_with_its_environment(kind: str) -> None:
    """The others keep theirs."""
    network = {"hidden": [8], "memory": kind, "memory_size": 8}
    settings = make_settings(
        "ppo", "tests.run.test_trainer:LostSight", **SMALL, nan="reset-envs", network=network
    )
    trainer = make_trainer(settings, CPU)
    trainer.start()
    trainer.iterate()
    memory = trainer.engine.policy_state[0]
    assert not bool(memory[3].any())
    assert bool(torch.isfinite(memory).all())
    assert bool((memory[:3] != 0.0).any(1).all())


def test_what_a_memory_has_of_a_nan_is_not_blamed_on_the_policy() -> None:
    """Where the host hears of it some iterations later, as on a GPU."""
    network = {"hidden": [8], "memory": "gru", "memory_size": 8}
    settings = make_settings(
        "ppo", "tests.run.test_trainer:Blinking", **SMALL, network=network, stagger=False
    )
    with no_host_syncs():
        trainer = make_trainer(settings, CPU)
        trainer.start()
        for _ in range(3):
            trainer.iterate()
    message = {name: int(value) for name, value in trainer.engine.guards.finite.metrics().items()}
    assert message["non_finite_rows"] > 0
    assert message["policy_diverged"] == 0


class Forgetful(RandomWalk):
    """A simulator whose state cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_simulator_without_a_state_goes_on_at_different_clocks() -> None:
    settings = make_settings("ppo", "tests.run.test_trainer:Forgetful", **{**SMALL, "num_envs": 64})
    first, second = make_trainer(settings, CPU), make_trainer(settings, CPU)
    first.start()
    first.iterate()
    second.restore(first.state())
    clocks = second.env.episode_length_buf
    assert len(clocks.unique()) == 7
    assert int(clocks.max()) < 7
