"""Vector environments in torch behind the tensor contract: compared with walks in plain numbers, in
every way of resetting.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode
from torch._subclasses.fake_tensor import FakeTensorMode

import gpurl
from gpurl.cli.check_env import check_env
from gpurl.engine.statistics import EpisodeStatistics, to_host
from gpurl.envs import make_env
from gpurl.envs._torch_spaces import make_groups, make_torch_decoder, torch_arrays
from gpurl.envs._torch_tasks import parse_overrides
from gpurl.envs.numpy.spaces import make_encoder, stack_rows
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.torch_vector import TorchVector
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.backend import no_host_syncs
from tests.small_runs import small_settings
from tests.torch_walks import (
    LENGTH,
    PickWalks,
    Walked,
    WalkVector,
    act,
    assert_some_can_restart,
    assert_true_transitions,
)

MODES = list(AutoresetMode)
CPU = torch.device("cpu")


@pytest.fixture
def _mjlab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_mjlab"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mjlab"]:
        del sys.modules[name]


@pytest.fixture
def _mani_skill(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_mani_skill"))
    yield
    gymnasium.registry.pop("Pick-v1", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mani_skill"]:
        del sys.modules[name]


def pick(**options: Any) -> TorchVector:
    return make_env("torch_vector:tests.torch_walks:Walks/Pick-v1", 4, **options)


def mjlab(overrides: str = "") -> TorchVector:
    return make_env("torch_vector:mjlab.tasks:Mjlab-Walks", 4, overrides=overrides)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_true_transitions(mode: AutoresetMode) -> None:
    env = TorchVector(4, env=WalkVector(4, mode))
    assert env.autoreset_mode == (
        AutoresetMode.NEXT_STEP if mode == AutoresetMode.NEXT_STEP else AutoresetMode.SAME_STEP
    )
    assert_true_transitions(env)
    assert_true_transitions(env, seed=8)
    assert_some_can_restart(env)


def test_a_step_that_only_resets_says_so() -> None:
    env = TorchVector(4, env=WalkVector(4, AutoresetMode.NEXT_STEP))
    obs, _ = env.reset(seed=3)
    ended = torch.zeros(4, dtype=torch.bool)
    for _ in range(20):
        obs, reward, terminated, truncated, info = env.step(act(obs))
        assert torch.equal(info["valid"], ~ended)
        assert not reward[ended].any()
        assert not (terminated | truncated)[ended].any()
        assert not obs[ended, 1].any()
        ended = terminated | truncated


@pytest.mark.parametrize("mode", MODES)
def test_the_contract_holds_in_every_mode(mode: AutoresetMode) -> None:
    assert check_env(Walked(4, mode=mode.value), steps=24) == []


@pytest.mark.usefixtures("_mani_skill")
@pytest.mark.parametrize("overrides", ["", "obs_mode=state", "auto_reset=false"])
def test_a_mani_skill_task_by_its_name(overrides: str, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> TorchVector:
        return make_env("torch_vector:mani_skill.envs:Pick-v1", 4, overrides=overrides)

    env = make()
    assert env.max_episode_steps == LENGTH
    assert env.single_observation_space.shape == (2,)
    assert_true_transitions(env)
    assert_some_can_restart(env)
    assert not caplog.text
    assert check_env(make(), steps=24) == []


@pytest.mark.usefixtures("_mani_skill")
def test_metrics_of_mani_skill_count_where_episodes_end() -> None:
    env = make_env("torch_vector:mani_skill.envs:Pick-v1", 4)
    statistics = EpisodeStatistics(4, CPU)
    obs, _ = env.reset(seed=3)
    successes, lengths = [], []
    for _ in range(6 * LENGTH):
        timestep = env.step(act(obs))
        obs = timestep.obs
        statistics.add(timestep)
        done = timestep.terminated | timestep.truncated
        successes += timestep.terminated[done].tolist()
        lengths += timestep.info["episode"]["l"][done].tolist()
    logged = statistics.read(to_host(statistics.metrics()), 6 * LENGTH * 4)
    assert 0 < sum(successes) < len(successes)
    assert logged["env/success_once_at_end"] == pytest.approx(sum(successes) / len(successes))
    assert logged["env/episode_len_at_end"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.usefixtures("_mani_skill")
def test_a_mani_skill_task_can_go_on_after_a_success() -> None:
    env = make_env("torch_vector:mani_skill.envs:Pick-v1", 4, overrides="ignore_terminations=true")
    obs, _ = env.reset(seed=3)
    for step in range(1, 2 * LENGTH + 1):
        timestep = env.step(act(obs))
        obs = timestep.obs
        assert not timestep.terminated.any()
        assert timestep.truncated.tolist() == [step % LENGTH == 0] * 4


@pytest.mark.usefixtures("_mjlab")
def test_an_mjlab_task_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    env = mjlab()
    assert env.max_episode_steps == LENGTH
    assert env.single_state_space is not None
    assert not caplog.text
    assert_true_transitions(env, exact=False)
    assert caplog.text.count("the observation before the last step replaces") == 1
    assert_some_can_restart(env)
    assert check_env(mjlab(), steps=24) == []


@pytest.mark.usefixtures("_mjlab")
def test_an_mjlab_task_has_the_groups_that_it_is_registered_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "torch_vector:mjlab.tasks:Mjlab-Walks-Depth"
    env: Any = make_env(name, 4)
    obs, info = env.reset()
    place = obs[:, 0]
    for space, rows, own in (
        (env.single_observation_space, obs, "actor"),
        (env.single_state_space, info["state"], "critic"),
    ):
        parts = space.split(rows)
        assert set(parts) == {own, "camera"}
        assert torch.equal(parts["camera"], place.view(4, 1, 1, 1).expand(4, 1, 2, 2))
    assert not caplog.text
    # whoever names groups has these, and one of a task without more has a plain row
    env = make_env(name, 4, obs_groups="actor")
    assert env.single_observation_space == Box(-np.inf, np.inf, (2,), np.float32)
    assert not isinstance(mjlab().single_observation_space, GroupedBox)


@pytest.mark.usefixtures("_mjlab")
def test_what_stands_in_is_not_what_was_given_out() -> None:
    env = mjlab()
    obs, _ = env.reset()
    ends = 0
    for _ in range(2 * LENGTH):
        before = obs.clone()
        obs.zero_()  # by whoever was given it
        step = env.step(torch.zeros(env.num_envs, 1))
        ends += int(step.truncated.sum())
        assert torch.equal(step.info["final_obs"][step.truncated], before[step.truncated])
        obs = step.obs
    assert ends > 0


@pytest.mark.usefixtures("_mjlab")
def test_mjlab_without_its_own_resets_shows_the_true_last_observations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = mjlab("auto_reset=false")
    assert not caplog.text
    assert_true_transitions(env)
    assert check_env(mjlab("auto_reset=false"), steps=24) == []


@pytest.mark.usefixtures("_mjlab")
def test_time_outs_of_a_finite_horizon_are_terminations() -> None:
    env = mjlab("is_finite_horizon=true")
    env.reset(seed=3)
    endings = 0
    for _ in range(3 * LENGTH):
        timestep = env.step(torch.zeros(4, 1))
        assert not timestep.truncated.any()
        endings += int(timestep.terminated.sum())
    assert endings == 12


@pytest.mark.usefixtures("_mjlab")
def test_the_simulators_log_is_passed_on_once() -> None:
    env = mjlab()
    env.reset(seed=3)
    for step in range(1, 11):
        log = env.step(torch.zeros(4, 1)).info.get("log")
        assert (log is None) == (step % LENGTH != 0)
    assert log is not None
    starts = [
        (5 * number + 3 * 1 + 3) % 11 - 5 for number in range(4)
    ]  # of the second episodes, in tenths; with no action they stay there
    assert float(log["Metrics/place"]) == pytest.approx(sum(starts) / 40.0)


class Logging(WalkVector):
    """Steps with the log terms that it is given."""

    terms: Iterator[dict[str, Any]]

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self.buffers[0], {}

    def step(self, actions: Any) -> Any:
        return *self.buffers, {"final_obs": self.buffers[0], "log": next(self.terms)}


def test_log_terms_count_where_the_simulator_wrote_them() -> None:
    """Anew in one tensor, or equal numbers in a new dict; the same dict again is no news."""

    def terms() -> Iterator[dict[str, Any]]:
        height = torch.zeros(3)
        for place in range(3):
            yield {"height": height.fill_(place)}
        for is_solved in (True, True, False, True):
            yield {"success": is_solved}
        kept = {"height": torch.ones(3), "success": False}
        yield kept
        yield kept
        yield dict(kept, success=True)

    inner = Logging(3, AutoresetMode.SAME_STEP)
    inner.terms = terms()
    env = TorchVector(3, env=inner)
    env.reset(seed=1)
    logs = [env.step(torch.zeros(3, 1)).info.get("log") for _ in range(10)]
    assert [sorted(log or {}) for log in logs] == [
        *[["height"]] * 3,
        *[["success"]] * 4,
        ["height", "success"],
        [],
        ["height", "success"],
    ]


def test_clocks_of_the_simulator_are_staggered() -> None:
    env = pick()
    env.reset(seed=3)
    env.stagger(torch.tensor([0, 1, 2, 4]))
    for step in range(1, LENGTH + 1):
        timestep = env.step(torch.zeros(4, 1))
        assert timestep.truncated.tolist() == [
            step == LENGTH,
            step == LENGTH - 1,
            step == LENGTH - 2,
            step == 1,
        ]
        assert timestep.info["_episode"].tolist() == [step == LENGTH, False, False, False]
    hidden = Walked(4)
    assert hidden.max_episode_steps == LENGTH
    hidden.reset()
    hidden.stagger(torch.tensor([0, 1, 2, 4]))
    assert not hidden.episode_length_buf.any()


def test_staggered_episodes_stand_with_those_that_have_one_length() -> None:
    env = pick(overrides="obs_mode=state")
    obs, _ = env.reset(seed=3)
    returns: list[float] = []
    for _ in range(4 * LENGTH):
        obs, _, _, _, info = env.step(act(obs))
        returns += info["episode"]["r"][info["_episode"]].tolist()
        assert torch.equal(
            info["episode"]["l"].masked_fill(info["_episode"], 0), env.episode_length_buf
        )
    assert len(returns) >= 12


def test_what_is_missing_in_info_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    vector = WalkVector(2, AutoresetMode.SAME_STEP)
    step = vector.step
    vector.step = lambda actions: (*step(actions)[:4], {})  # type: ignore[method-assign]
    vector.spec = gymnasium.spec("Walks/Pick-v1")
    env = TorchVector(2, env=vector)
    assert env.max_episode_steps == LENGTH
    with caplog.at_level(logging.WARNING):
        assert_true_transitions(env, exact=False)
    assert caplog.text.count("returns no final_obs") == 1
    caplog.clear()
    gives = TorchVector(1, env=PickWalks(1, obs_mode="state"))
    gives.max_episode_steps = LENGTH
    gives.reset()
    keys = [gives.step(torch.zeros(1, 1)).info["_final_obs"].item() for _ in range(LENGTH + 2)]
    assert (keys[LENGTH - 1], keys[LENGTH], caplog.text) == (True, False, "")


def test_spaces_are_flattened_as_in_numpy() -> None:
    space = Dict(
        {
            "b": Tuple((Discrete(3, start=1), Box(-1.0, 1.0, (2, 2)))),
            "a": Dict({"choices": MultiDiscrete([2, 4]), "bits": MultiBinary(3)}),
            "number": Box(0.0, 9.0, ()),
        }
    )
    space.seed(5)
    batch = stack_rows(space, [space.sample() for _ in range(6)])
    in_torch = torch.utils._pytree.tree_map(torch.as_tensor, batch)
    encoder = make_encoder(space)
    groups = make_groups(space, torch_arrays(CPU, False))
    assert groups.policy.space == encoder.space
    np.testing.assert_array_equal(groups.policy.encode(in_torch).numpy(), encoder.encode(batch))


def test_groups_are_shared_out_between_policy_and_critic() -> None:
    one, image = Box(-1.0, 1.0, (1,)), Box(0, 255, (4, 4, 3), np.uint8)
    arrays = torch_arrays(CPU, False)
    batch = {
        name: torch.full((2, 1), float(index))
        for index, name in enumerate(("critic", "depth", "policy", "privileged", "touch"))
    }
    for names, seen, critic in (
        (("critic", "depth", "policy"), [2.0], [0.0]),
        (("policy", "privileged"), [2.0], [3.0]),
        (("depth", "privileged", "touch"), [1.0, 4.0], [3.0]),
        (("depth", "touch"), [1.0, 4.0], None),
    ):
        groups = make_groups(Dict({name: one for name in names}), arrays)
        assert groups.policy.encode(batch)[0].tolist() == seen
        assert (
            None if groups.critic is None else groups.critic.encode(batch)[0].tolist()
        ) == critic
    pixels = make_groups(Dict({"policy": image}), arrays).policy
    assert pixels.encode({"policy": torch.ones(2, 4, 4, 3, dtype=torch.uint8)}).dtype == torch.uint8
    assert pixels.space == image


class Rich(WalkVector):
    """The walks beside a depth, a camera and what only the critic is to see."""

    single_observation_space = Dict(
        {
            "policy": Box(-np.inf, np.inf, (2,), np.float32),
            "depth": Box(0.0, np.inf, (3,), np.float32),
            "camera": Box(0, 255, (4, 4, 3), np.uint8),
            "critic": Box(-np.inf, np.inf, (1,), np.float32),
        }
    )

    def __init__(self) -> None:
        super().__init__(2, AutoresetMode.DISABLED)

    def reset(self, **options: Any) -> Any:
        rows, info = super().reset(**options)
        numbers = torch.arange(6.0).view(2, 3)
        camera = torch.arange(96, dtype=torch.uint8).view(2, 4, 4, 3)
        return {"policy": rows, "depth": numbers, "camera": camera, "critic": rows[:, :1]}, info


def test_groups_that_nobody_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        env = TorchVector(2, env=Rich())
    assert env.single_observation_space.shape == (2,)
    assert caplog.text.count("Rich observes camera, depth too, which neither policy nor cr") == 1
    assert "--env.obs-groups" in caplog.text
    caplog.clear()
    TorchVector(2, env=Rich(), obs_groups="policy")  # whoever names groups leaves out others
    assert not caplog.text


def test_an_option_names_the_groups() -> None:
    rich = Rich()
    env = TorchVector(2, env=rich, obs_groups="policy depth camera", state_groups="critic depth")
    obs, info = env.reset(seed=1)
    batch, _ = rich.reset(seed=1)
    space, state_space = env.single_observation_space, env.single_state_space
    assert isinstance(space, GroupedBox)
    assert isinstance(state_space, GroupedBox)
    for names, rows, groups in (
        ({"policy", "depth", "camera"}, obs, space),
        ({"critic", "depth"}, info["state"], state_space),
    ):
        parts = groups.split(rows)
        assert set(parts) == names
        for name, part in parts.items():
            assert torch.equal(part, batch[name]), name
    env = TorchVector(2, env=Rich(), obs_groups="camera")
    assert env.single_observation_space == Box(0, 255, (4, 4, 3), np.uint8)
    with pytest.raises(UsageError, match="no group 'dept': did you mean depth"):
        TorchVector(2, env=Rich(), obs_groups="policy dept")
    with pytest.raises(UsageError, match="no groups to choose depth from, it is Box"):
        TorchVector(2, env=WalkVector(2, AutoresetMode.DISABLED), state_groups="depth")


def test_names_of_managers_are_those_of_the_group_that_is_read() -> None:
    rich = Rich()
    rich.observation_manager = SimpleNamespace(
        active_terms={"policy": ["speed", "height"], "critic": ["load"]},
        group_obs_term_dim={"policy": [(1,), (1,)], "critic": [(2,)]},
    )
    assert TorchVector(2, env=rich).known_names()[0] == ["speed", "height"]
    assert TorchVector(2, env=rich, obs_groups="critic").known_names()[0] == ["load 0", "load 1"]
    # a group that managers do not know, and several
    assert TorchVector(2, env=rich, obs_groups="depth").known_names()[0] is None
    assert TorchVector(2, env=rich, obs_groups="policy depth").known_names()[0] is None


def test_actions_in_the_units_of_the_simulator() -> None:
    unlimited = Box(-np.inf, np.inf, (2,), np.float32)
    space, decode = make_torch_decoder(unlimited, CPU, None)
    given = torch.tensor([[3.0, -300.0]])
    assert space == unlimited
    assert decode(given).tolist() == given.tolist()
    assert decode(given).data_ptr() != given.data_ptr()
    space, decode = make_torch_decoder(unlimited, CPU, 2.0)
    assert space == Box(-2.0, 2.0, (2,), np.float32)
    assert decode(given).tolist() == [[2.0, -2.0]]
    space, decode = make_torch_decoder(MultiDiscrete([3, 2], start=[1, 0]), CPU, None)
    assert decode(torch.tensor([[0, 1]])).tolist() == [[1, 1]]
    space, decode = make_torch_decoder(Discrete(3, start=-1), CPU, None)
    assert (space, decode(torch.tensor([2, 0])).tolist()) == (Discrete(3), [1, -1])
    with pytest.raises(UsageError, match="action_limit is for actions of a Box"):
        make_torch_decoder(Discrete(2), CPU, 1.0)
    with pytest.raises(UsageError, match="action_limit must be above 0, got -1"):
        make_torch_decoder(unlimited, CPU, -1.0)


def test_overrides_are_words() -> None:
    assert parse_overrides("a.b=1.5 c=true 'd=two words' e='[1, 2]'") == {
        "a.b": 1.5,
        "c": True,
        "d": "two words",
        "e": [1, 2],
    }
    with pytest.raises(UsageError, match="NAME=VALUE words"):
        parse_overrides("a.b 3")


class Still(WalkVector):
    """Nothing moves, and nothing of it is looked at by the host."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self.buffers[0], {}

    def step(self, actions: Any) -> Any:
        return *self.buffers, {"final_obs": self.buffers[0], "log": {"speed": actions.mean()}}


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_the_adapter_never_looks_at_a_tensor(mode: AutoresetMode) -> None:
    with FakeTensorMode(), no_host_syncs():
        env = TorchVector(3, env=Still(3, mode), action_limit=0.5)
        env.reset(seed=1)
        for _ in range(2):
            assert env.step(torch.zeros(3, 1)).info["final_obs"].shape == (3, 2)


class NoPartialReset(WalkVector):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)


def test_misuse_and_misbehaviour_are_named() -> None:
    with pytest.raises(UsageError, match="needs either a task"):
        TorchVector(2)
    with pytest.raises(UsageError, match="num_envs is 3, but WalkVector has 2"):
        TorchVector(3, env=WalkVector(2, AutoresetMode.SAME_STEP))
    with pytest.raises(UsageError, match="did you mean Walks/Pick-v1"):
        make_env("torch_vector:tests.torch_walks:Walks/Pikc-v1", 2)
    with pytest.raises(UsageError, match=r"cannot be made: TypeError: .*unheard_of"):
        pick(overrides="unheard_of=1")
    with pytest.raises(UsageError, match="metadata\\['autoreset_mode'\\] to "):
        TorchVector(2, env=WalkVector(2, "SameStep"))  # type: ignore[arg-type]
    with pytest.raises(EnvError, match="wanted a tensor, got an ndarray; gymnasium_cpu takes"):
        make_env("torch_vector:CartPole-v1", 2).reset()
    silent = WalkVector(2, AutoresetMode.SAME_STEP)
    env = TorchVector(2, env=silent)
    env.reset()
    silent.step = lambda actions: (*silent.buffers, None)  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=r"WalkVector.step: wanted a dict as info, got nothing"):
        env.step(torch.zeros(2, 1))
    silent.reset = lambda **words: (silent.buffers[0], None)  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=r"WalkVector.reset: wanted a dict as info, got nothing"):
        env.reset()
    env = TorchVector(4, env=NoPartialReset(4, AutoresetMode.DISABLED))
    env.reset(seed=3)
    with pytest.raises(EnvError, match="cannot reset some environments only"):
        assert_true_transitions(env)
    broken = PickWalks(2)
    broken.observe = lambda: {"agent": {}}  # type: ignore[method-assign]
    with pytest.raises(
        EnvError, match=r"PickWalks.reset: wanted an observation of Dict.*, got \{'agent': \{\}\}"
    ):
        TorchVector(2, env=broken).reset()
    with pytest.raises(EnvError, match="wanted a tensor on cuda:0, got one on cpu; --env"):
        torch_arrays(torch.device("cuda", 0), False).cast(torch.zeros(2), np.float32)


@pytest.mark.usefixtures("_mjlab")
def test_the_task_must_be_one_of_mjlabs() -> None:
    with pytest.raises(
        UsageError, match="mjlab has no task 'Mjlab-Walsk'; did you mean Mjlab-Walks"
    ):
        make_env("torch_vector:mjlab.tasks:Mjlab-Walsk", 2)
    with pytest.raises(
        UsageError,
        match="the configuration of Mjlab-Walks has no decimatoin: there is no 'decimatoin' among "
        "decimation",
    ):
        mjlab("decimatoin=3")
    with pytest.raises(
        UsageError, match="auto_reset is the bool True, it cannot be set to 'maybe'"
    ):
        mjlab("auto_reset=maybe")


@pytest.mark.usefixtures("_mjlab")
@pytest.mark.parametrize("env", ["tests.torch_walks:Walks/Pick-v1", "mjlab.tasks:Mjlab-Walks"])
def test_ppo_trains_on_it(env: str, tmp_path: Path) -> None:
    sizes = {"num_envs": 4, "total_steps": 64, "eval_episodes": 2, "horizon": 8}
    run = gpurl.train(
        "ppo",
        f"torch_vector:{env}",
        run_dir=str(tmp_path / "run"),
        quiet=True,
        **(small_settings("ppo") | sizes),
    )
    assert run.outcome.reason == "total_steps"
    assert run.outcome.evaluation["eval/episodes"] == 2
    assert 1.0 <= run.outcome.evaluation["eval/mean_ep_length"] <= LENGTH
