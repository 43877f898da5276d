"""A zoo of environments that each break the contract in one way, and the sentence with which the
checker must name it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Space, Tuple
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpurl.api import train
from gpurl.cli.check_env import advice, check_env
from gpurl.envs import env_names, make_env, resolve_env
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EnvError, UsageError
from gpurl.guards.contract import check_reset, check_step
from gpurl.kernels.random import CounterRandom
from tests.tiny_envs import RandomWalk, Walkers


def built_in() -> list[str]:
    """The torch tasks of the package."""
    names = []
    for name in env_names():
        try:
            names += [name] if issubclass(resolve_env(name)[0], TorchEnv) else []
        except (ImportError, UsageError):  # an adapter whose simulator is not here
            continue
    return names


@pytest.mark.parametrize(
    "name",
    [
        *built_in(),
        "tests.tiny_envs:AlternatingEnv",
        "tests.tiny_envs:RandomWalk",
        "tests.tiny_envs:Walkers",
    ],
)
def test_good_environments_pass(name: str) -> None:
    assert check_env(name, steps=24) == []


def test_there_are_built_in_environments_to_try() -> None:
    assert {"chasing", "cart_pole", "pendulum"} <= set(built_in())


# ---- mutants of what step returns ----

LIMITED = Box(-50.0, 50.0, (3,), np.float32)
Change = Callable[[Timestep], Any]


def with_info(timestep: Timestep, **entries: Any) -> Timestep:
    return timestep._replace(info={**timestep.info, **entries})


def without(timestep: Timestep, key: str) -> Timestep:
    return timestep._replace(
        info={name: value for name, value in timestep.info.items() if name != key}
    )


def spoiled(tensor: Tensor, value: float) -> Tensor:
    """A copy with `value` in environment 3."""
    tensor = tensor.clone()
    tensor[3] = value
    return tensor


OBS, NUMBERS, FLAGS = (
    f"wanted a tensor of shape {form}, on cpu, got "
    for form in ("(8, 3), torch.float32", "(8,), torch.float32", "(8,), torch.bool")
)
STEP_MUTANTS: dict[str, tuple[Change, str]] = {
    "reward in float64": (
        lambda t: t._replace(reward=t.reward.double()),
        f"reward: {NUMBERS}torch.float64",
    ),
    "reward as a column": (
        lambda t: t._replace(reward=t.reward.unsqueeze(1)),
        f"reward: {NUMBERS}shape (8, 1)",
    ),
    "reward as a list": (
        lambda t: t._replace(reward=t.reward.tolist()),
        f"reward: {NUMBERS}a list",
    ),
    "float flags": (
        lambda t: t._replace(terminated=t.terminated.float()),
        f"terminated: {FLAGS}torch.float32",
    ),
    "integer time-outs": (
        lambda t: t._replace(truncated=t.truncated.long()),
        f"truncated: {FLAGS}torch.int64",
    ),
    "obs in float64": (lambda t: t._replace(obs=t.obs.double()), f"obs: {OBS}torch.float64"),
    "obs of half the batch": (lambda t: t._replace(obs=t.obs[:4]), f"obs: {OBS}shape (4, 3)"),
    "another device": (lambda t: t._replace(obs=t.obs.to("meta")), f"obs: {OBS}a tensor on meta"),
    "no final_obs": (lambda t: without(t, "final_obs"), f"info['final_obs']: {OBS}nothing"),
    "valid as numbers": (
        lambda t: with_info(t, valid=t.reward),
        f"info['valid']: {FLAGS}torch.float32",
    ),
    "a plain tuple": (tuple, "wanted a gpurl.envs.vec_env.Timestep, got a tuple"),
    "both flags": (
        lambda t: t._replace(terminated=t.terminated | t.truncated),
        "truncated: wanted False where terminated, got both",
    ),
    "NaN": (
        lambda t: t._replace(obs=spoiled(t.obs, float("nan"))),
        "obs: wanted finite numbers, got NaN or infinity in environments [3]",
    ),
    "infinite reward": (
        lambda t: t._replace(reward=spoiled(t.reward, float("inf"))),
        "reward: wanted finite numbers",
    ),
    "outside the space": (
        lambda t: t._replace(obs=spoiled(t.obs, 99.0)),
        f"obs: wanted it inside {LIMITED}, got [99.0",
    ),
    "gradient": (
        lambda t: t._replace(obs=t.obs.clone().requires_grad_()),
        "obs: wanted a tensor without gradient",
    ),
    "another final_obs": (
        lambda t: with_info(t, final_obs=t.info["final_obs"] + 1.0),
        "info['final_obs']: wanted obs where no episode ended, got another in environments [0, ",
    ),
    "no done mask": (
        lambda t: without(t, "_final_obs"),
        "info['_final_obs']: wanted terminated | truncated, got None",
    ),
    "stale done mask": (
        lambda t: with_info(t, _final_obs=torch.zeros(8, dtype=torch.bool)),
        "info['_final_obs']: wanted terminated | truncated, got torch.bool",
    ),
    "time_outs that say done": (
        lambda t: with_info(t, time_outs=t.terminated | t.truncated),
        "info['time_outs']: wanted truncated",
    ),
    "short statistics": (
        lambda t: with_info(t, episode={"r": t.reward[:3], "l": t.reward}),
        "info['episode']['r']: wanted a tensor of shape (8,), torch.float32 or ",
    ),
}


class Bounded(RandomWalk):
    """A random walk whose space has limits."""

    single_observation_space = LIMITED


def findings(env: VecEnv, expected: str) -> None:
    """Assert that `expected` stands in a finding."""
    problems = check_env(env, steps=24)
    assert any(expected in problem for problem in problems), f"{expected!r} is not in {problems}"


@pytest.mark.parametrize("name", STEP_MUTANTS)
def test_mutants_of_step(name: str) -> None:
    change, expected = STEP_MUTANTS[name]

    class Mutant(Bounded):
        def step(self, actions: Tensor) -> Timestep:
            return change(super().step(actions))

    findings(Mutant(8), f"Mutant.step: {expected}")


def test_the_zoo_s_healthy_ancestor_passes() -> None:
    assert check_env(Bounded(8), steps=24) == []


# ---- mutants of behaviour ----


class ReusesBuffers(Bounded):
    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        self.buffer = getattr(self, "buffer", torch.empty(8, 3)).copy_(timestep.obs)
        return timestep._replace(obs=self.buffer)


class ChangesActions(Bounded):
    def step(self, actions: Tensor) -> Timestep:
        return super().step(actions.mul_(0.5))


class NotReproducible(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        state, reward, terminated = super().transition(state, action, rng)
        return state, reward + torch.rand(()), terminated


class NotReproducibleReset(Bounded):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        return super().reset(seed=None, options=options)


class ResetsAll(Bounded):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        return super().reset(seed=seed)


class EatsOptions(Bounded):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = (options or {}).pop("reset_mask", None)
        return super().reset(seed=seed, options={"reset_mask": mask})


class ForgetsInfo(Bounded):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=options)[0]


class StopsItsClock(Bounded):
    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        self.episode_length_buf.clamp_(max=2)
        return timestep


class ForgetsOnResume(Bounded):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {"x": torch.zeros(self.num_envs, 3)}}


class Raises(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        wrong = torch.cat((state["x"], torch.ones(2, 2)))  # the line that fails
        return {"x": wrong}, action, action


class Squeezes(Bounded):
    def step(self, actions: Tensor) -> Timestep:
        timestep = super().step(actions)
        return timestep._replace(reward=timestep.reward.squeeze())


class WritesIntoState(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x = state["x"].add_(0.1)
        return {"x": x.clone()}, x.sum(1), rng.uniform() < 0.1


class WritesWhileLooking(Bounded):
    def observe(self, state: State) -> Tensor:
        return state["x"].clamp_(-0.5, 0.5)


class SizesBySelf(Bounded):
    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": torch.zeros(self.num_envs, 3) + rng.normal((3,))[: self.num_envs]}


class MixesEnvironments(Bounded):
    def initial_state(self, rng: CounterRandom) -> State:
        x = rng.normal((3,))
        return {"x": x - x.mean(0)}


class ChangesForm(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x, reward, terminated = super().transition({"x": state["x"].float()}, action, rng)
        return {"x": x["x"].double()}, reward, terminated

    def observe(self, state: State) -> Tensor:
        return state["x"].float()


class AddsKeys(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x, reward, terminated = super().transition(state, action, rng)
        return {**x, "late": reward}, reward, terminated


class LooksAtItems(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        scale = state["x"].abs().max().item()  # the look
        x, reward, terminated = super().transition(state, action, rng)
        return x, reward + 0.0 * scale, terminated


class IndexesByMask(Bounded):
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        x, reward, terminated = super().transition(state, action, rng)
        positive = reward[reward > -1.0]  # the look
        return x, reward + 0.0 * positive.sum(), terminated


BEHAVIOURS: list[tuple[type[VecEnv], str]] = [
    (ReusesBuffers, "got step 0: obs changed by a later step"),
    (ChangesActions, "actions: wanted them left as they were"),
    (
        NotReproducible,
        "reward, info['episode']['r']: wanted the same values for the same seed and actions",
    ),
    (
        NotReproducibleReset,
        "NotReproducibleReset.reset: obs: wanted the same first observations for the same seed",
    ),
    (
        ResetsAll,
        "obs: wanted the environments outside the mask left alone, got others in [1, 3, 5, 7]",
    ),
    (EatsOptions, "options: wanted the dict left as it was, got the keys []"),
    (ForgetsInfo, "ForgetsInfo.reset: wanted a tuple (obs, info), got a tensor of shape (8, 3)"),
    (
        StopsItsClock,
        "episode_length_buf: wanted one more a step and 0 after an end, where the next episode "
        "begins at once, got [2",
    ),
    (ForgetsOnResume, "ForgetsOnResume.load_state_dict: obs, reward"),
    (Raises, "RuntimeError: Sizes of tensors must match"),
    (Raises, "# the line that fails"),
    (
        Squeezes,
        "with num_envs=1: Squeezes.step: reward: wanted a tensor of shape (1,), torch.float32, on "
        "cpu, got shape ()",
    ),
    (
        WritesIntoState,
        "WritesIntoState.transition: wanted what it is given left alone, got x changed in place",
    ),
    (
        WritesWhileLooking,
        "WritesWhileLooking.observe: wanted what it is given left alone, got x changed in place",
    ),
    (
        SizesBySelf,
        "SizesBySelf.initial_state raised RuntimeError: The size of tensor a (8) must match the "
        "size of tensor b (2) at non-singleton dimension 0, for 2 or 3 environments: sizes come "
        "from rng.num_envs",
    ),
    (MixesEnvironments, "x: wanted the same in an environment whatever their number"),
    (
        ChangesForm,
        "transition: x, as in initial_state: wanted a tensor of shape (8, 3), torch.float32, on "
        "cpu, got torch.float64",
    ),
    (AddsKeys, "wanted the keys ['x'], got ['late', 'x']"),
    (LooksAtItems, "got aten._local_scalar_dense.default"),
    (LooksAtItems, 'scale = state["x"].abs().max().item()  # the look'),
    (IndexesByMask, "positive = reward[reward > -1.0]  # the look"),
]


@pytest.mark.parametrize(
    ("mutant", "expected"), BEHAVIOURS, ids=lambda value: getattr(value, "__name__", "")
)
def test_mutants_of_behaviour(mutant: type[VecEnv], expected: str) -> None:
    findings(mutant(8), expected)


def test_a_class_that_is_no_vec_env() -> None:
    env = gymnasium.make_vec("CartPole-v1", 2, "sync")
    assert check_env(env) == [
        "SyncVectorEnv: wanted a subclass of gpurl.envs.vec_env.VecEnv, got one of VectorEnv, "
        "Generic"
    ]  # type: ignore[arg-type]
    env.close()


def test_a_forgotten_super_init() -> None:
    class NoInit(VecEnv):
        single_observation_space = Box(-1.0, 1.0, (2,))
        single_action_space = Discrete(2)

        def __init__(self) -> None:
            self.num_envs = 2

    assert "call super().__init__(num_envs, device)" in check_env(NoInit())[0]


def test_an_observation_space_that_is_no_box() -> None:
    class Tabular(RandomWalk):
        single_observation_space = Discrete(4)  # type: ignore[assignment]

    assert "Tabular.single_observation_space: wanted a Box, got Discrete(4)" in check_env(
        Tabular(2)
    )


def test_a_finding_is_not_repeated() -> None:
    class Column(RandomWalk):
        def step(self, actions: Tensor) -> Timestep:
            timestep = super().step(actions)
            return timestep._replace(reward=timestep.reward.double())

    problems = check_env(Column(8), steps=8)
    assert len(problems) == len(set(problems))


# ---- the guard in the training loop ----


def test_the_guard_lets_good_steps_pass() -> None:
    env = make_env("chasing", 4)
    obs, _ = env.reset(seed=0)
    check_reset(env, obs)
    check_step(env, env.step(torch.zeros(4, 2)))


def test_the_guard_names_env_key_wanted_and_got() -> None:
    env = make_env("chasing", 4)
    env.reset(seed=0)
    timestep = env.step(torch.zeros(4, 2))
    expected = (
        r"Chasing\.step: reward: wanted a tensor of shape \(4,\), torch.float32, on cpu, got "
        r"torch.float64"
    )
    with pytest.raises(EnvError, match=expected):
        check_step(env, timestep._replace(reward=timestep.reward.double()))
    with pytest.raises(
        EnvError,
        match=r"Chasing\.reset: obs: wanted a tensor of shape \(4, 8\), .* got shape \(3, 8\)",
    ):
        check_reset(env, timestep.obs[:3])


def test_the_guard_wants_a_reward_per_agent() -> None:
    env = Walkers(4)
    env.reset(seed=0)
    timestep = env.step(torch.zeros(4, 3, 1))
    check_step(env, timestep)
    with pytest.raises(EnvError, match=r"reward: wanted a tensor of shape \(4, 3\)"):
        check_step(env, timestep._replace(reward=timestep.reward.mean(1)))


def test_the_guard_takes_cuda_without_a_number_for_any_cuda() -> None:
    env = RandomWalk(4)
    with FakeTensorMode():  # a tensor of a CUDA device that need not be there
        obs = torch.empty(4, 3, device="cuda:0")
    env.device = torch.device("cuda")
    check_reset(env, obs)
    env.device = torch.device("cuda:1")
    with pytest.raises(EnvError, match="on cuda:1, got a tensor on cuda:0"):
        check_reset(env, obs)


class Bandit(TorchEnv):
    """Has no state: the second action pays."""

    single_observation_space = Box(0.0, 1.0, (1,), np.float32)
    single_action_space = Discrete(2)
    max_episode_steps = 1

    def initial_state(self, rng: CounterRandom) -> State:
        return {}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        return {}, action.float(), torch.zeros_like(action, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return torch.zeros(self.num_envs, 1)


def test_an_environment_needs_no_state() -> None:
    assert [
        problem for problem in check_env("tests.cli.test_check_env:Bandit") if "reset()" in problem
    ] == []


# ---- environments that cannot even be made ----


class Spaceless(TorchEnv):
    """Has forgotten its action space."""

    single_observation_space = LIMITED
    initial_state, transition, observe = (
        RandomWalk.initial_state,
        RandomWalk.transition,
        RandomWalk.observe,
    )


class Deviceless(RandomWalk):
    """Takes no device."""

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        super().__init__(num_envs, "cpu", seed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Spaceless", r"Spaceless.single_action_space: wanted a gymnasium.Space, got nothing"),
        (
            "Deviceless",
            r"Deviceless.__init__: wanted num_envs, device and seed among its arguments, device "
            r"missing",
        ),
    ],
)
def test_what_cannot_be_made_is_named(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        check_env(f"tests.cli.test_check_env:{name}")


# ---- common mistakes in a TorchEnv: one sentence each, once ----


class Ball(TorchEnv):
    single_observation_space = Box(-10.0, 10.0, (1,), np.float32)
    single_action_space: Space = Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps: int | None = 20

    def initial_state(self, rng: CounterRandom) -> Any:
        return {"x": rng.uniform(-1.0, 1.0)}

    def transition(self, state: Any, action: Tensor, rng: CounterRandom) -> Any:
        x = state["x"] + 0.1 * action[:, 0]
        return {"x": x}, -x.abs(), x.abs() > 5.0

    def observe(self, state: Any) -> Tensor:
        return state["x"][:, None]


class ReturnsTwo(Ball):
    def transition(self, state: Any, action: Tensor, rng: CounterRandom) -> Any:
        return super().transition(state, action, rng)[:2]


class TensorState(Ball):
    def initial_state(self, rng: CounterRandom) -> Any:
        return rng.uniform(-1.0, 1.0)


class AllRows(Ball):
    def initial_state(self, rng: CounterRandom) -> Any:
        return {"x": torch.zeros(self.num_envs, device=self.device)}


class Broadcast(Ball):
    def transition(self, state: Any, action: Tensor, rng: CounterRandom) -> Any:
        x = state["x"] + 0.1 * action
        return {"x": state["x"]}, -x.abs(), state["x"].abs() > 5.0


class LosesState(Ball):
    def transition(self, state: Any, action: Tensor, rng: CounterRandom) -> Any:
        return {}, -state["x"].abs(), state["x"].abs() > 5.0


class TakesTuples(Ball):
    single_action_space = Tuple((Box(-1.0, 1.0, (1,), np.float32), Discrete(2)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReturnsTwo, "transition: wanted (state, reward, terminated), got a tuple of 2"),
        (TensorState, "initial_state: wanted a dict of tensors by name, got a tensor of shape"),
        (
            AllRows,
            "as many as rng.num_envs, got a tensor of shape (8,): sizes come from rng.num_envs",
        ),
        (Broadcast, "did an action [N, 1] meet a state [N]? action[:, 0] is [N]"),
        (LosesState, "transition: state: wanted the keys ['x'], got []"),
        (TakesTuples, "wanted a Box, Discrete or MultiDiscrete, got Tuple("),
    ],
)
def test_a_common_mistake_is_named_once(kind: type[Ball], message: str) -> None:
    problems = check_env(kind(8))
    assert message in problems[0]
    # nothing follows that only repeats it
    assert len(problems) <= 2, problems


def test_a_function_that_is_missing_is_named_with_its_near_name() -> None:
    class Misspelt(TorchEnv):
        single_observation_space = Ball.single_observation_space
        single_action_space = Ball.single_action_space
        initial_state = Ball.initial_state
        transition = Ball.transition

        def observation(self, state: Any) -> Tensor:
            raise AssertionError

    with pytest.raises(
        EnvError, match=r"Misspelt: wanted a function observe\(state\), got none; is it observation"
    ):
        Misspelt(2)


def test_episodes_without_an_end_get_advice() -> None:
    class Endless(Ball):
        max_episode_steps = None

    assert check_env(Endless(8)) == []
    assert "set max_episode_steps" in advice(Endless(8))[0]
    assert advice(Ball(8)) == []


def test_an_environment_of_gymnasium_without_spaces_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import gymnasium\nclass Plain(gymnasium.Env):\n    pass\n"
    (tmp_path / "my_plain_gym.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UsageError, match=r"my_plain_gym\.Plain'> cannot be made: .*observation_space"
    ):
        make_env("my_plain_gym", 1)
    with pytest.raises(UsageError, match=r"Gymnasium has LunarLander-v3"):
        make_env("lunarlander", 1)


@pytest.mark.parametrize(
    ("key", "space"),
    [
        ("single_observation_space", Tuple((Box(-1.0, 1.0, (1,), np.float32),))),
        ("single_action_space", TakesTuples.single_action_space),
    ],
)
def test_a_training_refuses_spaces_that_no_policy_takes(key: str, space: Space) -> None:
    kind = type("Odd", (Ball,), {key: space})
    with pytest.raises(EnvError, match=rf"Odd\.{key}: wanted a Box.*, got {type(space).__name__}"):
        train("ppo", kind, num_envs=2, total_steps=8, quiet=True)
