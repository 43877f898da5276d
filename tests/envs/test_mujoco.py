"""What all MuJoCo tasks owe to their base: tasks of one's own, options, resets, graphs,
resuming.
"""

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl.cli.check_env import check_env
from gpurl.envs import make_env, resolve_env
from gpurl.envs.mujoco.base import MujocoEnv
from gpurl.envs.registry import env_options, option_types
from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.run.settings import make_settings
from tests.engine.test_graphs import assert_equal, make_trainer, results
from tests.engines import graph_level
from tests.envs.test_contract import assert_same, rows

mujoco = pytest.importorskip("mujoco")
pytest.importorskip("mujoco_warp")

SLIDER = """
<mujoco>
  <option timestep="0.02"/>
  <worldbody>
    <body name="block">
      <joint name="slide" type="slide" axis="1 0 0" damping="0.5"/>
      <geom type="box" size="0.1 0.1 0.1" mass="1"/>
      <site name="middle"/>
    </body>
  </worldbody>
  <actuator><motor joint="slide" ctrlrange="-2 2"/></actuator>
</mujoco>
"""


class Slider(MujocoEnv):
    """A block on a rail goes to the middle; it ends when the block is 2 m away."""

    model_file = SLIDER
    frame_skip = 2
    max_episode_steps = 50
    reset_noise_scale = 0.5

    def observe(self, data: Any) -> Tensor:
        return torch.cat((data.qpos, data.qvel), 1)

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return before.site_xpos[:, 0, 0].abs() - data.site_xpos[:, 0, 0].abs()

    def terminated(self, data: Any) -> Tensor:
        return data.qpos[:, 0].abs() > 2.0


class Falling(Slider):
    """Shows the field itself, and every reset of it draws other numbers."""

    def observe(self, data: Any) -> Tensor:
        return data.qpos


def actions_of(env: Any, steps: int, batch: int = 16, scale: float = 1.0) -> list[Tensor]:
    """Random actions [N, A]; row i is the same whatever the number of environments, up to
    `batch`.
    """
    generator = torch.Generator().manual_seed(5)
    low, high = (
        torch.as_tensor(limit)
        for limit in (env.single_action_space.low, env.single_action_space.high)
    )
    draws = [torch.rand(batch, *low.shape, generator=generator) for _ in range(steps)]
    return [(scale * (draw * (high - low) + low))[: env.num_envs].clone() for draw in draws]


@pytest.fixture(scope="module", params=["mujoco", "warp"])
def ant(request: pytest.FixtureRequest) -> Any:
    return make_env("ant", 6, seed=4, simulator=request.param)


@pytest.fixture(scope="module", params=["mujoco", "warp"])
def hopper(request: pytest.FixtureRequest) -> Any:
    """Falls soon."""
    return make_env("hopper", 6, seed=4, simulator=request.param)


# ---- a task of one's own ----


def test_a_task_of_ones_own_is_a_model_and_three_functions() -> None:
    env: Any = Slider(4, seed=1)
    assert env.single_observation_space.shape == (2,)
    assert env.single_action_space.low == -2.0
    assert env.dt == pytest.approx(0.04)
    obs, _ = env.reset()
    assert bool((obs.abs() <= 0.5).all())
    place, speed = obs.double().unbind(1)
    # site_xpos is what the last step of physics began with; after a reset it is that of the new
    # state
    shown = place
    for action in actions_of(env, 20):
        before = shown
        for _ in range(2):  # Euler, damping taken implicitly: (m + dt b) dv = dt (f - b v)
            shown = place
            speed = speed + 0.02 * (action[:, 0] - 0.5 * speed) / (1.0 + 0.02 * 0.5)
            place = place + 0.02 * speed
        step = env.step(action)
        torch.testing.assert_close(
            step.info["final_obs"][:, 0].double(), place, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            step.info["final_obs"][:, 1].double(), speed, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            step.reward.double(), before.abs() - shown.abs(), rtol=1e-4, atol=1e-5
        )


def test_a_task_of_ones_own_keeps_the_contract() -> None:
    assert check_env(Slider(4), steps=60) == []


def test_an_observation_that_is_a_field_is_copied() -> None:
    env: Any = Falling(3)
    obs, _ = env.reset()
    kept = obs.clone()
    step = env.step(torch.full((3, 1), 2.0))
    assert torch.equal(obs, kept)
    assert not torch.equal(step.obs, kept)


# ---- options ----


def test_options_of_the_base_and_of_the_task_are_known(tmp_path: Any) -> None:
    env_class, _ = resolve_env("ant")
    assert {
        "cone",
        "graph",
        "njmax",
        "max_episode_steps",
        "healthy_z_range",
        "reset_noise_scale",
    } <= set(env_options(env_class))
    assert option_types(env_class)["healthy_z_range"] == tuple[float, float]
    settings = make_settings("ppo", "ant", env_options={"healthy_z_range": [0.3, 0.9], "njmax": 30})
    assert settings.env_options == {"healthy_z_range": (0.3, 0.9), "njmax": 30}
    assert settings.to_dict()["env_options"]["healthy_z_range"] == [0.3, 0.9]
    with pytest.raises(UsageError, match="did you mean healthy_z_range"):
        make_settings("ppo", "ant", env_options={"healthy_z": 1})
    with pytest.raises(UsageError, match="njmax is 'many'; it must be int or None"):
        make_settings("ppo", "ant", env_options={"njmax": "many"})


class Priced(Slider):
    """Declares an option in its body and takes another in its constructor."""

    push_cost: float = 0.25

    def __init__(self, num_envs: int, *, goal: float = 0.0, **options: Any) -> None:
        super().__init__(num_envs, **options)
        self.goal = goal


def test_what_a_class_annotates_and_sets_is_an_option() -> None:
    assert [Priced(1).push_cost, Priced(1, push_cost=0.5).push_cost] == [0.25, 0.5]
    assert (Slider(1).frame_skip, Slider(1, frame_skip=None).frame_skip) == (2, 2)
    defaults = {name: option.default for name, option in env_options(Priced).items()}
    assert (defaults["push_cost"], defaults["goal"], defaults["frame_skip"]) == (0.25, 0.0, 2)
    assert "reset_noise_scale" not in defaults  # set, but not annotated
    assert "model_file" not in defaults
    assert option_types(Priced)["push_cost"] is float
    with pytest.raises(
        UsageError, match="'Priced' has no option push_cots; did you mean push_cost"
    ):
        Priced(1, push_cots=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cone": "round"}, "cone must be one of pyramidal, elliptic"),
        ({"frame_skip": 0}, "frame_skip must be at least 1, got 0"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_env("inverted_pendulum", 2, **options)


# ---- resets ----


@pytest.mark.parametrize(
    ("name", "positions", "speeds", "is_normal"),
    [
        ("ant", 0.1, 0.1, True),
        ("half_cheetah", 0.1, 0.1, True),
        ("inverted_double_pendulum", 0.1, 0.1, True),
        ("humanoid", 0.01, 0.01, False),
        ("hopper", 0.005, 0.005, False),
    ],
)
def test_first_states_are_the_models_and_noise(
    name: str, positions: float, speeds: float, is_normal: bool
) -> None:
    env: Any = make_env(name, 1)
    qpos, qvel = env.initial_state(CounterRandom(0, 2000))
    noise = (qpos - torch.as_tensor(env.model.qpos0, dtype=torch.float32)).flatten()
    assert float(noise.abs().max()) == pytest.approx(positions, rel=0.01)
    assert float(noise.std()) == pytest.approx(positions / 3**0.5, rel=0.03)
    assert float(qvel.std()) == pytest.approx(speeds if is_normal else speeds / 3**0.5, rel=0.03)
    assert (float(qvel.abs().max()) > 3.0 * speeds) == is_normal


def test_targets_and_cylinders_lie_where_gymnasium_puts_them() -> None:
    reacher: Any = make_env("reacher", 1)
    target = reacher.initial_state(CounterRandom(0, 4000))[0][:, 2:]
    assert float(target.norm(dim=1).max()) <= 0.2
    assert float((target.norm(dim=1) < 0.1).float().mean()) == pytest.approx(
        0.25, abs=0.03
    )  # a quarter of the disc
    pusher: Any = make_env("pusher", 1)
    qpos, qvel = pusher.initial_state(CounterRandom(0, 4000))
    x, y = qpos[:, -4], qpos[:, -3]
    assert bool((torch.stack((x, y), 1).norm(dim=1) > 0.17).all())
    assert bool(((x >= -0.3) & (x <= 0.0) & (y.abs() <= 0.2)).all())
    # left of -0.17 all is allowed: 0.13 * 0.4 of 0.12 - pi * 0.17**2 / 2
    assert float((x < -0.17).float().mean()) == pytest.approx(
        0.052 / (0.12 - np.pi * 0.17**2 / 2), abs=0.03
    )
    assert not bool(qvel[:, -4:].any() | qpos[:, -2:].any())


def test_a_masked_reset_leaves_the_others_alone(ant: Any) -> None:
    """Bit for bit, what RK4 leaves in xpos included: it belongs to the last stage, and the next
    reward begins with it.
    """
    ant.reset(seed=2)
    actions = actions_of(ant, 6)
    for action in actions[:5]:
        obs = ant.step(action).obs
    state = copy.deepcopy(ant.state_dict())
    kept = {
        name: getattr(ant.data, name).clone()
        for name in ("qpos", "qvel", "xpos", "cfrc_ext", "qacc_warmstart", "time", "ctrl")
    }
    expected = ant.step(actions[5])
    for looks in (True, False):
        ant.load_state_dict(copy.deepcopy(state))
        mask = torch.tensor([True, False, False, True, False, False])
        if looks:
            after, _ = ant.reset(options={"reset_mask": mask.numpy()})
        else:
            with no_host_syncs():
                after, _ = ant.reset(options={"reset_mask": mask})
        for name, value in kept.items():
            assert torch.equal(getattr(ant.data, name)[~mask], value[~mask]), name
        assert torch.equal(after[~mask], obs[~mask])
        assert not bool(
            ant.data.qacc_warmstart[mask].any()
            | ant.data.cfrc_ext[mask].any()
            | ant.data.time[mask].any()
        )
        assert ant.episode_length_buf.tolist() == [0, 5, 5, 0, 5, 5]
        step = ant.step(actions[5])
        assert torch.equal(step.reward[~mask], expected.reward[~mask])
        assert torch.equal(step.obs[~mask], expected.obs[~mask])
        assert not torch.equal(step.obs[mask], expected.obs[mask])


def test_the_time_limit_keeps_the_true_successor(hopper: Any) -> None:
    env: Any = make_env("half_cheetah", 3, max_episode_steps=4)
    env.reset()
    env.stagger(torch.tensor([0, 1, 2]))
    for number, action in enumerate(actions_of(env, 4)):
        step = env.step(action)
        done = torch.tensor([number == 3, number == 2, number == 1])
        assert torch.equal(step.truncated, done)
        assert not bool(step.terminated.any())
        assert torch.equal((step.obs != step.info["final_obs"]).any(1), done)
        assert torch.equal(step.info["_episode"], done & torch.tensor([True, False, False]))


def test_masked_and_looked_at_steps_are_the_same(hopper: Any) -> None:
    """A GPU restarts by selection in every step, a CPU only where somebody does."""
    runs = []
    for looks in (True, False):
        hopper.reset(seed=9)
        if looks:
            runs.append([hopper.step(action) for action in actions_of(hopper, 40)])
        else:
            with no_host_syncs():
                runs.append([hopper.step(action) for action in actions_of(hopper, 40)])
    assert sum(int(step.terminated.sum()) for step in runs[0]) > 3
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-5)


# ---- what must be the same ----


def test_a_captured_step_is_the_step_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ant: Any = make_env("ant", 6, simulator="warp")
    eager: Any = make_env("ant", 6, graph=False)
    runs = []
    for env in (ant, eager):
        obs, _ = env.reset(seed=7)
        actions = actions_of(env, 6)
        begun = [env.step(action) for action in actions[:3]]
        restarted, _ = env.reset(options={"reset_mask": torch.arange(6) < 3})
        runs.append([obs, *begun, restarted, *(env.step(action) for action in actions[3:])])
    assert ant._worlds.is_captured
    assert not eager._worlds.is_captured
    assert_same(runs[0], runs[1])
    broken: Any = make_env("ant", 6, simulator="warp")

    def refuse(function: Any) -> None:
        raise RuntimeError("no memory pool")

    monkeypatch.setattr(broken._worlds, "_capture", refuse)
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        obs, _ = broken.reset(seed=7)
        assert_same([obs, broken.step(actions_of(broken, 1)[0])], runs[0][:2])
    assert [record.message for record in caplog.records] == [
        "MuJoCo's steps are not captured in a graph, which is slower: no memory pool"
    ]


def test_an_environment_does_not_depend_on_the_batch(hopper: Any) -> None:
    runs = []
    for num_envs in (6, 16):
        env: Any = hopper
        if num_envs != 6:
            env = make_env("hopper", num_envs, simulator=hopper.simulator)
        obs, _ = env.reset(seed=5)
        runs.append([obs[:6], *(rows(step[:4], 6) for step in map(env.step, actions_of(env, 25)))])
    assert_same(runs[0], runs[1])


def test_a_restored_environment_continues_bit_for_bit(ant: Any) -> None:
    other: Any = make_env("ant", 6, seed=99, simulator=ant.simulator)
    ant.reset(seed=8)
    ant.stagger(torch.arange(6))
    actions = actions_of(ant, 16)
    for action in actions[:6]:
        ant.step(action)
    saved = copy.deepcopy(ant.state_dict())
    kept = copy.deepcopy(saved)
    expected = [ant.step(action) for action in actions[6:]]
    other.load_state_dict(saved)  # before its first reset, as a resumed run does
    assert_same([other.step(action) for action in actions[6:]], expected)
    assert_same(saved, kept)
    assert_same(other.state_dict(), ant.state_dict())


def test_the_contract_by_its_own_check(ant: Any) -> None:
    assert check_env("inverted_pendulum", steps=32) == []
    assert check_env(ant, steps=20) == []


def test_a_state_goes_over_to_the_other_simulator() -> None:
    """As exactly as float32 holds it; then each simulates by itself."""
    envs: list[Any] = [
        make_env("ant", 3, simulator=name, cone="elliptic") for name in ("mujoco", "warp")
    ]
    for source, target in (envs, envs[::-1]):
        source.reset(seed=1)
        for action in actions_of(source, 3, scale=0.1):
            source.step(action)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        assert torch.equal(target.data.qpos, source.data.qpos)
        assert torch.equal(target.episode_length_buf, source.episode_length_buf)
        action = actions_of(source, 1, scale=0.1)[0]
        expected, step = source.step(action), target.step(action)
        torch.testing.assert_close(step.obs[:, :27], expected.obs[:, :27], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    runs = []
    for count in (1, threads):
        torch.set_num_threads(count)
        env: Any = make_env("half_cheetah", 7, seed=2, simulator="mujoco")
        obs, _ = env.reset()
        runs.append([obs, *(env.step(action) for action in actions_of(env, 12))])
    torch.set_num_threads(1)
    assert_same(runs[0], runs[1])


def test_the_simulator_follows_device_and_options(caplog: pytest.LogCaptureFixture) -> None:
    def chosen(**options: Any) -> str:
        env: Any = make_env("inverted_pendulum", 2, **options)
        return type(env._worlds).__name__

    assert chosen() == chosen(simulator="mujoco") == "CWorlds"
    assert chosen(njmax=8) == chosen(simulator="warp") == "WarpWorlds"
    with pytest.raises(UsageError, match="njmax is an option of simulator warp; this is mujoco"):
        chosen(simulator="mujoco", njmax=8)
    with pytest.raises(UsageError, match="simulator must be one of auto, mujoco, warp, got 'c'"):
        chosen(simulator="c")
    with pytest.raises(UsageError, match=r"simulator mujoco cannot step .* on a CPU, not on meta"):
        chosen(simulator="mujoco", device="meta")


def test_both_simulators_show_fields_of_the_same_shape() -> None:
    shown = {}
    for simulator in ("mujoco", "warp"):
        env: Any = make_env("humanoid", 2, simulator=simulator)
        names = env._worlds._names() if simulator == "mujoco" else env._worlds.arrays
        shown[simulator] = {
            name: (tuple(field.shape), field.dtype)
            for name in names
            if (field := getattr(env.data, name)).numel()
        }
    common = shown["mujoco"].keys() & shown["warp"].keys()
    assert {"qpos", "xmat", "cinert", "cfrc_ext", "qfrc_actuator"} <= common
    assert {name: shown["mujoco"][name] for name in common} == {
        name: shown["warp"][name] for name in common
    }


def test_a_field_that_is_first_read_between_steps_shows_the_present_state() -> None:
    env: Any = make_env("hopper", 3, simulator="mujoco")
    env.reset(seed=3)
    for action in actions_of(env, 5):
        env.step(action)
    before = copy.deepcopy(env.state_dict())
    centre = env.data.subtree_com[:, 1].clone()
    data = mujoco.MjData(env.model)
    for row in range(3):
        data.qpos[:], data.qvel[:] = env.data.qpos[row].numpy(), env.data.qvel[row].numpy()
        mujoco.mj_forward(env.model, data)
        np.testing.assert_allclose(centre[row].numpy(), data.subtree_com[1], rtol=1e-5)
    after = env.state_dict()["fields"]
    assert_same({name: after[name] for name in before["fields"]}, before["fields"])


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_physics_is_stepped_between_graphs_of_the_policy(algorithm: str) -> None:
    with no_host_syncs():
        expected = results(make_trainer("inverted_pendulum", "off", algorithm))
        trainer = make_trainer("inverted_pendulum", "policy", algorithm)
        assert_equal(results(trainer), expected)
    assert graph_level(trainer.engine) == "policy"


def test_a_file_of_the_same_name_in_the_working_directory_is_no_model_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would go on with other physics from another directory."""
    (tmp_path / "ant.xml").write_text(SLIDER)
    monkeypatch.chdir(tmp_path)
    ant: Any = make_env("ant", 1)
    assert ant.model.nq == 15
    # an option is a path first
    assert Slider(1, xml_file="ant.xml").model.nq == 1


class Hardening(Slider):
    """Rewards and ends that follow the training and the clock."""

    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        return (1.0 + self.training_progress) * torch.ones_like(data.qpos[:, 0])

    def terminated(self, data: Any) -> Tensor:
        return self.episode_length_buf >= 2


def test_a_task_may_read_the_progress_and_its_clocks() -> None:
    env = Hardening(3)
    env.training_progress.fill_(0.5)
    env.reset(seed=0)
    steps = [env.step(torch.zeros(3, env.model.nu)) for _ in range(3)]
    assert [one.reward.tolist() for one in steps] == [[1.5] * 3] * 3
    assert [bool(one.terminated.all()) for one in steps] == [False, False, True]
