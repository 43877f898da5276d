"""The contract of a tensor environment: N environments step as one, tensors in, tensors out, on one
device.

It is a `gymnasium.vector.VectorEnv` with autoreset SAME_STEP: where an episode ended, `obs` is
already the first observation of the next one and `info["final_obs"]` holds the true successor.
"""

import inspect
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from gpurl.errors import EnvError, UsageError

Info = dict[str, Any]  # nested dicts of tensors and plain values: info of a step, states
Options = dict[str, Any]  # of `reset`, as Gymnasium has them: "reset_mask" [N] bool, and others


class ShareSeeds(tuple[int, ...]):
    """Seeds of a reset for equal shares of the environments, one share after the other: each share
    begins as environments of its seed alone do. For classes with `takes_share_seeds`.
    """


Seed = int | ShareSeeds
# names of info["log"] that count failures: they are logged from the first that is not 0 on
FAILURE_COUNTS = frozenset({"non_finite_worlds", "worlds_lacking_room"})


class Timestep(NamedTuple):
    """The result of a step; unpacks as Gymnasium's five values. `step_specs` has the shapes and
    dtypes. `obs` is new memory in each step, since the trainer records the previous one later.

    info always contains
    - "final_obs": the true successor, which differs from `obs` only where an episode ended
    - "_final_obs": where an episode ended, terminated | truncated; "time_outs": truncated
    - "episode" {"r" [N] float32 or another float, "l" [N] int64 or another number}: return and
      length so far, with several agents the mean over agents of their summed rewards; "_episode"
      [N] bool: where they are final
    - with a `single_state_space`: "state", privileged observations of the critic that belong to
      `obs`, and "final_state", those of final_obs; `reset` returns "state" too

    It may contain
    - "valid" [N] bool: False where the step is no real transition; such steps are not trained on
    - "log": a dict of scalars, tensors or numpy arrays, whose means are logged as env/<name>; with
      "_<name>" [N] bool beside it, the mean is over those environments and steps only; names of
      FAILURE_COUNTS are left out while they are 0
    """

    obs: Tensor  # [N, *obs] what the policy sees next
    # [N] float32; [N, A] with several agents, where a shared reward is repeated for each
    reward: Tensor
    terminated: Tensor  # [N] bool: the task ended, the value after it is zero
    # [N] bool: the time limit, bootstrap from final_obs; never True together with terminated
    truncated: Tensor
    info: Info


class VecEnv(gymnasium.vector.VectorEnv):
    """N environments in tensors on `device`. A subclass sets the single spaces and calls
    `super().__init__(num_envs, device)`.

    `graph_safe`: a CUDA graph can hold `step`: the host reads no tensor in it, no Python number
    changes from step to step, the state stays at its address. Otherwise the environment steps
    between graphs, on torch's current stream, where a simulator may replay its own graph; it must
    not keep the actions tensor, whose memory is reused.

    With `num_agents` A > 1 the single spaces are joint: observations (A, D), actions
    MultiDiscrete([n] * A) or a Box (A, d); so obs is [N, A, D], actions are [N, A] or [N, A, d] and
    reward is [N, A]. An episode begins and ends for all agents at once.
    """

    single_observation_space: gymnasium.Space
    single_action_space: gymnasium.Space
    autoreset_mode = AutoresetMode.SAME_STEP
    single_state_space: gymnasium.Space | None = None  # of privileged observations of the critic
    # (observations, actions) of the Gymnasium environment that this one encodes
    gymnasium_spaces: tuple[gymnasium.Space, gymnasium.Space] | None = None
    num_agents: int = 1
    graph_safe: bool = False
    # whether `reset` takes `ShareSeeds`: what an environment draws depends on its stream alone
    takes_share_seeds: bool = False
    # a reset of some environments takes effect in their next step, which is then no transition
    resets_late: bool = False
    # only one can exist in a process: evaluation then runs once, after training, in the same one
    single_instance: bool = False
    # for pictures, of one agent: a name for each number of an observation [D] and of an action [A],
    # or for each choice of a Discrete action
    observation_names: Sequence[str] | None = None
    action_names: Sequence[str] | None = None
    control_step: float | None = None  # simulated seconds of a step
    render_fps: float | None = None  # steps that a video shows in a second; None: it is not known
    max_episode_steps: int | None = None
    reward_threshold: float | None = None  # return that solves the task, where one is published
    reward_shape: tuple[int, ...]  # (N,), with several agents (N, A)
    episode_length_buf: Tensor  # [N] int64 clocks, settable: staggered starts
    first_env: int = 0  # see `begin_at`
    _watcher: Callable[[int], None] | None = None  # see `watch_ends`
    # 0-d float32 in [0, 1]: env steps done / total_steps of the training, which the trainer writes
    # in place before each iteration and each evaluation; 1 outside of a training
    training_progress: Tensor

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        if not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise UsageError(f"num_envs must be a whole number of at least 1, got {num_envs!r}")
        # the agents and spaces that the subclass has set
        kind = type(self).__name__
        if not isinstance(self.num_agents, (int, np.integer)) or self.num_agents < 1:
            raise EnvError(
                f"{kind}.num_agents: wanted a whole number of at least 1, got {self.num_agents!r}"
            )
        space = self.single_state_space
        if not (space is None or isinstance(space, gymnasium.Space)):
            raise EnvError(
                f"{kind}.single_state_space: wanted a gymnasium.Space or None, got {space!r}"
            )
        for key in ("single_observation_space", "single_action_space"):
            if not isinstance(space := getattr(self, key, None), gymnasium.Space):
                batched = key.removeprefix("single_")
                hint = ""
                if space is None and getattr(self, batched, None) is not None:
                    hint = f"; {batched} is that of all environments, name it {key}"
                raise EnvError(
                    f"{type(self).__name__}.{key}: wanted a gymnasium.Space, got "
                    f"{'nothing' if space is None else repr(space)}{hint}"
                )
            shape = space.shape or ()
            min_axes = 1 if isinstance(space, MultiDiscrete) else 2
            if self.num_agents > 1 and (len(shape) < min_axes or shape[0] != self.num_agents):
                raise EnvError(
                    f"{type(self).__name__}.{key}: wanted a joint space, whose first axis is that "
                    f"of {self.num_agents} agents, got {space}"
                )
        # shapes, and the attributes that Gymnasium expects
        self.num_envs = int(num_envs)
        agents = () if self.num_agents == 1 else (self.num_agents,)
        self.reward_shape = (self.num_envs, *agents)
        self.device = torch.device(device)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.training_progress = torch.ones((), dtype=torch.float32, device=self.device)

    @classmethod
    def declared_options(cls) -> dict[str, inspect.Parameter]:
        """Options that the constructor takes in `**options`, besides its named parameters."""
        return {}

    @classmethod
    def missing(cls) -> str:
        """What this machine lacks to run the simulator and how to install it, in a few words; "" if
        it lacks nothing.
        """
        return ""

    @classmethod
    def exists_once(cls, options: Options) -> bool:
        """Whether only one environment with `options` can exist in a process."""
        return cls.single_instance

    @classmethod
    def is_quick_to_make(cls, options: Options) -> bool:
        """Whether a few environments with `options` can be made and stepped in passing, without
        processes or compilers: what one takes of memory is counted so before all are made.
        """
        return False

    def use_threads(self, count: int) -> None:
        """Step with so many threads of the CPU where the simulator has threads of its own; without
        this call with as many as torch has.
        """

    def known_names(self) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        """(observation_names, action_names) that the simulator knows, for tasks that declare none;
        None where it knows none.
        """
        return None, None

    def robot(self) -> Info:
        """What a controller of the task's robot needs to know, as plain values: joint_names,
        action_scale, ... ({} if the simulator has no robot).
        """
        return {}

    @classmethod
    def picture_options(cls, options: Options) -> Options:
        """`options` of the task, also those in its name, with those that its environments need to
        draw themselves.
        """
        return options

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        """Start new episodes in all environments, or in those of `options["reset_mask"]` [N] bool.
        Returns (obs [N, *obs], info).
        """
        raise EnvError(
            f"{type(self).__name__}: wanted a function reset(*, seed, options), got none"
        )

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        """Advance all environments by one step; actions: [N, *action]."""
        raise EnvError(f"{type(self).__name__}: wanted a function step(actions), got none")

    def stagger(self, clocks: Tensor) -> None:
        """Set the episode clocks [N] int64 so that time limits do not all fall on one step; the
        first episodes, which are shorter, are not counted.

        Does nothing if the clocks of a simulator cannot be set.
        """

    def picture(self, index: int, height: int, action: Tensor | None = None) -> np.ndarray:
        """[height, W, 3] uint8, RGB: environment `index` as it stands. action: [*action], what it
        does next, for tasks that show it. UsageError in one sentence if there is no picture.

        A video shows `render_fps` steps in a second, 30 where the task does not know them.
        """
        raise no_pictures(type(self))

    def watch_ends(self, watcher: Callable[[int], None]) -> None:
        """Have `watcher(index)` called inside `step` where an episode ended and before environment
        `index` restarts: then `picture` shows its last state. For pictures, on a CPU only.

        Simulators that cannot do so never call it.
        """
        self._watcher = watcher

    def begin_at(self, first: int) -> None:
        """These are the environments first, first + 1, ... of a larger batch, whose others are in
        other processes: from the next reset with a seed on they draw the random numbers that they
        have there. Without streams by environment, add `first_env` to the seed.
        """
        self.first_env = first

    def state_dict(self) -> Info:
        """Nested dicts of tensors and plain values from which `load_state_dict` continues exactly;
        {} if a simulator cannot be saved.
        """
        return {}

    def load_state_dict(self, state: Info) -> None:
        """Continue from the `state_dict()` of an env with the same number of environments."""
        if state:
            raise NotImplementedError(f"{type(self).__name__} cannot restore a state")

    def curriculum_state(self) -> Info:
        """Plain values that a training keeps when its episodes begin anew, with any number of
        environments: how hard a simulator has made its task.
        """
        return {}

    def load_curriculum_state(self, state: Info) -> None:
        """Continue from `curriculum_state()`."""
        if state:
            raise NotImplementedError(f"{type(self).__name__} has no curriculum")


def no_pictures(env_class: type[VecEnv]) -> UsageError:
    """The error of environments that do not draw themselves."""
    return UsageError(
        f"{env_class.__name__} draws no pictures, so there is no video of it: define "
        f"picture(index, height, action), as docs/environments.md says"
    )


class TensorSpec(NamedTuple):
    """The expected shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    other_dtypes: tuple[torch.dtype, ...] = ()  # allowed too


def step_specs(env: VecEnv) -> dict[str, TensorSpec]:
    """The contract of a step: the tensors that it returns, without gradient, by their keys in
    messages. Only info['valid'] may be missing. obs and info['state'] of `reset` have the same
    form.
    """
    # forms that several tensors share
    row = (env.num_envs,)
    space = env.single_observation_space
    is_image = space.dtype == np.uint8
    obs = TensorSpec(row + (space.shape or ()), torch.uint8 if is_image else torch.float32)
    flag = TensorSpec(row, torch.bool)
    # the number types that kernels of statistics read
    other_floats = (torch.float64, torch.float16, torch.bfloat16)
    other_numbers = (torch.int32, torch.int16, torch.float32, *other_floats)
    specs = {
        "obs": obs,
        "reward": TensorSpec(env.reward_shape, torch.float32),
        "terminated": flag,
        "truncated": flag,
        "info['final_obs']": obs,
        "info['episode']['r']": TensorSpec(row, torch.float32, other_floats),
        "info['episode']['l']": TensorSpec(row, torch.int64, other_numbers),
        "info['_episode']": flag,
        "info['valid']": flag,
    }
    if env.single_state_space is not None:
        state = TensorSpec(row + (env.single_state_space.shape or ()), torch.float32)
        specs |= {"info['state']": state, "info['final_state']": state}
    return specs


def attribute_problems(env: VecEnv) -> list[str]:
    """What is wrong with the single spaces and the time limit, each with what was wanted and what
    was got.
    """
    name = type(env).__name__
    problems = []
    limit = env.max_episode_steps
    if limit is not None and not (isinstance(limit, (int, np.integer)) and limit >= 1):
        problems.append(
            f"{name}.max_episode_steps: wanted a whole number of at least 1, or None for no time "
            f"limit, got {limit!r}"
        )
    if not isinstance(space := env.single_observation_space, Box):
        has_parts = isinstance(space, Dict | Tuple)
        hint = "; join its parts in observe, as torch.cat((part, part), 1)" if has_parts else ""
        problems.append(f"{name}.single_observation_space: wanted a Box, got {space}{hint}")
    if not isinstance(env.single_state_space, Box | NoneType):
        problems.append(f"{name}.single_state_space: wanted a Box, got {env.single_state_space}")
    # privileged observations of a TorchEnv need a space and a function
    observe_state = getattr(env, "observe_state", None)
    if observe_state is not None:
        is_missing = getattr(observe_state, "is_missing", False)
        if is_missing and env.single_state_space is not None:
            problems.append(
                f"{name}: wanted a function observe_state(state) for single_state_space, got none"
            )
        owners = [vars(env), *(vars(one) for one in type(env).__mro__ if one is not VecEnv)]
        if not is_missing and not any("single_state_space" in owner for owner in owners):
            problems.append(
                f"{name}: wanted a single_state_space, the Box of what observe_state gives, got "
                f"none: critics would not see it; None leaves it out"
            )
    if not isinstance(space := env.single_action_space, Box | Discrete | MultiDiscrete):
        problems.append(
            f"{name}.single_action_space: wanted a Box, Discrete or MultiDiscrete, got {space}; "
            f"take one of these apart in transition"
        )
    return problems


def step_values(timestep: Timestep) -> dict[str, Any]:
    """The results of a step, by the keys of `step_specs`; None for what is missing."""
    info = timestep.info
    episode = info.get("episode")
    if not isinstance(episode, dict):
        episode = {}
    values = {
        "obs": timestep.obs,
        "reward": timestep.reward,
        "terminated": timestep.terminated,
        "truncated": timestep.truncated,
        "info['final_obs']": info.get("final_obs"),
        "info['episode']['r']": episode.get("r"),
        "info['episode']['l']": episode.get("l"),
        "info['_episode']": info.get("_episode"),
        "info['state']": info.get("state"),
        "info['final_state']": info.get("final_state"),
    }
    if "valid" in info:
        values["info['valid']"] = info["valid"]
    return values


def tensor_problem(value: object, spec: TensorSpec, device: torch.device) -> str:
    """`wanted ..., got ...` if `value` does not match `spec` on `device`, else "". Needs no work of
    the device.
    """
    # the usual case is fast; anything else is compared again below, for the message
    if (
        type(value) is Tensor
        and value.shape == spec.shape
        and value.dtype == spec.dtype
        and value.device == device
    ):
        return ""
    dtypes = (spec.dtype, *spec.other_dtypes)
    if not isinstance(value, Tensor):
        got = "a tuple" if isinstance(value, tuple) else describe(value)
    elif value.shape != spec.shape:
        got = f"shape {tuple(value.shape)}"
    elif value.dtype not in dtypes:
        got = str(value.dtype)
    elif not same_device(value.device, device):
        got = f"a tensor on {value.device}"
    else:
        return ""
    if isinstance(value, Tensor):
        got += _hint_of_shape(tuple(value.shape), spec.shape)
    dtype_names = " or ".join(map(str, dtypes))
    return f"wanted a tensor of shape {spec.shape}, {dtype_names}, on {device}, got {got}"


def _hint_of_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What may have led to `shape`."""
    if wanted == shape[:1] == shape[1:] != (1,):
        return ": did an action [N, 1] meet a state [N]? action[:, 0] is [N]"
    if shape == (*wanted, 1):
        return ": squeeze(-1) takes the last axis away"
    if len(wanted) > 2 and shape == (wanted[0], *wanted[2:]):
        return ": a single space is that of one environment, without an axis of environments"
    return ""


def check_tensor(where: str, value: object, spec: TensorSpec, device: torch.device) -> None:
    """EnvError that begins with `where`, unless `value` matches `spec` on `device`."""
    if problem := tensor_problem(value, spec, device):
        raise EnvError(f"{where}: {problem}")


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether they are the same; a CUDA device without an index matches any."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def describe(value: object) -> str:
    """The form of a value, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def check_at_least_one(**values: int | None) -> None:
    """UsageError for a value below 1, except None."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
