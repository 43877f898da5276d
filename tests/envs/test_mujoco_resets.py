"""What a reset of a MuJoCo task leaves behind, which is nothing: sensors, delays and sleep begin as
those of a fresh world.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl.envs import make_env
from gpurl.envs.mujoco.base import MujocoEnv
from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from tests.envs.test_contract import assert_same
from tests.envs.test_mujoco import actions_of

mujoco = pytest.importorskip("mujoco")
pytest.importorskip("mujoco_warp")

ARM = """
<mujoco>
  <option timestep="0.01" integrator="{integrator}"><flag sleep="{sleep}"/></option>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body name="arm" pos="0 0 1">
      <joint name="swing" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0.5 0 0" size="0.05" mass="1"/>
      <site name="tip" pos="0.5 0 0"/>
    </body>
    <body name="ball" pos="2 0 0.1"><freejoint/>
      <geom type="sphere" size="0.1" condim="6" friction="1 0.1 0.1"/></body>
  </worldbody>
  <actuator><motor joint="swing" ctrlrange="-2 2" {delay}/></actuator>
  <sensor>
    <jointpos joint="swing"/><jointvel joint="swing"/><accelerometer site="tip"/>
    <framelinvel objtype="site" objname="tip"/>
    <jointpos joint="swing" {delay}/><jointvel joint="swing" {interval}/>
  </sensor>
</mujoco>
"""
PLAIN = ARM.format(integrator="RK4", sleep="disable", delay="", interval="")


class Arm(MujocoEnv):
    """Sees all through its sensors."""

    model_file = PLAIN
    frame_skip = 2
    max_episode_steps = 7
    reset_noise_scale = 0.05

    def observe(self, data: Any) -> Tensor:
        return torch.cat((data.sensordata, data.qacc, data.qfrc_constraint), 1)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return data.sensordata[:, 0] - before.sensordata[:, 0]

    def terminated(self, data: Any) -> Tensor:
        return data.sensordata[:, 0] > 50.0


class DelayedArm(Arm):
    """Its motor and one of its sensors are three steps late, another one is read every other
    step.
    """

    late, seldom = 'delay="0.03" nsample="3"', 'interval="0.02" nsample="2"'
    model_file = ARM.format(integrator="Euler", sleep="disable", delay=late, interval=seldom)
    frame_skip = 1


class SleepingArm(MujocoEnv):
    """The ball beside it lies still before long."""

    model_file = ARM.format(integrator="Euler", sleep="enable", delay="", interval="")
    frame_skip = 4
    max_episode_steps = 14

    def observe(self, data: Any) -> Tensor:
        return torch.cat((data.qpos, data.qvel), 1)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return -data.qpos[:, 0].abs()


class HeldArm(MujocoEnv):
    """A servo holds it at a place from which each episode begins far away."""

    model_file = """
    <mujoco>
      <worldbody><body><joint name="swing" axis="0 1 0" range="-1 1" limited="true"/>
        <geom type="capsule" fromto="0 0 0 0.5 0 0" size="0.05"/></body></worldbody>
      <actuator><position joint="swing" kp="2" ctrlrange="-1 1"/></actuator>
    </mujoco>
    """
    max_episode_steps = 5

    def initial_state(self, rng: Any) -> tuple[Tensor, Tensor]:
        return torch.full((rng.num_envs, 1), 1.5), torch.zeros(rng.num_envs, 1)

    def observe(self, data: Any) -> Tensor:
        return torch.cat((data.qfrc_actuator, data.qfrc_constraint), 1)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return -data.qpos[:, 0].abs()


@pytest.fixture(scope="module", params=["mujoco", "warp"])
def arm(request: pytest.FixtureRequest) -> Any:
    return Arm(4, seed=3, simulator=request.param)


@pytest.fixture(scope="module")
def sleeper() -> Any:
    return SleepingArm(3, seed=9)


def forward_of(env: Any, row: int) -> np.ndarray:
    """What MuJoCo in C sees in the state of a world, by the way of Gymnasium's reset."""
    data = mujoco.MjData(env.model)
    data.qpos[:], data.qvel[:] = (
        env.data.qpos[row].double().numpy(),
        env.data.qvel[row].double().numpy(),
    )
    mujoco.mj_forward(env.model, data)
    return np.concatenate((data.sensordata, data.qacc, data.qfrc_constraint))


def assert_is_forward(env: Any, obs: Tensor, row: int) -> None:
    np.testing.assert_allclose(
        obs[row].double().numpy(), forward_of(env, row), rtol=1e-4, atol=2e-4
    )


def test_forces_after_a_reset_are_those_of_the_new_state() -> None:
    """Of the servo and of the limit of the joint, as after Gymnasium's reset."""
    in_c, in_warp = (HeldArm(2, seed=3, simulator=name) for name in ("mujoco", "warp"))
    (obs, _), (other, _) = in_c.reset(seed=1), in_warp.reset(seed=1)
    assert obs[:, 0].tolist() == [-3.0] * 2  # kp times 1.5
    assert bool((obs[:, 1] < -1.0).all())
    torch.testing.assert_close(other, obs, rtol=1e-3, atol=1e-3)


def test_tasks_that_need_no_forces_restart_by_kinematics() -> None:
    """mujoco-warp's `forward` takes about a step of physics, on a GPU in each step."""
    for name, needs_all in (("half_cheetah", False), ("ant", False), ("humanoid", True)):
        env: Any = make_env(name, 2, simulator="warp")
        assert env._worlds.forward_all == needs_all, name


def test_sensors_after_a_reset_are_those_of_the_new_state(arm: Any) -> None:
    obs, _ = arm.reset(seed=1)
    for row in range(4):
        assert_is_forward(arm, obs, row)
    for action in actions_of(arm, 3):
        arm.step(action)
    again, _ = arm.reset(seed=1)
    assert torch.equal(again, obs)


@pytest.mark.parametrize("looks", [True, False])
def test_sensors_after_an_autoreset_are_those_of_the_new_state_and_other_worlds_go_on(
    arm: Any, looks: bool
) -> None:
    runs = []
    for clocks in (
        [0, 0, 0, 0],
        [0, 4, 0, 0],
    ):  # in the second run world 1 starts anew at the third step
        arm.reset(seed=2)
        arm.stagger(torch.tensor(clocks))
        if looks:
            runs.append([arm.step(action) for action in actions_of(arm, 3)])
            kept = arm.data.sensordata.clone()
        else:
            with no_host_syncs():
                runs.append([arm.step(action) for action in actions_of(arm, 3)])
    plain, restarted = runs[0][-1], runs[1][-1]
    assert restarted.truncated.tolist() == [False, True, False, False]
    assert_is_forward(arm, restarted.obs, 1)
    assert torch.equal(restarted.info["final_obs"], plain.info["final_obs"])
    others = torch.arange(4) != 1
    assert torch.equal(restarted.obs[others], plain.obs[others])
    if looks:
        assert torch.equal(kept[others], plain.obs[others, : kept.shape[1]])


def test_a_world_that_broke_shows_no_nan_and_the_others_go_on(arm: Any) -> None:
    runs = []
    for breaks in (False, True):
        arm.reset(seed=4)
        if breaks:
            arm.data.qvel[2, 0] = float("nan")
        runs.append([arm.step(action) for action in actions_of(arm, 3)])
    assert runs[1][0].info["valid"].tolist() == [True, True, False, True]
    others = torch.arange(4) != 2
    for plain, broken in zip(*runs):
        assert bool(broken.obs.isfinite().all())
        assert torch.equal(broken.obs[others], plain.obs[others])
    assert all(bool(step.info["valid"].all()) for step in runs[1][1:])


@pytest.mark.parametrize("simulator", ["mujoco", "warp"])
def test_delays_begin_anew_and_match_mujoco_in_c(simulator: str) -> None:
    env: Any = DelayedArm(3, seed=5, simulator=simulator)
    runs = []
    for number in range(2):
        obs, _ = env.reset(seed=6)
        runs.append([obs, *(env.step(action) for action in actions_of(env, 5))])
        if number == 0:
            env.reset()  # and a start in between
            env.step(torch.full((3, 1), 2.0))
    assert_same(runs[0], runs[1])
    env.reset(seed=6)
    data = mujoco.MjData(env.model)
    data.qpos[:], data.qvel[:] = (
        env.data.qpos[0].double().numpy(),
        env.data.qvel[0].double().numpy(),
    )
    for action, step in zip(actions_of(env, 5), runs[0][1:]):
        data.ctrl[:] = action[0].double().numpy()
        mujoco.mj_step(env.model, data)
        seen = np.concatenate((data.sensordata, data.qacc, data.qfrc_constraint))
        np.testing.assert_allclose(
            step.info["final_obs"][0].double().numpy(), seen, rtol=1e-3, atol=2e-3
        )


@pytest.mark.parametrize("task", [Arm, DelayedArm, SleepingArm])
def test_sensors_delays_and_sleep_continue_bit_for_bit(
    task: type[MujocoEnv], arm: Any, sleeper: Any
) -> None:
    env: Any = {Arm: arm, SleepingArm: sleeper}.get(task) or task(3)
    env.reset(seed=7)
    env.stagger(torch.arange(env.num_envs))
    actions = [0.1 * action for action in actions_of(env, 16)]
    for action in actions[:7]:
        env.step(action)
    if task is SleepingArm:
        assert bool((env.data.tree_asleep >= 0).any(1).all())
    saved = copy.deepcopy(env.state_dict())
    expected = [env.step(action) for action in actions[7:]]
    other: Any = task(env.num_envs, seed=8, simulator=env.simulator)
    other.load_state_dict(saved)
    assert_same([other.step(action) for action in actions[7:]], expected)
    assert_same(other.state_dict(), env.state_dict())


def test_bodies_that_may_sleep_are_simulated_by_warp(sleeper: Any) -> None:
    assert type(sleeper._worlds).__name__ == "WarpWorlds"
    with pytest.raises(UsageError, match=r"simulator mujoco cannot step SleepingArm: .*sleep"):
        SleepingArm(3, simulator="mujoco")


def test_what_slept_is_awake_after_a_reset(sleeper: Any) -> None:
    actions = actions_of(sleeper, 7)
    sleeper.reset(seed=1)
    first = [sleeper.step(action) for action in actions]
    asleep = sleeper.data.tree_asleep[1:].clone()
    assert bool((asleep >= 0).any(1).all())
    sleeper.reset(options={"reset_mask": torch.tensor([True, False, False])})
    assert bool((sleeper.data.tree_asleep[0] < 0).all())
    assert torch.equal(sleeper.data.tree_asleep[1:], asleep)
    sleeper.reset(seed=1)
    assert_same([sleeper.step(action) for action in actions], first)
