"""Other trainers on our environments: what they store is what the environments gave. Libraries that
are not here are skipped.
"""

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.job import Job
from benchmarks.peers.one_run import LOOPS
from gpurl import adapters
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import Info
from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from tests.outward_truth import assert_same, env_of, truth
from tests.tiny_envs import HiddenAlternating, RandomWalk, Walkers

GAMMA = 0.9


def small_job(trainer: str, mode: str = "default") -> Job:
    return Job("chasing", trainer, mode, num_envs=8, horizon=4, iterations=1, warm_up=0)


# rsl_rl


def test_rsl_rl_bootstraps_time_outs_and_staggers_clocks() -> None:
    pytest.importorskip("rsl_rl")
    from rsl_rl.runners import OnPolicyRunner

    from benchmarks.peers.rsl_rl_loop import settings

    job = small_job("rsl_rl")
    inner = env_of("chasing")
    env = adapters.to_rsl_rl(inner)
    runner = OnPolicyRunner(
        env, settings(job) | {"num_steps_per_env": 12}, log_dir=None, device="cpu"
    )
    runner.learn(1)
    stored = runner.alg.storage
    played = truth("chasing", stored.actions.clamp(-1.0, 1.0))
    assert_same(stored.observations["policy"], played["obs"])
    assert_same(stored.dones, played["truncated"])
    gamma = runner.alg.gamma
    assert_same(
        stored.rewards, played["reward"] + gamma * stored.values.squeeze(2) * played["truncated"]
    )
    assert stored.observations["policy"].abs().max() > 1.0
    env.episode_length_buf = torch.tensor([4, 0, 1, 2])
    assert inner.episode_length_buf.tolist() == [4, 0, 1, 2]
    _, _, dones, extras = env.step(torch.zeros(4, 2))
    assert dones.tolist() == extras["time_outs"].long().tolist() == [1, 0, 0, 0]


def test_rsl_rls_critic_sees_the_state() -> None:
    pytest.importorskip("rsl_rl")
    env = adapters.to_rsl_rl(HiddenAlternating(2))
    assert env.get_observations()["critic"].tolist() == [[1.0, 0.0]] * 2
    groups, _, _, extras = env.step(torch.zeros(2, 1))
    assert groups["critic"].tolist() == extras["final_obs"]["critic"].tolist() == [[0.0, 1.0]] * 2
    assert groups["policy"].shape == (2, 3)
    # random network distillation scales its reward by the time of a step
    assert env.unwrapped.step_dt == 1.0
    env.env.control_step = 0.02
    assert env.unwrapped.step_dt == 0.02
    with pytest.raises(UsageError, match="draws actions from Gaussians"):
        adapters.to_rsl_rl(env_of("cart_pole"))


def test_rsl_rls_writers_note_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rsl_rl")
    from rsl_rl.utils import wandb_log_writer as module

    noted: dict[str, Any] = {}
    stand_in = SimpleNamespace(config=SimpleNamespace(update=noted.update))
    monkeypatch.setattr(module, "wandb", stand_in)
    env = adapters.to_rsl_rl(RandomWalk(3))
    module.WandbLogWriter.store_config(None, env.cfg, {})
    expected = {"name": "RandomWalk", "num_envs": 3, "max_episode_steps": 7}
    assert noted["env_cfg"] == env.cfg == expected


# skrl


def skrl_agent(env: Any, horizon: int, has_final_obs: bool) -> Any:
    from skrl.agents.torch.ppo import PPO
    from skrl.memories.torch import RandomMemory

    from benchmarks.peers.skrl_loop import skrl_models
    from gpurl.adapters.skrl import with_final_obs

    quiet = {"experiment": {"write_interval": 0, "checkpoint_interval": 0}}
    return (with_final_obs(PPO) if has_final_obs else PPO)(
        models=skrl_models(env.env, small_job("skrl")),
        memory=RandomMemory(memory_size=horizon, num_envs=env.num_envs, device=env.device),
        observation_space=env.observation_space,
        action_space=env.action_space,
        device=env.device,
        cfg={
            "rollouts": horizon + 1,
            "discount_factor": GAMMA,
            "time_limit_bootstrap": True,
            **quiet,
        },  # it plays and does not learn yet
    )


@pytest.mark.parametrize("has_final_obs", [True, False])
def test_skrl_bootstraps_from_the_true_successor_where_its_agent_takes_it(
    has_final_obs: bool,
) -> None:
    pytest.importorskip("skrl")
    from skrl.trainers.torch import SequentialTrainer

    env = adapters.to_skrl(env_of("chasing"))
    agent = skrl_agent(env, 12, has_final_obs)
    limits = {
        "timesteps": 12,
        "headless": True,
        "disable_progressbar": True,
        "close_environment_at_exit": False,
    }
    SequentialTrainer(env=env, agents=agent, cfg=limits).train()
    stored = {
        key: agent.memory.get_tensor_by_name(key)
        for key in ("observations", "actions", "rewards", "truncated", "terminated")
    }
    played = truth("chasing", stored["actions"].clamp(-1.0, 1.0))
    assert_same(stored["observations"], played["obs"])
    assert_same(stored["truncated"], played["truncated"])
    assert not stored["terminated"].any()
    successor = played["final_obs" if has_final_obs else "next_obs"].flatten(0, 1)
    with torch.no_grad():
        value, _ = agent.value.act({"observations": successor}, role="value")
    assert_same(
        stored["rewards"], played["reward"] + GAMMA * value.view(12, 4) * played["truncated"]
    )


def test_skrl_takes_discrete_actions_states_and_one_environment() -> None:
    pytest.importorskip("skrl")
    env = adapters.to_skrl(env_of("cart_pole"))
    env.reset()
    obs, reward, terminated, _, _ = env.step(torch.ones(4, 1, dtype=torch.int64))
    assert_same(obs, truth("cart_pole", torch.ones(1, 4, dtype=torch.int64))["next_obs"][0])
    assert reward.shape == terminated.shape == (4, 1)
    hidden = adapters.to_skrl(HiddenAlternating(2))
    hidden.reset()
    hidden.step(torch.zeros(2, 1))
    assert hidden.state().tolist() == [[0.0, 1.0]] * 2
    assert hidden.state_space == HiddenAlternating.single_state_space
    one = adapters.to_skrl(make_env("chasing", 1, max_episode_steps=1))
    one.reset()
    successor = one.step(torch.zeros(1, 2))[0]
    again, _ = one.reset()
    played = make_env("chasing", 1, max_episode_steps=1)
    played.reset()
    step = played.step(torch.zeros(1, 2))
    assert_same(successor, step.info["final_obs"])
    assert_same(again, step.obs)


# TorchRL


@pytest.mark.parametrize("name", ["chasing", "cart_pole"])
def test_torchrl_stores_the_true_successor(name: str) -> None:
    pytest.importorskip("torchrl")
    env = adapters.to_torchrl(env_of(name))
    torch.manual_seed(0)
    data = env.rollout(14, break_when_any_done=False).transpose(0, 1)
    played = truth(name, data["action"])
    assert_same(data["observation"], played["obs"])
    assert_same(data["next", "observation"], played["final_obs"])
    for key in ("reward", "terminated", "truncated"):
        assert_same(data["next", key], played[key])
    assert_same(data["next", "done"], played["terminated"] | played["truncated"])
    assert played["truncated"].any()


def test_torchrl_accepts_our_specs_and_seeds() -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs.utils import check_env_specs

    for env in (env_of("chasing"), env_of("cart_pole"), HiddenAlternating(3), Walkers(3)):
        check_env_specs(adapters.to_torchrl(env), break_when_any_done="both")
    env = adapters.to_torchrl(env_of("chasing"))
    starts = []
    for _ in range(2):
        env.set_seed(9)
        starts.append(env.reset()["observation"])
    assert torch.equal(*starts)
    assert torch.equal(starts[0], env_of("chasing").reset(seed=9)[0])
    assert adapters.to_torchrl(HiddenAlternating(2)).reset()["state"].tolist() == [[1.0, 0.0]] * 2


def test_torchrl_resets_some_environments_at_any_time() -> None:
    pytest.importorskip("torchrl")
    env = adapters.to_torchrl(env_of("chasing"))
    start = env.reset()
    mask = torch.tensor([[True], [False], [True], [False]])
    again = env.reset(start.clone().set("_reset", mask))
    assert (again["observation"] != start["observation"]).any(1).tolist() == mask.squeeze(
        1
    ).tolist()


def test_torchrl_resets_those_that_would_at_the_next_step() -> None:
    pytest.importorskip("torchrl")
    late = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=6)] * 2)
    cart_pole = GymnasiumCpu(2, env=late)
    assert cart_pole.autoreset_mode == AutoresetMode.NEXT_STEP
    data = adapters.to_torchrl(cart_pole).rollout(18, break_when_any_done=False)
    assert data["next", "reward"].unique().tolist() == [1.0]  # no step that is none
    assert data["next", "truncated"].sum() == 6
    after = data["observation"][:, 6::6]
    assert after.abs().max() <= 0.05 < data["next", "observation"][:, 5::6].abs().max()


def test_torchrls_ppo_learns_from_them() -> None:
    pytest.importorskip("torchrl")
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(0)
    env = adapters.to_torchrl(env_of("chasing"))
    network = TensorDictModule(
        nn.Sequential(nn.Linear(8, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]
    )
    actor = ProbabilisticActor(
        network,
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(8, 1))
    loss, advantage = ClipPPOLoss(actor, critic), GAE(gamma=GAMMA, lmbda=0.0, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 0.01)
    before = network.module[0].weight.clone()
    for batch in Collector(env, actor, frames_per_batch=48, total_frames=96):
        with torch.no_grad():
            advantage(batch)
        expected = (
            batch["next", "reward"]
            + GAMMA * critic(batch["next"].clone())["state_value"] * ~batch["next", "terminated"]
        )
        torch.testing.assert_close(batch["value_target"], expected.detach())
        losses = loss(batch)
        sum(losses[key] for key in ("loss_objective", "loss_critic")).backward()
        optimizer.step()
    assert (network.module[0].weight != before).any()


# rl_games


@pytest.mark.parametrize("name", ["chasing", "cart_pole"])
def test_rl_games_bootstraps_time_outs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("rl_games")
    from rl_games.common import vecenv
    from rl_games.common.algo_observer import AlgoObserver
    from rl_games.torch_runner import Runner

    from benchmarks.peers.rl_games_loop import settings

    kept: dict[str, Any] = {}

    class Keep(AlgoObserver):
        def after_init(self, algo: Any) -> None:
            kept["algo"] = algo

        def after_steps(self) -> None:
            kept.setdefault(
                "stored",
                {
                    key: value.clone()
                    for key, value in kept["algo"].experience_buffer.tensor_dict.items()
                },
            )

    adapters.to_rl_games(env_of(name), name)
    job = Job("chasing", "rl_games", mode="eager", num_envs=4, horizon=14)

    def configured() -> Any:  # anew: a runner changes its configuration
        params = settings(job, str(tmp_path))
        params["config"] |= {"env_name": name, "max_epochs": 2, "minibatch_size": 28}
        params["config"] |= {"device_name": "cpu", "player": {"games_num": 2}}
        if name == "cart_pole":
            params |= {"algo": {"name": "a2c_discrete"}, "model": {"name": "discrete_a2c"}}
            params["network"]["space"] = {"discrete": None}
        return params

    params = configured()
    runner = Runner(Keep())
    runner.load_config(params)
    runner.run({"train": True})
    stored = kept["stored"]
    played = truth(
        name, stored["actions"] if name == "cart_pole" else stored["actions"].clamp(-1.0, 1.0)
    )
    assert_same(stored["obses"], played["obs"])
    gamma = params["config"]["gamma"]
    assert_same(
        stored["rewards"],
        played["reward"] + gamma * stored["values"].squeeze(2) * played["truncated"],
    )
    assert_same(stored["dones"][1:], (played["terminated"] | played["truncated"])[:-1])
    assert played["truncated"].any()
    # and playing
    runner = Runner()
    runner.load_config(configured())
    runner.run({"train": False, "play": True})
    with pytest.raises(UsageError, match="num_actors in rl_games' configuration is 5, but"):
        vecenv.create_vec_env(name, 5)


def test_rl_games_keeps_the_environments_state() -> None:
    pytest.importorskip("rl_games")
    env = adapters.to_rl_games(HiddenAlternating(2), "hidden")
    assert env.get_env_info()["state_space"] == HiddenAlternating.single_state_space
    assert env.reset()["states"].tolist() == [[1.0, 0.0]] * 2
    state = copy.deepcopy(env.get_env_state())
    assert env.step(torch.zeros(2, 1))[0]["states"].tolist() == [[0.0, 1.0]] * 2
    env.set_env_state(state)
    env.set_env_state(None)
    assert env.step(torch.zeros(2, 1))[0]["states"].tolist() == [[0.0, 1.0]] * 2
    with pytest.raises(UsageError, match="rl_games takes one agent with actions of one axis"):
        adapters.to_rl_games(Walkers(2))


class Harder(RandomWalk):
    """With a curriculum."""

    level = 0

    def curriculum_state(self) -> Info:
        return {"level": self.level}

    def load_curriculum_state(self, state: Info) -> None:
        self.level = state["level"]


def test_rl_games_goes_on_with_any_number_of_environments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("rl_games")
    trained = Harder(3)
    trained.level = 5
    env = adapters.to_rl_games(trained, "trained")
    env.reset()
    state = copy.deepcopy(env.get_env_state())
    for num_envs, lines in ((3, 0), (2, 1)):
        other = Harder(num_envs)
        played = adapters.to_rl_games(other, "played")
        played.set_env_state(state)
        assert other.level == 5
        assert played.reset()["obs"].shape == (num_envs, 3)
        assert len(caplog.records) == lines
    assert "the state of 3 environments is left out, as there are 2 now" in caplog.text


class Unlimited(RandomWalk):
    single_action_space = Box(
        np.array([-np.inf, -3.0], np.float32), np.array([np.inf, np.inf], np.float32)
    )


def test_rl_games_gets_limits_where_a_box_has_none() -> None:
    """It scales clipped actions to the limits: infinite ones would make them NaN."""
    pytest.importorskip("rl_games")
    env = adapters.to_rl_games(Unlimited(2), "unlimited")
    limits = Box(np.array([-1.0, -3.0], np.float32), np.array([1.0, 1.0], np.float32))
    assert env.action_space == env.get_env_info()["action_space"] == limits
    assert env.observation_space == Unlimited.single_observation_space


# all that keep tensors


class Recorded(RandomWalk):
    """Remembers the step it took, and has something to log."""

    def step(self, actions: Tensor) -> Any:
        self.last = super().step(actions)
        self.last.info["log"] = {"speed": torch.tensor(3.0)}
        return self.last


@pytest.mark.parametrize("name", ["rsl_rl", "skrl", "torchrl", "rl_games"])
def test_observations_are_not_copied_and_rewards_are_the_librarys_own(name: str) -> None:
    pytest.importorskip(name)
    inner: TorchEnv = Recorded(3)
    env = getattr(adapters, f"to_{name}")(inner)
    start, action = env.get_observations() if name == "rsl_rl" else env.reset(), torch.zeros(3, 2)
    if name == "torchrl":
        step = env.step(start.set("action", action))
        obs, reward, expected = (
            step["next", "observation"],
            step["next", "reward"],
            inner.last.info["final_obs"],
        )
    else:
        obs, reward, *_, infos = env.step(action)
        obs, expected = (
            obs if isinstance(obs, Tensor) else obs["policy" if name == "rsl_rl" else "obs"],
            inner.last.obs,
        )
        log = infos["log" if name == "rsl_rl" else "episode"]
        assert log == inner.last.info["log"]
        assert name == "skrl" or log is not inner.last.info["log"]  # the others write into it
    assert obs.data_ptr() == expected.data_ptr()
    assert (
        name == "rsl_rl" or reward.data_ptr() != inner.last.reward.data_ptr()
    )  # rsl_rl copies before it adds


class NoLooks(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(
            func.tags
        ), f"looks at a tensor: {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rsl_rl", "skrl", "torchrl", "rl_games"])
def test_no_step_looks_at_a_tensor(name: str) -> None:
    pytest.importorskip(name)
    with no_host_syncs():
        env = getattr(adapters, f"to_{name}")(RandomWalk(3))
        start, action = (
            env.get_observations() if name == "rsl_rl" else env.reset(),
            torch.zeros(3, 2),
        )
        with NoLooks():
            for _ in range(2):
                env._step(start.set("action", action)) if name == "torchrl" else env.step(action)


@pytest.mark.parametrize("trainer", ["rsl_rl", "sb3", "skrl", "rl_games"])
def test_the_loops_of_the_comparison_train_on_them(trainer: str) -> None:
    pytest.importorskip({"sb3": "stable_baselines3"}.get(trainer, trainer))
    job = small_job(trainer, "eager" if trainer == "rl_games" else "default")
    outcome = importlib.import_module(f"benchmarks.peers.{LOOPS[trainer]}").tensor_task(job)
    assert len(outcome.marks) == 2
    assert -1.0 < outcome.score < 1.0
