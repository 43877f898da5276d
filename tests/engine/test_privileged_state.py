"""Critics that read what only they are shown: values, gradients, checkpoints and policies of an
asymmetric actor-critic.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

import gpurl
from gpurl.algorithms.ppo import PPO
from gpurl.cli.check_env import check_env
from gpurl.engine.privileged_state import AppendPrivilegedState
from gpurl.envs.vec_env import Timestep
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES, AsymmetricActorCritic, NetworkConfig
from gpurl.nn.mlp import Sequential, weights_and_biases
from gpurl.run.settings import make_settings
from gpurl.run.trainer import Trainer
from tests.small_runs import small_run
from tests.tiny_envs import HiddenAlternating

HIDDEN = "tests.tiny_envs:HiddenAlternating"
TRUE_VALUES = [0.9 / 0.19, 1.0 / 0.19]  # in A, in B, with gamma 0.9


def trained(iterations: int, **changes: Any) -> Trainer:
    from gpurl.run.setup import make_trainer

    options: dict[str, Any] = {
        "num_envs": 32,
        "horizon": 6,
        "minibatches": 1,
        "gamma": 0.9,
        "device": "cpu",
        "graph": "off",
    }
    options |= {
        "total_steps": 10**6,
        "learning_rate": 1e-2,
        "schedule": "constant",
        "network": {"hidden": [16]},
    }
    trainer = make_trainer(make_settings("ppo", HIDDEN, **options | changes), torch.device("cpu"))
    trainer.start()
    for _ in range(iterations):
        trainer.iterate()
    return trainer


@pytest.mark.parametrize("memory", ["none", *MEMORIES])
def test_the_critic_finds_the_values_of_a_place_that_the_policy_does_not_see(memory: str) -> None:
    """Episodes are cut off after 3 steps, so the value counts on the state after the last one, and
    not on that of the next episode.
    """
    trainer = trained(120, network={"hidden": [16], "memory": memory, "memory_size": 8})
    rows = torch.cat((torch.zeros(2, 3), torch.eye(2)), dim=1)
    values = trainer.algorithm.value(rows, trainer.algorithm.initial_policy_state(2))
    assert values.tolist() == pytest.approx(TRUE_VALUES, abs=0.08)


def test_without_the_state_the_critic_cannot_tell_them_apart() -> None:
    trainer = trained(2, asymmetric=False)
    assert trainer.env.single_observation_space.shape == (3,)
    assert trainer.algorithm.num_state == 0


@pytest.mark.parametrize("memory", ["none", *MEMORIES])
@pytest.mark.parametrize("hidden", [(), (5, 7)])
def test_actor_and_critic_are_two_networks_on_parts_of_a_row(
    memory: str, hidden: tuple[int, ...]
) -> None:
    """Each gradient is that of its own network, layer by layer."""
    torch.manual_seed(0)
    network = AsymmetricActorCritic(
        NetworkConfig(hidden=hidden, memory=memory, memory_size=4),
        num_inputs=3,
        num_state=2,
        num_outputs=6,
    )
    obs, starts = torch.randn(4, 5, 5), torch.rand(4, 5) < 0.3
    of_output, of_value = torch.randn(20, 6), torch.randn(20)
    state = torch.zeros(5, 0 if network.memory is None else network.memory.state_size)
    inputs = obs if network.memory is None else network.unroll(obs, state, starts)
    output, value = network(inputs.flatten(0, 1))
    names, parameters = zip(*network.named_parameters())
    total = (output * of_output).sum() + (value * of_value).sum()
    found = dict(zip(names, torch.autograd.grad(total, parameters)))

    def plain(x: torch.Tensor, trunk: Sequential) -> torch.Tensor:
        for weight, bias in weights_and_biases(trunk):
            x = torch.tanh(torch.addmm(bias[0, 0], x, weight[0].t()))
        return x

    seen = obs[..., :3]
    if network.memory is not None:
        seen = network.memory.unroll(seen, state, starts)
    acting = plain(seen.flatten(0, 1), network.trunk)
    judging = plain(obs[..., 3:].flatten(0, 1), network.critic_trunk)
    loss = (network.actor(acting)[0] * of_output).sum() + (
        network.critic(judging)[0, :, 0] * of_value
    ).sum()
    for name, expected in zip(names, torch.autograd.grad(loss, parameters)):
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("memory", ["none", *MEMORIES])
def test_a_policy_acts_without_the_state_and_values_with_it(tmp_path: Path, memory: str) -> None:
    run = small_run(tmp_path / "run", 2, env=HIDDEN, network={"hidden": [16], "memory": memory})
    policy = run.policy()
    obs, state = np.zeros((1, 3), np.float32), np.eye(2, dtype=np.float32)
    assert policy.act(obs).shape == (1, 1)
    assert policy.act(obs, deterministic=False).shape == (1, 1)
    policy.reset()
    first, second = (policy.value(obs, row[None])[0] for row in state)
    assert first != second
    with pytest.raises(
        UsageError, match=r"privileged observations: value\(obs, state \[1, 2\]\), got none"
    ):
        policy.value(obs)
    with pytest.raises(UsageError, match=r"got one of shape \(3, 2\)"):
        policy.value(obs, np.zeros((3, 2), np.float32))
    algorithm = policy.algorithm
    assert isinstance(algorithm, PPO)
    greedy = algorithm.act(
        torch.zeros(1, 3), algorithm.initial_policy_state(1), explore=False
    ).action
    beside = algorithm.act(
        torch.ones(1, 5) * torch.tensor([0, 0, 0, 9.0, 9.0]),
        algorithm.initial_policy_state(1),
        explore=False,
    ).action
    assert torch.equal(greedy, beside), "the actor has read the state"


class Wrong(HiddenAlternating):
    """Shows critics something else than it says."""

    def observe_state(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.zeros(self.num_envs, 4)


class Missing(HiddenAlternating):
    """Forgets what critics see after a step."""

    def step(self, actions: torch.Tensor) -> Timestep:
        timestep = super().step(actions)
        del timestep.info["final_state"]
        return timestep


def test_a_state_of_the_wrong_form_is_named() -> None:
    with pytest.raises(
        EnvError,
        match=r"Wrong.reset: info\['state'\]: wanted a tensor of shape \(4, 2\).*got shape \(4, "
        r"4\)",
    ):
        AppendPrivilegedState(Wrong(4)).reset(seed=0)
    env = AppendPrivilegedState(Missing(4))
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"Missing.step: info\['final_state'\]: .*got nothing"):
        env.step(torch.zeros(4, 1))


class NextOne(HiddenAlternating):
    """Shows critics the next episode's state as the last one of an episode, and the reverse
    elsewhere.
    """

    def step(self, actions: torch.Tensor) -> Timestep:
        timestep = super().step(actions)
        timestep.info["final_state"] = 1 - timestep.info["state"]
        return timestep


def test_check_env_looks_at_the_state() -> None:
    assert check_env(HiddenAlternating(4)) == []
    assert any(
        "info['final_state']: wanted state where no episode ended" in problem
        for problem in check_env(NextOne(4))
    )
    assert any(
        "info['state']: wanted a tensor of shape (4, 2)" in problem
        for problem in check_env(Wrong(4))
    )


class Bare(HiddenAlternating):
    """Shows critics the state's own tensor."""

    single_state_space = Box(0.0, 3.0, (1,), np.float32)

    def initial_state(self, rng: Any) -> dict[str, torch.Tensor]:
        return {
            "place": torch.zeros(rng.num_envs, dtype=torch.int64),
            "time": torch.zeros(rng.num_envs, 1),
        }

    def transition(self, state: Any, action: torch.Tensor, rng: Any) -> Any:
        return {"place": 1 - state["place"], "time": state["time"] + 1.0}, *super().transition(
            state, action, rng
        )[1:]

    def observe_state(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["time"]


@pytest.mark.parametrize("looks", [True, False])
def test_what_critics_saw_stays_as_it_was(looks: bool) -> None:
    with nullcontext() if looks else no_host_syncs():
        env = Bare(2)
        shown = [env.reset(seed=0)[1]["state"]]
        steps = [env.step(torch.zeros(2, 1)) for _ in range(4)]
    shown += [step.info["state"] for step in steps]
    assert [state[0].item() for state in shown] == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert [step.info["final_state"][0].item() for step in steps] == [1.0, 2.0, 3.0, 1.0]


def test_pictures_have_no_state_behind_them() -> None:
    env = HiddenAlternating(2)
    env.single_observation_space = Box(0, 255, (4, 4, 3), np.uint8)
    with pytest.raises(
        UsageError, match=r"needs float32 Boxes, HiddenAlternating\.single_observation_space is"
    ):
        AppendPrivilegedState(env)


def test_a_resume_keeps_what_the_critic_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path / "run", 1, env=HIDDEN, eval_episodes=0)
    with pytest.raises(UsageError, match="the checkpoint has asymmetric True, this run False"):
        gpurl.resume(run.folder, asymmetric=False)
    monkeypatch.setattr(
        "tests.tiny_envs.HiddenAlternating.single_state_space", Box(0.0, 1.0, (3,), np.float32)
    )
    monkeypatch.setattr(
        "tests.tiny_envs.HiddenAlternating.observe_state",
        lambda self, state: torch.zeros(self.num_envs, 3),
    )
    with pytest.raises(
        UsageError,
        match=r"the checkpoint has state_space .*'shape': \[2\].*, this run .*'shape': \[3\]",
    ):
        gpurl.resume(run.folder, total_steps=1000)
