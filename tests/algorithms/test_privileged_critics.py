"""Off-policy critics that read what only they are shown: that they learn as others do, from what
they alone read, and that nothing of it reaches the actor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

import gpurl
from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.envs.torch_env import State
from gpurl.errors import UsageError
from gpurl.run.memory_need import check_memory
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer
from tests.small_runs import OFF_POLICY, small_settings
from tests.tiny_envs import HiddenAlternating, RandomWalk

HIDDEN = "tests.tiny_envs:HiddenAlternating"
SHOWN = f"{__name__}:Shown"
TRUE_VALUES = [0.9 / 0.19, 1.0 / 0.19]  # in A, in B, with gamma 0.9
ACTOR_CRITICS = [
    name
    for name in OFF_POLICY
    if issubclass(gpurl.algorithms.resolve_algorithm(name), OffPolicyActorCritic)
]


class Shown(RandomWalk):
    """Shows critics what it shows the policy."""

    single_state_space = RandomWalk.single_observation_space

    def observe_state(self, state: State) -> Tensor:
        return state["x"]


class ShownChoices(Shown):
    """With two actions."""

    single_action_space = Discrete(2)


class HiddenChoices(HiddenAlternating):
    """With two actions."""

    single_action_space = Discrete(2)


def trained(name: str, env: str, iterations: int, **changes: Any) -> Trainer:
    options = {"num_envs": 8, "device": "cpu", "eval_episodes": 0, "total_steps": 10**6}
    settings = make_settings(name, env, **options | small_settings(name) | changes)
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    for _ in range(iterations):
        trainer.iterate()
    return trainer


def made(name: str, env: str = HIDDEN, **changes: Any) -> OffPolicyActorCritic:
    algorithm = trained(name, env, 0, **changes).algorithm
    assert isinstance(algorithm, OffPolicyActorCritic)
    return algorithm


def sac_run(folder: Path, env: str = HIDDEN, **changes: Any) -> gpurl.Run:
    small = small_settings("sac") | {"num_envs": 8, "total_steps": 256, "eval_episodes": 4}
    return gpurl.train(
        "sac",
        env,
        **small | {"save_replay": True} | changes,
        run_dir=str(folder),
        device="cpu",
        quiet=True,
    )


def env_of(name: str, plain: str, choices: str) -> str:
    return choices if name == "discrete_sac" else plain


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.engine.choose.cpu_off_policy_obstacle", lambda _: "a test")


@pytest.mark.parametrize("has_c", [True, False])
@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_a_state_equal_to_the_observation_changes_nothing(
    name: str, has_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, statistics and targets are those of critics that read the observation."""
    env = env_of(name, SHOWN, f"{__name__}:ShownChoices")
    options = {"n_step": 2, "normalize_obs": True}
    if not has_c:
        without_c(monkeypatch)
    one = trained(name, env, 6, **options)
    other = trained(name, env, 6, asymmetric=False, **options)
    assert (one.algorithm.num_state, other.algorithm.num_state) == (3, 0)
    assert one.engine.name == other.engine.name
    assert int(one.algorithm.num_updates) == int(other.algorithm.num_updates) > 0
    expected = other.algorithm.state_dict()
    for key, value in one.algorithm.state_dict().items():
        if key.startswith("normalizer.") and value.dim():  # of the observations, then of the state
            expected[key] = expected[key].repeat(2)
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["td3", "sac"])
def test_critics_find_the_values_of_a_place_that_the_policy_does_not_see(name: str) -> None:
    """Episodes are cut off after 3 steps, so a target counts on the state after the last one, and
    not on that of the next episode.
    """
    changes = {"temperature": 1e-6} if name == "sac" else {}
    trainer = trained(
        name,
        HIDDEN,
        300,
        gamma=0.9,
        batch_size=128,
        learning_starts=128,
        replay_size=4096,
        learning_rate=3e-3,
        tau=0.1,
        critic_network={"hidden": [32]},
        **changes,
    )
    rows = torch.cat((torch.zeros(2, 3), torch.eye(2)), dim=1)
    assert trainer.algorithm.value(rows).tolist() == pytest.approx(TRUE_VALUES, abs=0.15)


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac", "redq"])
def test_c_reads_the_same_parts_of_a_row_as_autograd(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trained(name, HIDDEN, 6)
    without_c(monkeypatch)
    other = trained(name, HIDDEN, 6)
    assert (one.engine.name, other.engine.name) == ("C", "eager")
    expected = other.algorithm.state_dict()
    for key, value in one.algorithm.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)


def loss_of(algorithm: OffPolicyActorCritic, name: str) -> Callable[[dict[str, Tensor]], float]:
    """That loss of a batch, always with the same random numbers."""
    streams = algorithm.update_random, algorithm.choice_random
    before = [stream.state_dict() for stream in streams]

    def loss(batch: dict[str, Tensor]) -> float:
        for stream, state in zip(streams, before):
            stream.load_state_dict(state)
        return float(getattr(algorithm, name)(batch)[0])

    return loss


@pytest.mark.parametrize("name", ACTOR_CRITICS)
class TestRead:
    """What actors and critics read of rows of 3 observed and 2 privileged numbers."""

    def make(self, name: str) -> OffPolicyActorCritic:
        env = env_of(name, HIDDEN, f"{__name__}:HiddenChoices")
        return made(name, env, normalize_obs=True)

    def batch(self, algorithm: OffPolicyActorCritic) -> dict[str, Tensor]:
        """8 transitions, as losses take them."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(2, 8, 5, generator=generator)
        shape = algorithm.action_shape()
        return {
            "obs": drawn[0],
            "next_obs": drawn[1],
            "action": torch.zeros(8, *shape, dtype=torch.float32 if shape else torch.int64),
            "reward": torch.ones(8),
            "discount": torch.full((8,), 0.9),
            "weight": torch.ones(8),
        }

    def changed(self, batch: dict[str, Tensor], columns: slice) -> dict[str, Tensor]:
        """With other numbers in some columns of both observations."""
        other = dict(batch)
        for key in ("obs", "next_obs"):
            other[key] = batch[key].clone()
            other[key][:, columns] *= -2.0
        return other

    def test_an_actor_explores_by_the_observed_part(self, name: str) -> None:
        algorithm = self.make(name)
        rows, state = self.batch(algorithm)["obs"], algorithm.initial_policy_state(8)
        before = algorithm.action_random.state_dict()
        actions = []
        for obs in (rows, rows * torch.tensor([1.0, 1.0, 1.0, 9.0, 9.0])):
            algorithm.action_random.load_state_dict(before)
            actions.append(algorithm.act(obs, state, explore=True).action)
        assert torch.equal(*actions)
        # a trained policy is not even shown the rest
        greedy = algorithm.act(rows, state, explore=False).action
        assert torch.equal(greedy, algorithm.act(rows[:, :3], state, explore=False).action)

    def test_an_actor_learns_from_the_observed_part(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        algorithm = self.make(name)
        by_action = torch.arange(2.0).expand(1, 8, 2)
        monkeypatch.setattr(algorithm, "actor_value", lambda obs, action: action.sum(1))
        monkeypatch.setattr(algorithm, "values", lambda obs: by_action, raising=False)
        batch = self.batch(algorithm)

        loss = loss_of(algorithm, "actor_loss")
        assert loss(self.changed(batch, slice(3, 5))) == loss(batch)
        assert loss(self.changed(batch, slice(0, 3))) != loss(batch)

    def test_critics_learn_from_the_privileged_part(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        algorithm = self.make(name)
        same = torch.zeros(8, algorithm.actor_outputs())
        monkeypatch.setattr(algorithm, "actor_output", lambda obs, network=None: same)
        batch = self.batch(algorithm)

        loss = loss_of(algorithm, "critic_loss")
        assert loss(self.changed(batch, slice(0, 3))) == loss(batch)
        assert loss(self.changed(batch, slice(3, 5))) != loss(batch)
        value = algorithm.value(batch["obs"])
        for columns, is_same in ((slice(0, 3), True), (slice(3, 5), False)):
            other = algorithm.value(self.changed(batch, columns)["obs"])
            assert torch.equal(other, value) is is_same


def test_the_replay_buffer_holds_both_also_of_stacked_frames() -> None:
    env = f"frame_stack:{HIDDEN}"
    algorithm = made("sac", env)
    assert algorithm.replay.frames == 1
    assert algorithm.replay.ring.obs.shape[-1] == algorithm.num_inputs + 2 == 4 * 3 + 2
    assert made("sac", env, asymmetric=False).replay.frames == 4


def test_a_policy_acts_without_the_state_values_with_it_and_resumes(tmp_path: Path) -> None:
    run = sac_run(tmp_path)
    policy = run.policy()
    obs, state = np.zeros((1, 3), np.float32), np.eye(2, dtype=np.float32)
    assert policy.act(obs).shape == (1, 1)
    assert policy.act(obs, deterministic=False).shape == (1, 1)
    first, second = (policy.value(obs, row[None])[0] for row in state)
    assert first != second
    with pytest.raises(UsageError, match="the checkpoint has asymmetric True, this run False"):
        gpurl.resume(run.folder, asymmetric=False)
    assert gpurl.resume(run.folder, total_steps=512, quiet=True).outcome.steps == 512


def test_a_run_from_before_goes_on_without_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings do not name asymmetric, its critics have read what its actor has."""
    monkeypatch.setattr("gpurl.algorithms.sac.SAC.reads_state", lambda self: False)
    sac_run(tmp_path)
    monkeypatch.undo()
    folder = tmp_path / "checkpoints"
    parts, manifest = load_checkpoint(folder)
    del parts["meta"]["settings"]["asymmetric"]
    save_checkpoint(folder, manifest["step"], parts, is_best=True)
    assert gpurl.load(tmp_path).act(np.zeros((1, 3), np.float32)).shape == (1, 1)
    with pytest.raises(UsageError, match="the checkpoint has state_space None"):
        gpurl.resume(tmp_path, total_steps=512, quiet=True)
    resumed = gpurl.resume(tmp_path, total_steps=512, quiet=True, asymmetric=False)
    assert resumed.outcome.steps == 512


def test_a_run_begins_with_critics_that_read_the_same(tmp_path: Path) -> None:
    """Observed and privileged numbers are as many, so the layers are alike."""
    first = sac_run(tmp_path, SHOWN)
    given = first.policy().algorithm
    for asymmetric in (True, False):
        algorithm = made("sac", SHOWN, init_from=str(first.folder), asymmetric=asymmetric)
        for part, is_same in (("actor", True), ("critic", asymmetric)):
            ours, theirs = (getattr(each, part).state_dict() for each in (algorithm, given))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs) is is_same


def test_a_normaliser_that_is_taken_counts_as_what_is_collected_before_the_first_update(
    tmp_path: Path,
) -> None:
    first = sac_run(tmp_path, SHOWN, asymmetric=False, normalize_obs=True)
    changes = {"normalize_obs": True, "learning_starts": 40, "init_from": str(first.folder)}
    normalizer = made("sac", SHOWN, **changes).normalizer
    assert normalizer is not None
    assert float(normalizer.count) == 40.0
    given = first.policy().algorithm.normalizer
    assert given is not None
    assert torch.equal(normalizer.mean[:3], given.mean)
    assert normalizer.mean[3:].tolist() == [0.0] * 3


def test_memory_is_counted_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million transitions of a few observed numbers and a thousand privileged ones."""
    monkeypatch.setattr(HiddenAlternating, "single_state_space", Box(0.0, 1.0, (1000,)))
    monkeypatch.setattr("gpurl.run.memory_need.available_bytes", lambda device: 2 << 30)
    settings = make_settings("sac", HIDDEN, device="cpu", num_envs=8, total_steps=100)
    with pytest.raises(UsageError, match=r"where 2\.0 GiB are free: replay_size must be below"):
        check_memory(settings, torch.device("cpu"))
    without = make_settings("sac", HIDDEN, device="cpu", num_envs=8, asymmetric=False)
    check_memory(without, torch.device("cpu"))
