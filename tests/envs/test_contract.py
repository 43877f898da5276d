"""The contract of gpurl.envs.vec_env, for every TorchEnv that the folder holds."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpurl.envs import env_names, make_env, resolve_env
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.two_step_game import TwoStepGame
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom

FIXED_STARTS = {"two_step_game"}  # tasks that draw no random numbers
VARIANTS = [
    ("cart_pole", {"velocities": False}),
    ("chasing", {"discrete": True, "dim": 3}),
    ("chasing", {"bonus": False, "dim": 5}),
]


def torch_env_names() -> list[str]:
    """Names of the torch-native tasks; adapters, whose simulator or task may be missing, are passed
    over.
    """
    names = []
    for name in env_names():
        try:
            if issubclass(resolve_env(name)[0], TorchEnv):
                names.append(name)
        except (ImportError, UsageError):
            continue
    return names


WIDE = {"catch": {"size": 64}}  # a small picture has few first states
CASES = [(name, WIDE.get(name, {})) for name in torch_env_names()] + VARIANTS
every_task, every_random_task = (
    pytest.mark.parametrize(
        ("name", "options"), cases, ids=lambda value: str(value) if value else "plain"
    )
    for cases in (CASES, [case for case in CASES if case[0] not in FIXED_STARTS])
)


def action_source(env: TorchEnv, batch: int = 257, seed: int = 0) -> Callable[[], Tensor]:
    """Random actions [env.num_envs, *action]; row i is the same whatever the number of
    environments, up to `batch`.
    """
    generator, space = torch.Generator().manual_seed(seed), env.single_action_space

    def draw() -> Tensor:
        if isinstance(space, gymnasium.spaces.Discrete):
            return torch.randint(0, int(space.n), (batch,), generator=generator)[
                : env.num_envs
            ].clone()
        if isinstance(space, gymnasium.spaces.MultiDiscrete):
            columns = [torch.randint(0, int(n), (batch,), generator=generator) for n in space.nvec]
            return torch.stack(columns, dim=1)[: env.num_envs].clone()
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        return (torch.rand(batch, *space.shape, generator=generator) * (high - low) + low)[
            : env.num_envs
        ].clone()

    return draw


def play(env: TorchEnv, steps: int, seed: int = 0) -> list[Timestep]:
    draw = action_source(env, seed=seed)
    return [env.step(draw()) for _ in range(steps)]


def assert_same(a: Any, b: Any) -> None:
    """Bit-for-bit equality of nested dicts, tuples and tensors."""
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b):
            assert_same(left, right)
    else:
        assert a == b


def shared(reward: Tensor) -> Tensor:
    """[N] or [N, A] rewards as they count in an episode's return [N]."""
    return reward if reward.dim() == 1 else reward.mean(1)


def rows(step: Timestep, n: int) -> Any:
    """The first n environments of a step."""
    if isinstance(step, Tensor):
        return step[:n]
    if isinstance(step, dict):
        return {key: rows(value, n) for key, value in step.items()}
    return [rows(value, n) for value in step]


def test_the_folder_is_found() -> None:
    known = {
        "acrobot",
        "cart_pole",
        "catch",
        "chasing",
        "mountain_car",
        "mountain_car_continuous",
        "pendulum",
        "two_step_game",
    }
    assert known <= set(torch_env_names())


@every_task
def test_shapes_dtypes_and_spaces(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 9, max_episode_steps=7, **options)
    shape = (9, *env.single_observation_space.shape)
    obs_dtype = torch.uint8 if env.single_observation_space.dtype == "uint8" else torch.float32
    reward_shape = (9,) if env.num_agents == 1 else (9, env.num_agents)
    obs, info = env.reset()
    assert info == {}
    assert env.observation_space.contains(obs.numpy())
    for step in play(env, 30):
        for tensor in (step.obs, step.info["final_obs"]):
            assert (tensor.shape, tensor.dtype, tensor.device) == (shape, obs_dtype, env.device)
            assert tensor.is_contiguous()
            assert env.observation_space.contains(tensor.numpy())
        assert (step.reward.shape, step.reward.dtype, step.reward.device) == (
            reward_shape,
            torch.float32,
            env.device,
        )
        assert bool(step.reward.isfinite().all())
        for flag in (
            step.terminated,
            step.truncated,
            step.info["_final_obs"],
            step.info["_episode"],
            step.info["time_outs"],
        ):
            assert (flag.shape, flag.dtype) == ((9,), torch.bool)
        for key, dtype in (("r", torch.float32), ("l", torch.int64)):
            assert (step.info["episode"][key].shape, step.info["episode"][key].dtype) == (
                (9,),
                dtype,
            )
    assert (
        env.metadata["autoreset_mode"]
        == env.autoreset_mode
        == gymnasium.vector.AutoresetMode.SAME_STEP
    )


@every_task
def test_final_obs_is_the_true_successor_only_where_an_episode_ended(
    name: str, options: dict[str, Any]
) -> None:
    env = make_env(name, 33, max_episode_steps=6, **options)
    env.reset()
    env.stagger(torch.arange(33) % 6)
    ends = 0
    for step in play(env, 20):
        done = step.terminated | step.truncated
        differs = (step.obs != step.info["final_obs"]).flatten(1).any(dim=1)
        assert torch.equal(differs, done)
        assert torch.equal(step.info["_final_obs"], done)
        assert torch.equal(step.info["time_outs"], step.truncated)
        assert not bool((step.terminated & step.truncated).any())
        ends += int(done.sum())
    assert ends > 60


def test_an_end_on_the_last_step_is_a_termination() -> None:
    env = make_env("cart_pole", 2, max_episode_steps=1)
    env.reset()
    env._state["motion"][0, 0] = 2.5
    step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [False, True]


@every_task
def test_statistics_and_time_limit_equal_a_count_by_hand(
    name: str, options: dict[str, Any]
) -> None:
    env = make_env(name, 33, max_episode_steps=9, **options)
    env.reset()
    clock, total = torch.zeros(33, dtype=torch.int64), torch.zeros(33)
    for step in play(env, 40):
        clock, total = clock + 1, total + shared(step.reward)
        assert torch.equal(step.truncated, (clock == 9) & ~step.terminated)
        done = step.terminated | step.truncated
        assert torch.equal(step.info["_episode"], done)
        assert torch.equal(step.info["episode"]["r"], total)
        assert torch.equal(step.info["episode"]["l"], clock)
        clock, total = clock.masked_fill(done, 0), total.masked_fill(done, 0.0)
    assert torch.equal(env.episode_length_buf, clock)


@every_task
def test_staggered_clocks_leave_the_first_cut_episodes_out(
    name: str, options: dict[str, Any]
) -> None:
    env = make_env(name, 8, max_episode_steps=8, **options)
    env.reset()
    env.stagger(torch.arange(8))
    first_end, cut = torch.zeros(8, dtype=torch.bool), torch.arange(8) > 0
    clock = torch.zeros(8, dtype=torch.int64)
    for number, step in enumerate(play(env, 20)):
        clock += 1
        done = step.terminated | step.truncated
        assert torch.equal(step.info["_episode"], done & (first_end | ~cut))
        assert torch.equal(step.info["episode"]["l"], clock)
        if number < 8 and not bool(step.terminated.any()):
            assert step.truncated.tolist() == [index == 7 - number for index in range(8)]
        first_end |= done
        clock.masked_fill_(done, 0)
    assert bool(first_end.all())


@every_task
def test_an_environment_does_not_depend_on_the_batch(name: str, options: dict[str, Any]) -> None:
    batches = []
    for num_envs in (19, 32, 257):
        env = make_env(name, num_envs, seed=5, max_episode_steps=11, **options)
        batches.append([env.reset()[0][:19], *(rows(step, 19) for step in play(env, 60))])
    assert_same(batches[0], batches[1])
    assert_same(batches[0], batches[2])


@every_task
def test_masked_and_indexed_restarts_are_the_same(name: str, options: dict[str, Any]) -> None:
    env, masked = (make_env(name, 33, seed=4, max_episode_steps=11, **options) for _ in range(2))
    env.stagger(torch.arange(33) % 11)
    masked.stagger(torch.arange(33) % 11)
    indexed_run = [env.reset(options={"reset_mask": torch.arange(33) % 2 == 0})[0], *play(env, 40)]
    with no_host_syncs():
        masked_run = [
            masked.reset(options={"reset_mask": torch.arange(33) % 2 == 0})[0],
            *play(masked, 40),
        ]
    torch.testing.assert_close(
        indexed_run, masked_run, rtol=1e-5, atol=1e-5
    )  # normal numbers are C's here and torch's there
    torch.testing.assert_close(env.state_dict(), masked.state_dict(), rtol=1e-5, atol=1e-5)


@every_task
def test_reset_mask_restarts_only_those(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 12, seed=1, **options)
    env.reset()
    before = play(env, 3)[-1].obs.clone()
    clocks = env.episode_length_buf.clone()
    returns = env.state_dict()["clocks"]["return"].clone()
    mask = torch.arange(12) % 3 == 0
    obs, _ = env.reset(options={"reset_mask": mask.numpy()})
    assert torch.equal((obs != before).flatten(1).any(dim=1), mask)
    assert bool((clocks > 0).all())
    assert torch.equal(env.episode_length_buf, torch.where(mask, 0, clocks))
    step = play(env, 1)[0]
    assert torch.equal(
        step.info["episode"]["r"], returns.masked_fill(mask, 0.0) + shared(step.reward)
    )
    assert torch.equal(step.info["episode"]["l"], torch.where(mask, 1, clocks + 1))


@every_task
def test_a_restored_environment_continues_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 17, seed=8, max_episode_steps=13, **options)
    env.reset()
    env.stagger(torch.arange(17) % 13)
    play(env, 6)
    saved = copy.deepcopy(env.state_dict())
    expected = play(env, 30, seed=3)
    other = make_env(name, 17, seed=99, max_episode_steps=13, **options)
    other.reset()
    play(other, 3)
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert_same(play(other, 30, seed=3), expected)
    assert_same(saved, kept)  # the restored environment writes into tensors of its own
    assert_same(other.state_dict(), env.state_dict())


@every_random_task
def test_the_seed_decides(name: str, options: dict[str, Any]) -> None:
    runs = []
    for seed, reset_seed in ((3, None), (3, None), (4, None), (4, 3)):
        env = make_env(name, 17, seed=seed, max_episode_steps=13, **options)
        runs.append([env.reset(seed=reset_seed)[0], *play(env, 30)])
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[3])
    assert not torch.equal(runs[0][0], runs[2][0])
    assert len(runs[0][0].unique(dim=0)) == 17  # no two environments start alike


@every_random_task
def test_two_episodes_start_differently(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 5, max_episode_steps=1, **options)
    starts = [env.reset()[0], env.reset()[0], *(step.obs for step in play(env, 3)), env.reset()[0]]
    assert len(torch.cat(starts).unique(dim=0)) == 30


@every_task
def test_the_functions_are_pure(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 33, **options)
    rng = CounterRandom(0, 33)
    state = env.initial_state(rng)
    draw = action_source(env)
    for _ in range(5):
        action = draw()
        kept = copy.deepcopy((state, action))
        next_state, _, _ = env.transition(state, action, rng)
        env.observe(state)
        assert_same((state, action), kept)
        state = next_state
    assert all(len(value) == 33 for value in state.values())


@every_task
def test_what_a_step_returned_stays_as_it_was(name: str, options: dict[str, Any]) -> None:
    env = make_env(name, 33, max_episode_steps=3, **options)
    env.reset()
    for step in play(env, 4):
        kept = copy.deepcopy(step)
        play(env, 4, seed=1)
        assert_same(step, kept)


@every_task
def test_actions_may_be_a_strided_view(name: str, options: dict[str, Any]) -> None:
    env, peer = (make_env(name, 33, seed=2, **options) for _ in range(2))
    env.reset()
    peer.reset()
    draw = action_source(env)
    for _ in range(5):
        action = draw()
        strided = torch.stack((action, action), dim=-1)[..., 0]
        torch.testing.assert_close(
            peer.step(strided), env.step(action)
        )  # a sum over a strided row may be added up in another order


@every_task
def test_nothing_reads_a_tensor_on_the_host(name: str, options: dict[str, Any]) -> None:
    actions = action_source(make_env(name, 6, **options))()
    with FakeTensorMode() as mode, no_host_syncs():  # a read raises: there are no values
        env = make_env(name, 6, max_episode_steps=2, **options)
        env.reset()
        for _ in range(3):
            step = env.step(mode.from_tensor(actions))
        obs, _ = env.reset(options={"reset_mask": step.truncated})
    assert obs.shape == step.obs.shape == (6, *env.single_observation_space.shape)
    assert env.graph_safe


def test_a_state_of_before_the_first_reset_can_be_loaded() -> None:
    for looks in (nullcontext, no_host_syncs):
        with looks():
            for name in ("pendulum", "frame_stack:pendulum"):
                env, peer = make_env(name, 3, seed=4), make_env(name, 3, seed=5)
                peer.load_state_dict(env.state_dict())
                assert peer.reset(seed=1)[0].equal(env.reset(seed=1)[0])


class Delayed(TorchEnv):
    """Observes the place before the last step; the reward is a tensor of the state."""

    max_episode_steps = 3
    single_observation_space = Box(-1e3, 1e3, (1,), np.float32)
    single_action_space = Discrete(2)

    def initial_state(self, rng: CounterRandom) -> State:
        now = torch.full((rng.num_envs, 1), 100.0)
        return {"now": now, "seen": now, "bonus": rng.uniform()}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        bonus = state["bonus"]
        next_state = {"now": state["now"] + 1.0, "seen": state["now"], "bonus": bonus}
        return next_state, bonus, torch.zeros_like(bonus, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["seen"]


def test_tensors_that_a_task_passes_on_are_not_overwritten() -> None:
    """On a GPU the state stays where it is, and each step writes into it."""
    played = []
    for looks in (nullcontext, no_host_syncs):
        with looks():
            env = Delayed(2)
            env.reset(seed=0)
            steps = [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(5)]
            played.append([(one.obs, one.info["final_obs"], one.reward) for one in steps])
    torch.testing.assert_close(*played, rtol=0, atol=0)
    assert [final[0].item() for _, final, _ in played[1][:3]] == [100.0, 101.0, 102.0]


def test_a_reset_of_no_environment_changes_nothing() -> None:
    """A GPU cannot know whether the mask is empty, so an empty one must cost nothing but time."""
    for looks in (nullcontext, no_host_syncs):
        with looks():
            plain, reset = make_env("chasing", 6, seed=3), make_env("chasing", 6, seed=3)
            action = torch.zeros(6, 2)
            for env in (plain, reset):
                env.reset(seed=3)
            for _ in range(5):
                reset.reset(options={"reset_mask": torch.zeros(6, dtype=torch.bool)})
                assert torch.equal(plain.step(action).obs, reset.step(action).obs)


@pytest.mark.parametrize(
    ("name", "action", "message"),
    [
        ("chasing", torch.zeros(4, 1), r"wanted actions of shape \(4, 2\), got \(4, 1\)"),
        ("chasing", torch.zeros(1, 2), r"wanted actions of shape \(4, 2\), got \(1, 2\)"),
        ("pendulum", torch.zeros(3), r"wanted actions of shape \(4, 1\), got \(3,\)"),
        (
            "chasing",
            torch.zeros(4, 2, dtype=torch.int64),
            r"wanted actions of Box.*, got torch.int64",
        ),
        ("cart_pole", torch.zeros(4), r"wanted actions of Discrete\(2\), got torch.float32"),
        ("cart_pole", torch.tensor([0, 1, 7, 0]), r"wanted actions from 0 to 1, got 0 to 7"),
        ("mountain_car", torch.tensor([0, 1, 2, -1]), r"wanted actions from 0 to 2, got -1 to 2"),
        (
            "two_step_game",
            torch.zeros(4, dtype=torch.int64),
            r"wanted actions of shape \(4, 2\), got \(4,\)",
        ),
        (
            "two_step_game",
            torch.zeros(4, 2),
            r"wanted actions of MultiDiscrete\(\[2 2\]\), got torch.float32",
        ),
        (
            "two_step_game",
            torch.tensor([[0, 1]] * 3 + [[0, 2]]),
            r"wanted actions of MultiDiscrete\(\[2 2\]\), got 0 to 2",
        ),
        (
            "two_step_game",
            torch.tensor([[0, 1]] * 3 + [[-1, 0]]),
            r"wanted actions of MultiDiscrete\(\[2 2\]\), got -1 to 1",
        ),
    ],
)
def test_wrong_actions_are_refused(name: str, action: Tensor, message: str) -> None:
    env = make_env(name, 4)
    with pytest.raises(UsageError, match=r"reset\(\) comes before the first step"):
        env.step(action)
    env.reset()
    with pytest.raises(UsageError, match=message):
        env.step(action)


def test_choices_may_begin_at_another_number() -> None:
    class Later(TwoStepGame):
        single_action_space = gymnasium.spaces.MultiDiscrete([2, 2], start=[1, 3])

    env = Later(2)
    env.reset()
    for action in ([1, 3], [2, 4]):
        assert torch.equal(
            env._checked_action(torch.tensor([action] * 2)), torch.tensor([action] * 2)
        )
    for action in ([0, 3], [2, 5], [1, 2]):
        with pytest.raises(UsageError, match="wanted actions of MultiDiscrete"):
            env._checked_action(torch.tensor([action] * 2))


def test_double_actions_give_the_same_float_step() -> None:
    steps = []
    for dtype in (torch.float32, torch.float64):
        env = make_env("pendulum", 4)
        env.reset(seed=3)
        steps.append(env.step(torch.full((4, 1), 0.5, dtype=dtype)))
    assert torch.equal(steps[0].obs, steps[1].obs)
    assert steps[1].obs.dtype == steps[1].reward.dtype == torch.float32


@pytest.mark.parametrize("num_envs", ["4", 4.0, 0])
def test_a_number_of_environments_that_is_none(num_envs: Any) -> None:
    with pytest.raises(UsageError, match=r"num_envs must be a whole number of at least 1, got"):
        make_env("chasing", num_envs)


def test_one_seed_for_all() -> None:
    with pytest.raises(UsageError, match=r"reset takes one seed, .* got \[1, 2, 3, 4\]"):
        make_env("chasing", 4).reset(seed=[1, 2, 3, 4])  # type: ignore[arg-type]
