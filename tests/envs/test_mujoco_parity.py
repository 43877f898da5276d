"""MuJoCo tasks against Gymnasium's own, step by step: each step begins from our state, so that
rounding does not grow to another motion.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from gpurl.envs import make_env
from gpurl.envs.mujoco.base import MujocoEnv

mujoco = pytest.importorskip("mujoco")
pytest.importorskip("mujoco_warp")

NUM_ENVS, STEPS = 4, 30
POSITIONS = int(mujoco.mjtState.mjSTATE_QPOS) | int(mujoco.mjtState.mjSTATE_QVEL)
# ours: (Gymnasium's, largest difference of observations relative to 1 or to their size, of
# rewards), five times what was seen
TASKS = {
    "ant": ("Ant-v5", 3e-3, 3e-5),
    "half_cheetah": ("HalfCheetah-v5", 5e-4, 2e-5),
    "hopper": ("Hopper-v5", 1e-5, 5e-6),
    "humanoid": ("Humanoid-v5", 2e-3, 5e-4),
    "humanoid_standup": ("HumanoidStandup-v5", 2e-2, 5e-6),
    "inverted_double_pendulum": ("InvertedDoublePendulum-v5", 1e-5, 2e-6),
    "inverted_pendulum": ("InvertedPendulum-v5", 2e-6, 0.0),
    "pusher": ("Pusher-v5", 1e-4, 1e-6),
    "reacher": ("Reacher-v5", 1e-5, 1e-6),
    "swimmer": ("Swimmer-v5", 3e-5, 5e-6),
    "walker2d": ("Walker2d-v5", 3e-4, 5e-5),
}
# where a step is the same in both
OF_WARP: dict[str, dict[str, Any]] = {"ant": {"cone": "elliptic"}}
CHANGED: dict[str, dict[str, Any]] = {
    "ant": {
        **{
            "forward_reward_weight": 2.0,
            "ctrl_cost_weight": 0.1,
            "contact_cost_weight": 0.01,
            "healthy_reward": 0.3,
            "main_body": 2,
        },
        **{
            "terminate_when_unhealthy": False,
            "healthy_z_range": (0.4, 0.7),
            "contact_force_range": (-0.5, 2.0),
            "frame_skip": 5,
        },
        **{
            "exclude_current_positions_from_observation": False,
            "include_cfrc_ext_in_observation": False,
        },
    },
    "hopper": {
        **{
            "forward_reward_weight": 2.0,
            "ctrl_cost_weight": 0.1,
            "healthy_reward": 0.3,
            "healthy_state_range": (-1.5, 1.5),
        },
        **{
            "healthy_z_range": (0.9, 1.3),
            "healthy_angle_range": (-0.1, 0.3),
            "exclude_current_positions_from_observation": False,
        },
    },
    "humanoid": {
        **{
            "forward_reward_weight": 2.0,
            "ctrl_cost_weight": 0.3,
            "contact_cost_weight": 1e-3,
            "contact_cost_range": (0.1, 0.2),
        },
        **{
            "healthy_reward": 0.3,
            "healthy_z_range": (1.3, 1.45),
            "include_cinert_in_observation": False,
        },
        **{"include_cvel_in_observation": False, "include_qfrc_actuator_in_observation": False},
    },
}


class Peers:
    """One of Gymnasium's environments a world."""

    def __init__(self, env: MujocoEnv, task: str, options: dict[str, Any]) -> None:
        self.env, self.all = (
            env,
            [gymnasium.make(task, **options).unwrapped for _ in range(env.num_envs)],
        )
        for peer in self.all:
            peer.model.opt.cone = env.model.opt.cone

    def step(self, actions: torch.Tensor) -> list[Any]:
        """Each from our state; what was derived in its last step stays, as rewards need it."""
        results = []
        for row, peer in enumerate(self.all):
            for name in ("qpos", "qvel", "qacc_warmstart"):
                getattr(peer.data, name)[:] = getattr(self.env.data, name)[row].numpy()
            results.append((peer, actions[row].double().numpy()))
        return results

    def reset(self, row: int) -> np.ndarray:
        """The first observation in our state, as Gymnasium's reset makes it."""
        peer = self.all[row]
        mujoco.mj_resetData(peer.model, peer.data)
        peer.set_state(
            *(getattr(self.env.data, name)[row].double().numpy() for name in ("qpos", "qvel"))
        )
        return peer._get_obs()


def difference(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """The largest, relative to what is above 1."""
    return float((np.abs(ours.double().numpy() - theirs) / np.maximum(1.0, np.abs(theirs))).max())


@pytest.mark.parametrize("simulator", ["mujoco", "warp"])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in TASKS), *CHANGED.items()],
    ids=lambda value: str(value)[:20],
)
def test_steps_rewards_ends_and_resets_are_gymnasiums(
    name: str, options: dict[str, Any], simulator: str
) -> None:
    task, obs_limit, reward_limit = TASKS[name]
    ours = OF_WARP.get(name, {}) if simulator == "warp" else {}
    env: Any = make_env(name, NUM_ENVS, seed=3, simulator=simulator, **ours, **options)
    peers = Peers(env, task, options)
    spec = gymnasium.spec(task)
    assert (env.max_episode_steps, env.reward_threshold) == (
        spec.max_episode_steps,
        spec.reward_threshold,
    )
    assert env.single_observation_space.shape == peers.all[0].observation_space.shape
    assert env.single_action_space == peers.all[0].action_space
    assert env.dt == pytest.approx(peers.all[0].dt)
    obs, _ = env.reset()
    for row in range(NUM_ENVS):
        assert difference(obs[row], peers.reset(row)) < 1e-5
    space = env.action_space
    space.seed(1)
    worst_obs = worst_reward = 0.0
    ends = 0
    for _ in range(STEPS):
        actions = (
            torch.from_numpy(space.sample()) * 1.3
        )  # beyond the limits: MuJoCo cuts what it applies, costs are of what was given
        prepared = peers.step(actions)
        step = env.step(actions)
        assert bool(step.info["valid"].all())
        for row, (peer, action) in enumerate(prepared):
            theirs, reward, terminated, _, _ = peer.step(action)
            worst_obs = max(worst_obs, difference(step.info["final_obs"][row], theirs))
            worst_reward = max(
                worst_reward, abs(float(step.reward[row]) - reward) / max(1.0, abs(reward))
            )
            assert bool(step.terminated[row]) == terminated
            if terminated:
                ends += 1
                assert difference(step.obs[row], peers.reset(row)) < 1e-5
    assert worst_obs <= obs_limit
    assert worst_reward <= reward_limit
    if not options and name in (
        "hopper",
        "walker2d",
        "humanoid",
        "inverted_pendulum",
        "inverted_double_pendulum",
    ):
        assert ends > 0


@pytest.mark.parametrize("name", TASKS)
def test_whole_episodes_on_a_cpu_are_gymnasiums(name: str) -> None:
    """Both begin in one state and then go on by themselves: the same doubles, bit for bit."""
    task = TASKS[name][0]
    env: Any = make_env(name, 3, seed=3)
    peers = Peers(env, task, {})
    row = 1
    peer = peers.all[row]
    obs, _ = env.reset()
    np.testing.assert_allclose(obs[row].numpy(), peers.reset(row), rtol=1e-6, atol=1e-6)
    env.action_space.seed(1)
    for _ in range(200):
        actions = torch.from_numpy(env.action_space.sample())
        step = env.step(actions)
        theirs, reward, terminated, _, _ = peer.step(actions[row].double().numpy())
        shown = step.info["final_obs"][row].numpy()
        np.testing.assert_allclose(shown, theirs.astype(np.float32), rtol=1e-6, atol=3e-7)
        assert float(step.reward[row]) == pytest.approx(reward, rel=6e-6, abs=6e-6)
        assert bool(step.terminated[row]) == terminated
        if terminated or bool(step.truncated[row]):
            np.testing.assert_allclose(
                step.obs[row].numpy(), peers.reset(row), rtol=1e-6, atol=1e-6
            )
        else:
            state = np.empty(mujoco.mj_stateSize(peer.model, POSITIONS))
            mujoco.mj_getState(peer.model, peer.data, state, POSITIONS)
            start = env._worlds._offsets["qpos"][0]
            ours = env._worlds.rows[row, start : start + len(state)].numpy()
            np.testing.assert_array_equal(ours, state)
