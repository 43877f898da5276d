"""Frames of any environment stacked on its device: `make_env("frame_stack:catch", 64)` observes the
last four pictures of each environment, so that a network without memory sees motion.

A replay buffer keeps each picture once (`gpurl.buffers.frames`), unless critics read privileged
observations; a rollout holds all frames of each of its steps.
"""

from typing import Any

import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor

from gpurl.envs import registry
from gpurl.envs._counting_env import widen
from gpurl.envs.numpy.vector import check_task_options
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.stacked_box import StackedBox
from gpurl.envs.vec_env import Info, Options, Seed, Timestep, VecEnv, check_at_least_one
from gpurl.envs.wrapper import VecEnvWrapper
from gpurl.errors import UsageError


class FrameStack(VecEnvWrapper):
    """The environments of `task` with observations (frames, *obs), the newest frame last. An
    episode begins with its first observation in all frames.

    task_options: those of the task. env: environments that exist already, in place of a task.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        frames: int = 4,  # frames in an observation
        task_options: dict[str, Any] | None = None,  # options of the task
        env: VecEnv | None = None,
    ) -> None:
        check_at_least_one(frames=frames)
        check_task_options(task_options)
        if bool(task) == (env is not None):
            raise UsageError(
                f"frame_stack needs either a task (frame_stack:catch) or env=; got task={task!r}, "
                f"env={env}"
            )
        if env is None:
            env = registry.make_env(task, num_envs, device, seed, **(task_options or {}))
        space = env.single_observation_space
        if not isinstance(space, Box) or isinstance(space, GroupedBox) or env.num_agents > 1:
            raise UsageError(
                f"frame_stack needs observations of one Box without names and agents, those of "
                f"{task or type(env).__name__} are {space}"
            )
        self.task = task
        self.frames = frames
        self.task_options = task_options
        super().__init__(env, StackedBox(space, frames))
        # [N, K, *obs] of the last step, always in this memory: a CUDA graph holds its address
        self._stack: Tensor | None = None

    def reset(
        self, *, seed: Seed | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        # ShareSeeds only if the environment takes them
        obs, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        first = self._repeated(obs)
        mask = (options or {}).get("reset_mask")
        if self._stack is None:
            self._stack = first.clone()
        elif mask is None:
            self._stack.copy_(first)
        else:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
            self._stack.copy_(torch.where(widen(mask, first), first, self._stack))
        return self._stack.clone(), info

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if self._stack is None:
            raise UsageError(f"{type(self).__name__}.step: reset() comes before the first step")
        timestep = self.env.step(actions)
        info = timestep.info
        before = self._stack[:, 1:]
        final = torch.cat((before, info["final_obs"].unsqueeze(1)), dim=1)
        # episodes that begin with this step
        begins = torch.zeros_like(timestep.terminated)
        if self.autoreset_mode != AutoresetMode.NEXT_STEP:
            begins = timestep.terminated | timestep.truncated
        if "valid" in info:
            begins = begins | ~info["valid"]
        continued = torch.cat((before, timestep.obs.unsqueeze(1)), dim=1)
        obs = torch.where(widen(begins, continued), self._repeated(timestep.obs), continued)
        self._stack.copy_(obs)
        return timestep._replace(obs=obs, info=info | {"final_obs": final})

    def _repeated(self, obs: Tensor) -> Tensor:
        """obs [N, *obs] -> [N, K, *obs], a view."""
        return obs.unsqueeze(1).expand(-1, self.frames, *obs.shape[1:])

    @classmethod
    def exists_once(cls, options: Options) -> bool:
        inside = cls._inside(options)
        return inside is not None and inside[0].exists_once(inside[1])

    @classmethod
    def is_quick_to_make(cls, options: Options) -> bool:
        inside = cls._inside(options)
        return inside is not None and inside[0].is_quick_to_make(inside[1])

    @classmethod
    def _inside(cls, options: Options) -> tuple[type[VecEnv], Options] | None:
        """The class of the task that `options` name, and its own options; None without a name."""
        if not (task := options.get("task")):
            return None
        env_class, named = registry.resolve_env(task)
        return env_class, {**named, **(options.get("task_options") or {})}

    @classmethod
    def picture_options(cls, options: Options) -> Options:
        """The frames, of a task that can draw itself."""
        if not (task := options.get("task")):
            return options
        of_task = registry.picture_options(task, options.get("task_options") or {})
        return {**options, "task_options": of_task}

    def state_dict(self) -> Info:
        """{} if the environment cannot be saved."""
        state = self.env.state_dict()
        return {"env": state, "stack": self._stack} if state and self._stack is not None else {}

    def load_state_dict(self, state: Info) -> None:
        if not state:
            return
        self.env.load_state_dict(state["env"])
        stack = state["stack"].to(self.device)
        if self._stack is None:
            self._stack = stack.clone()
        else:
            self._stack.copy_(stack)
