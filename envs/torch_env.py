"""Base of torch-native tasks: a task is three attributes and three pure functions; everything else
is here.

Everything else is autoreset, the time limit, `final_obs`, episode statistics and random streams. On
a GPU a reset is a selection (no shape depends on the data, so a CUDA graph can hold the step); on a
CPU only the environments whose episodes ended draw a state. Both compute the same bits, since a
random number depends on the environment and the step, not on the batch.
"""

import functools
from abc import abstractmethod

import numpy as np
import torch
from gymnasium.spaces import Dict
from torch import Tensor

from gpurl.envs._counting_env import CountingEnv, check_functions, select
from gpurl.envs.canvas import Canvas
from gpurl.envs.observation_groups import GroupedBox, group_spaces
from gpurl.envs.vec_env import (
    Info,
    Options,
    Seed,
    TensorSpec,
    Timestep,
    check_at_least_one,
    check_tensor,
    describe,
    step_specs,
)
from gpurl.errors import EnvError, UsageError, raised_at
from gpurl.kernels.backend import host_sync_is_free, on_own_device, use_triton
from gpurl.kernels.env_step import Clocks, RandomStreams, TritonEnv, TritonTask, env_step_triton
from gpurl.kernels.random import CounterRandom

State = dict[str, Tensor]

FUNCTIONS = ("initial_state(rng)", "transition(state, action, rng)", "observe(state)")
OPTIONAL_FUNCTIONS = ("observe_state(state)", "metrics(state)", "draw(canvas, state, action)")
# what a subclass of a task with Triton functions may define without another step
BESIDE_THE_STEP = {"draw", "picture", "mirror", "scripted_action", "is_quick_to_make"}


class TorchEnv(CountingEnv):
    """A subclass sets `single_observation_space`, `single_action_space` and `max_episode_steps`,
    and defines `initial_state`, `transition` and `observe`.

    The functions are pure: they never change their arguments. `rng.num_envs` is the number of
    environments to draw for, on a CPU fewer than `self.num_envs` when only some restart.

    Where the observation space is a Dict of float32 Boxes and uint8 images, `observe` returns a
    dict of tensors; the space of the object is then the row that holds all of them, a GroupedBox.
    """

    graph_safe = True
    takes_share_seeds = True

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        max_episode_steps: int | None = None,  # steps to the time limit; None: the task's
    ) -> None:
        self._check_functions()
        space = getattr(self, "single_observation_space", None)
        if isinstance(space, Dict):
            name = f"{type(self).__name__}.single_observation_space"
            self.single_observation_space = group_spaces(space, name)
        super().__init__(num_envs, device)
        check_at_least_one(max_episode_steps=max_episode_steps)
        if max_episode_steps is not None:
            self.max_episode_steps = max_episode_steps
        self._specs = step_specs(self)
        self._random = CounterRandom(seed, self.num_envs, self.device)
        self._state: State | None = None  # before the first reset
        self._canvases: dict[int, Canvas] = {}  # of environments that are drawn

    @classmethod
    def is_quick_to_make(cls, options: Options) -> bool:
        return True

    @abstractmethod
    def initial_state(self, rng: CounterRandom) -> State:
        """The first states of n = `rng.num_envs` episodes, tensors [n, ...] by name."""

    @abstractmethod
    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        """(next state, reward [N] or [N, A] float32, terminated [N] bool) after action [N,
        *action].
        """

    @abstractmethod
    def observe(self, state: State) -> Tensor | dict[str, Tensor]:
        """[n, *obs] observations of `state`; of a Dict space a dict of [n, *part]."""

    def observed_rows(self, state: State) -> Tensor:
        """[n, *obs] `observe(state)` as one tensor: groups of a Dict in one row."""
        obs = self.observe(state)
        space = self.single_observation_space
        if isinstance(space, GroupedBox):
            return space.join(space.checked(obs, f"{type(self).__name__}.observe"))
        return obs  # type: ignore[return-value]  # the guard of each step checks it

    def observe_state(self, state: State) -> Tensor:
        """[n, *state] privileged observations of the critic; for tasks with a
        `single_state_space`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has a single_state_space and no observe_state(state)"
        )

    observe_state.is_missing = True  # type: ignore[attr-defined]

    def _check_functions(self) -> None:
        """EnvError for a function that the task does not define, which may be misspelt, or that
        takes other arguments.
        """
        kind = type(self)
        if kind.initial_state is TorchEnv.initial_state and kind.step is not TorchEnv.step:
            raise EnvError(
                f"{kind.__name__}: wanted the functions {', '.join(FUNCTIONS)} of a TorchEnv, got "
                f"a step of its own: that belongs to a VecEnv (gpurl.envs.vec_env), or to a "
                f"gymnasium.Env in the adapter GymnasiumCpu"
            )
        check_functions(self, TorchEnv, FUNCTIONS, OPTIONAL_FUNCTIONS)

    def checked_initial_state(self, rng: CounterRandom) -> State:
        """`initial_state`, checked: tensors of rng.num_envs rows by name."""
        state = self.initial_state(rng)
        where = f"{type(self).__name__}.initial_state"
        if not isinstance(state, dict):
            raise EnvError(f"{where}: wanted a dict of tensors by name, got {describe(state)}")
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (rng.num_envs,):
                hint = ""
                if isinstance(value, Tensor) and value.shape[:1] == (self.num_envs,):
                    hint = ": sizes come from rng.num_envs, since some environments restart alone"
                raise EnvError(
                    f"{where}: {name}: wanted a tensor of {rng.num_envs} rows, as many as "
                    f"rng.num_envs, got {describe(value)}{hint}"
                )
        return state

    def _check_shapes(self) -> None:
        """EnvError if the shapes of a state depend on the number of environments, or it is not
        made for as many as asked. Drawn apart from the streams of the episodes.
        """
        try:
            few, more = (
                self.checked_initial_state(CounterRandom(0, count, self.device)) for count in (2, 3)
            )
        except RuntimeError as error:
            if "size of tensor" not in str(error):
                raise
            raise EnvError(
                f"{type(self).__name__}.initial_state raised RuntimeError: {error}, for 2 or 3 "
                f"environments: sizes come from rng.num_envs, since some environments restart "
                f"alone ({raised_at(error, type(self))})"
            ) from error
        for name in few.keys() & more.keys():
            if few[name].shape[1:] != more[name].shape[1:]:
                raise EnvError(
                    f"{type(self).__name__}.initial_state: {name}: wanted the same shape [n, ...] "
                    f"for every number of environments, got {tuple(few[name].shape)} for 2 and "
                    f"{tuple(more[name].shape)} for 3: the shape given to rng is that of one "
                    f"environment, rng.uniform(low, high) is [n] and rng.uniform(low, high, (2,)) "
                    f"is [n, 2]"
                )

    def draw(self, canvas: Canvas, state: State, action: Tensor | None) -> None:
        """Draw one environment on `canvas`: `canvas.view` first, then what the state shows. state:
        its tensors on the CPU, without the axis of environments; action: [*action] that it takes
        next, None at the end of an episode.
        """
        raise UsageError(
            f"{type(self).__name__} has no draw(canvas, state, action), so there is no video of "
            f"it: docs/environments.md shows how to write one"
        )

    def picture(self, index: int, height: int, action: Tensor | None = None) -> np.ndarray:
        if self._state is None:
            raise UsageError(f"{type(self).__name__}.picture: reset() comes before it")
        # a canvas remembers the trails of one episode
        canvas = self._canvases.get(index)
        is_first = int(self.episode_length_buf[index]) == 0
        if canvas is None or is_first or canvas.height != height:
            canvas = self._canvases[index] = Canvas(height)
        state = {name: value[index].cpu() for name, value in self._state.items()}
        self.draw(canvas, state, None if action is None else action.cpu())
        return canvas.picture()

    def metrics(self, state: State) -> dict[str, Tensor]:
        """Numbers [n] to log by name, such as terms of the reward or whether the task is solved,
        of the `state` that a step leads to. Logged as env/<name>: the mean over environments and
        steps; of a name that ends in `_at_end` the mean over the episodes that ended.
        """
        return {}

    def _privileged(self, key: str, state: State) -> dict[str, Tensor]:
        """{key: privileged observations}, {} if the task has none."""
        return {} if self.single_state_space is None else {key: self.observe_state(state)}

    def compile(self) -> None:
        """Compile `transition` and `observe` with torch.compile at their first calls. The drawing
        of random numbers is not compiled, so they stay the same.
        """
        self._random.disable_compile()
        compiled = torch.compile(self.transition, dynamic=False)
        self.transition = compiled  # type: ignore[method-assign]
        self.observe = torch.compile(self.observe, dynamic=False)  # type: ignore[method-assign]

    def triton_task(self) -> TritonTask | None:
        """The three functions in Triton, for a step in one launch on a GPU; None if they do not
        exist, or the task has several agents. A subclass that overrides a method of the step is
        stepped by Python, unless it defines this one too.
        """
        return None

    @functools.cached_property
    def triton_obstacle(self) -> str:
        """Why Triton functions cannot step this task, or ""."""
        kind = type(self)
        if self.triton_task() is None:
            return f"{kind.__name__} has no Triton functions"
        if kind.metrics is not TorchEnv.metrics:
            return f"{kind.__name__}.metrics is not in Triton"
        if self.single_state_space is not None:
            return f"observe_state of {kind.__name__} is not in Triton"
        # the class that has the functions, which do not know what is overridden in front of it
        place = next(k for k, each in enumerate(kind.__mro__) if "triton_task" in vars(each))
        base = kind.__mro__[place]
        for owner in kind.__mro__[:place]:
            for name in vars(owner).keys() - BESIDE_THE_STEP:
                value = getattr(base, name, None)
                is_method = callable(value) or isinstance(value, property)
                if is_method and not name.startswith("__"):
                    return f"{owner.__name__}.{name} is not in Triton"
        return ""

    @on_own_device
    def reset(
        self, *, seed: Seed | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        if self._state is None:
            self._check_shapes()
        # every environment draws a first state, also those that are not reset: shapes stay fixed
        self._reseed(self._random, seed)
        state = self.checked_initial_state(self._random)
        mask = (options or {}).get("reset_mask")
        restarts_any = None
        if mask is not None:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
            restarts_any = mask.any()
        # all environments start, or those in the mask
        if mask is None or self._state is None:
            self._restart_clocks()
        else:
            state = {name: select(mask, state[name], value) for name, value in self._state.items()}
            self._restart_clocks(mask)
        # a reset of none draws nothing, without the host knowing
        self._random.advance(restarts_any)
        self._set_state(state)
        obs = self.observed_rows(state)
        check_tensor(f"{type(self).__name__}.observe", obs, self._specs["obs"], self.device)
        return obs, self._privileged("state", state)

    @on_own_device
    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if self._state is None:
            raise UsageError(f"{type(self).__name__}.step: reset() comes before the first step")
        action = self._checked_action(actions)
        if (in_triton := self.in_triton()) is not None:
            return self._step_in_triton(in_triton, action)
        # the task
        where = f"{type(self).__name__}.transition"
        result = self.transition(self._state, action, self._random)
        if not isinstance(result, tuple) or len(result) != 3:
            raise EnvError(f"{where}: wanted (state, reward, terminated), got {describe(result)}")
        next_state, reward, terminated = result
        if not isinstance(next_state, dict) or next_state.keys() != self._state.keys():
            got = sorted(next_state) if isinstance(next_state, dict) else describe(next_state)
            raise EnvError(f"{where}: state: wanted the keys {sorted(self._state)}, got {got}")
        for key, value in next_state.items():
            before = self._state[key]
            if type(value) is not Tensor or (value.shape, value.dtype, value.device) != (
                before.shape, before.dtype, before.device,
            ):  # fmt: skip
                spec = TensorSpec(tuple(before.shape), before.dtype)
                check_tensor(f"{where}: {key}, as in initial_state", value, spec, before.device)
        for key, value in (("reward", reward), ("terminated", terminated)):
            check_tensor(f"{where}: {key}", value, self._specs[key], self.device)
        # time limit and statistics
        self._count(reward)
        truncated = self._time_limit(terminated)
        done = terminated | truncated
        # final observations, then autoreset
        if not host_sync_is_free(self.device):
            # `_set_state` will overwrite tensors of the state that the task returns
            kept = self._outside_of_state([*next_state.values(), reward, terminated])
            *values, reward, terminated = kept
            next_state = dict(zip(next_state, values))
        info = self._episode_info(done, truncated)
        info["final_obs"] = final_obs = self.observed_rows(next_state)
        info |= self._privileged("final_state", next_state)
        if type(self).metrics is not TorchEnv.metrics:
            info["log"] = self._log_of_metrics(self.metrics(next_state), info)
        obs, state = self._autoreset(next_state, final_obs, done)
        if self.single_state_space is not None:
            is_same = state is next_state
            info["state"] = info["final_state"] if is_same else self.observe_state(state)
        self._random.advance()
        return Timestep(obs, reward, terminated, truncated, info)

    def _outside_of_state(self, values: list[Tensor]) -> list[Tensor]:
        """`values`, copies of those that are in the memory of the state."""
        assert self._state is not None
        memories = {each.untyped_storage()._cdata for each in self._state.values()}
        return [
            each.clone() if each.untyped_storage()._cdata in memories else each for each in values
        ]

    def in_triton(self) -> TritonEnv | None:
        """State, clocks and random streams, which the kernels change in place; None if Triton is
        not used or its functions cannot step this task: see `triton_obstacle`.
        """
        if self._state is None or not use_triton(self.episode_length_buf) or self.triton_obstacle:
            return None
        task = self.triton_task()
        assert task is not None
        clocks = Clocks(self.episode_length_buf, self._episode_start, self._episode_return)
        streams = RandomStreams(self._random.key, self._random.gamma, self._random.step)
        (obs_width,) = self.single_observation_space.shape or ()
        return TritonEnv(
            task, tuple(self._state.values()), clocks, streams, obs_width, self.max_episode_steps
        )

    def skip_random(self, steps: int) -> None:
        """Advance the random streams by `steps` steps, whose numbers a kernel has drawn."""
        self._random.advance(by=steps)

    def _step_in_triton(self, env: TritonEnv, action: Tensor) -> Timestep:
        result = env_step_triton(env, action)
        self._random.advance()
        info = {
            "time_outs": result.truncated,
            "_final_obs": result.done,
            "episode": {"r": result.episode_return, "l": result.episode_length},
            "_episode": result.counted,
            "final_obs": result.final_obs,
        }
        return Timestep(result.obs, result.reward, result.terminated, result.truncated, info)

    def state_dict(self) -> Info:
        return {
            "state": dict(self._state or {}),
            "clocks": self._clocks(),
            "random": self._random.state_dict(),
        }

    def load_state_dict(self, state: Info) -> None:
        self._random.load_state_dict(state["random"])
        if state["state"]:  # else it was saved before the first reset
            self._set_state(
                {name: value.to(self.device, copy=True) for name, value in state["state"].items()}
            )
        self._load_clocks(state["clocks"])

    def _set_state(self, state: State) -> None:
        """Set the state; on a GPU in place, since a CUDA graph holds its address. Then an earlier
        observation must not be a view of it.
        """
        if host_sync_is_free(self.device):
            self._state = state
        elif self._state is None:
            # in rows, as kernels read it: a clone keeps the strides of a transposed tensor
            self._state = {
                name: value.clone(memory_format=torch.contiguous_format)
                for name, value in state.items()
            }
        else:
            torch._foreach_copy_(list(self._state.values()), [state[name] for name in self._state])

    def _autoreset(
        self, next_state: State, final_obs: Tensor, done: Tensor
    ) -> tuple[Tensor, State]:
        """Restart the episodes that ended; returns (obs [N, *obs], the state that they observe, in
        memory that no later step changes).
        """
        if host_sync_is_free(self.device):
            # on a CPU only the environments that ended draw a state
            index = done.nonzero().squeeze(1)
            if index.numel() == 0:
                self._state = next_state
                return final_obs, next_state
            if self._watcher is not None:
                self._state = next_state
                for each in index.tolist():
                    self._watcher(each)
            first = self.checked_initial_state(self._random.subset(index))
            state = {
                name: value.index_copy(0, index, first[name]) for name, value in next_state.items()
            }
        else:
            # on a GPU all draw one and it is selected: no shape depends on the data
            first = self.checked_initial_state(self._random)
            state = {name: select(done, first[name], value) for name, value in next_state.items()}
        self._restart_clocks(done)
        self._set_state(state)
        return self.observed_rows(state), state
