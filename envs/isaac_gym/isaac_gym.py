"""NVIDIA's Isaac Gym: tasks of IsaacGymEnvs and legged_gym by name,
`make_env("isaac_gym:Ant", 4096, "cuda")`.

The simulator runs in a separate process, under the Python 3.6 to 3.8 that its binaries need. Both
processes share tensors, on a GPU by CUDA IPC, on a CPU in a memory file. The state of the simulator
cannot be saved: a resumed run begins new episodes.
"""

import json
import logging
import os
import shlex
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor

from gpurl.envs._counting_env import CountingEnv
from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE, SimulatorProcess, find_python
from gpurl.envs.isaac_gym.server import CudaTensors, HostTensors, Layout, layout_of
from gpurl.envs.isaac_gym.steps import IsaacGymSteps, Returned
from gpurl.envs.vec_env import Info, Options, Timestep, check_at_least_one
from gpurl.errors import EnvError, UsageError

FAMILIES = ("auto", "isaacgymenvs", "legged_gym")
PIPELINES = ("auto", "gpu", "cpu")


class IsaacGym(CountingEnv):
    """`num_envs` environments of an Isaac Gym `task`, of IsaacGymEnvs or legged_gym, in a separate
    process under the Python that GPURL_ISAAC_GYM_PYTHON names.

    overrides: settings of the task, "env.episodeLength=500 env.clipActions=0.5", in hydra's syntax;
    for legged_gym those of its configuration classes. pipeline cpu simulates on the CPU.
    max_episode_steps counts real transitions only. start_timeout, step_timeout: seconds.

    Most tasks restart a step late, and that step is no transition: info["valid"] is False. Those
    that restart at once (AnymalTerrain, legged_gym) return no terminal observation: final_obs is
    then the observation before the step. A time limit and a fall in the same step count as a time
    limit, since the tasks do not distinguish them. A reset of some environments takes effect within
    their next step, which is no transition; until then they return the old observation. Factory and
    IndustReal tasks have one clock for all environments: it is not staggered, and only all of them
    can be reset.

    Numbers in a task's extras are logged (info["log"]; tensors [N] as means). A task is told the
    steps of the training (`set_train_info`); what it keeps between episodes (`get_env_state`) is
    `curriculum_state`.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        family: str = "auto",  # isaacgymenvs or legged_gym
        pipeline: str = "auto",  # gpu or cpu: where it simulates
        overrides: str = "",  # NAME=VALUE NAME=VALUE, settings of the task
        max_episode_steps: int | None = None,  # steps to a time limit
        start_timeout: float = 600.0,  # seconds until the task must have started
        step_timeout: float = 120.0,  # seconds that a step may take
    ) -> None:
        # settings
        target = torch.device(device)
        self.task = task
        self.family = family
        self.pipeline = pipeline
        self.overrides = overrides
        self.start_timeout = start_timeout
        self.step_timeout = step_timeout
        self._check_options(target)
        check_at_least_one(num_envs=num_envs, max_episode_steps=max_episode_steps)
        self.python = find_python()
        self._seed = seed
        # the process, and the task in it
        gpu = None  # index of the GPU that simulates
        if target.type == "cuda" and pipeline != "cpu":
            gpu = torch.cuda.current_device() if target.index is None else target.index
        self._simulator = SimulatorProcess(self.python, gpu)
        try:
            properties = self._simulator.call(
                "make",
                start_timeout,
                task=task,
                family=family,
                num_envs=num_envs,
                seed=seed,
                device="cpu" if gpu is None else "cuda:0",
                overrides=shlex.split(overrides),
                max_episode_steps=max_episode_steps,
            )
            self._set_up(properties, num_envs)
            super().__init__(num_envs, target)
            self._share(layout_of(*properties["sizes"]), gpu)
        except BaseException:
            self._simulator.close()
            raise

    @classmethod
    def missing(cls) -> str:
        if not os.environ.get(PYTHON_VARIABLE):
            return f"the Python 3.6 to 3.8 that has it; name it in {PYTHON_VARIABLE}"
        try:
            find_python()
        except UsageError as error:
            return str(error)
        return ""

    def _check_options(self, device: torch.device) -> None:
        """UsageError for wrong options, before a process is started."""
        if not self.task:
            raise UsageError("isaac_gym needs a task: isaac_gym:Ant, or task='Ant'")
        for name, known in (("family", FAMILIES), ("pipeline", PIPELINES)):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.pipeline == "gpu" and device.type != "cuda":
            raise UsageError(
                f"pipeline gpu needs a CUDA device, this run is on {device}; take --device cuda, "
                f"or pipeline cpu"
            )
        seconds = min(self.start_timeout, self.step_timeout)
        if not seconds > 0:
            raise UsageError(f"start_timeout and step_timeout must be above 0, got {seconds}")

    def _set_up(self, properties: dict[str, Any], num_envs: int) -> None:
        """Set spaces and kind of resets from the properties of the task that the server reports."""
        count, num_obs, num_states, num_actions = properties["sizes"]
        if count != num_envs:
            raise UsageError(
                f"{self.task} has {count} environments, num_envs is {num_envs}: set it to {count}"
            )
        # spaces
        clip_obs = properties["clip_obs"]
        max_action = properties["max_action"]
        self.single_observation_space = Box(-clip_obs, clip_obs, (num_obs,), np.float32)
        self.single_action_space = Box(-max_action, max_action, (num_actions,), np.float32)
        if num_states:
            self.single_state_space = Box(-clip_obs, clip_obs, (num_states,), np.float32)
        # restarts, time limit and clocks
        if properties["restarts_later"]:
            self.autoreset_mode = AutoresetMode.NEXT_STEP
        self.max_episode_steps = properties["max_episode_steps"]
        self._clocks_move_together = properties["clocks_move_together"]
        self.resets_late = not self._clocks_move_together
        self._steps = IsaacGymSteps(properties["restarts_later"], properties["last_clock"])
        self._has_started = False
        self._env_steps = 0  # of all environments, in the whole training
        self._curriculum = "null"  # of the task, as JSON
        self._warned = ""  # of its curriculum

    def _share(self, layout: Layout, gpu: int | None) -> None:
        """Make the tensors that both processes share."""
        self._shared: HostTensors | CudaTensors
        if gpu is None:
            self._shared = HostTensors(layout, self._simulator.memory_file)
        else:
            self._shared = CudaTensors(layout, torch.device("cuda", gpu))
        self._tensors: dict[str, Tensor] = self._shared.tensors
        self._simulator.call(
            "share",
            self.start_timeout,
            memory_file=self._simulator.memory_file,
            handles=self._shared.handles(),
        )

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        """The first reset without a seed uses the constructor's."""
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
        if not self._has_started or mask is None or self._has_to_reset_all(mask):
            if seed is None and not self._has_started:
                seed = self._seed
            if seed is not None:
                seed += self.first_env
            self._send("reset", {}, self.start_timeout, seed=seed)
            self._steps.restart(self._returned())
            self._restart_clocks()
            self._has_started = True
        else:
            self._send("restart", {"mask": mask})
            self._steps.end_episodes(mask)
            self._restart_clocks(mask)
        # clones, as the caller may overwrite them
        obs, *state = [rows.clone() for rows in self._steps.last]
        return obs, {"state": state[0]} if state else {}

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if not self._has_started:
            raise UsageError("IsaacGym.step: reset() comes before the first step")
        names = self._send(
            "step", {"action": self._checked_action(actions)}, env_steps=self._env_steps
        )
        self._env_steps += self.num_envs
        returned = self._returned()
        timestep = self._timestep(returned.observations(), *self._steps.transition(returned))
        if names:  # means over environments or episodes that the task logs
            log = self._tensors["log"][: len(names)].to(self.device, copy=True)
            timestep.info["log"] = dict(zip(names, log.unbind()))
        return timestep

    def curriculum_state(self) -> Info:
        """Steps of the training, and what the task keeps between its episodes; of a simulator that
        has died as it was when it was last asked.
        """
        try:
            state, obstacle = self._simulator.call("get_curriculum", self.step_timeout)
            if not obstacle:
                self._curriculum = json.dumps(state)
        except UsageError:
            obstacle = ""  # it has ended before, which was said
        except EnvError as error:
            obstacle = str(error)
        if obstacle and obstacle != self._warned:
            self._warned = obstacle
            logging.getLogger("gpurl").warning(
                "what %s keeps between its episodes (get_env_state) is not saved: %s",
                self.task,
                obstacle,
            )
        return {"env_steps": self._env_steps, "task": self._curriculum}

    def load_curriculum_state(self, state: Info) -> None:
        self._env_steps = state["env_steps"]
        self._curriculum = state["task"]
        self._simulator.call("set_curriculum", self.step_timeout, state=json.loads(state["task"]))

    def stagger(self, clocks: Tensor) -> None:
        if self._clocks_move_together:
            return  # all environments would get the clock of environment 0
        super().stagger(clocks)
        self._send("set_clocks", {"clock": clocks})

    def _has_to_reset_all(self, mask: Tensor) -> bool:
        """Whether this task can reset all environments only; then UsageError if mask [N] is not all
        of them, for which the host waits for the device.
        """
        if not self._clocks_move_together:
            return False
        if not bool(mask.all()):
            raise UsageError(
                f"IsaacGym.reset: {self.task} has one clock for all environments: wanted a reset "
                f"of all {self.num_envs}, got a reset_mask of {int(mask.sum())}; reset without a "
                f"mask, or use --nan skip or raise instead of reset-envs"
            )
        return True

    def _send(
        self, call: str, written: dict[str, Tensor], seconds: float | None = None, **arguments: Any
    ) -> Any:
        """Write tensors for the simulator, after it has read the previous ones, then call it."""
        self._simulator.check_is_alive()
        self._shared.take_over()
        for name, value in written.items():
            self._tensors[name].copy_(value)
        # also if nothing was written: results may still be copied from the shared memory
        self._shared.hand_over()
        return self._simulator.call(call, seconds or self.step_timeout, **arguments)

    def _returned(self) -> Returned:
        """Copies of the simulator's results, which the next step overwrites."""
        self._shared.take_over()
        copies: dict[str, Any] = {
            name: self._tensors[name].to(self.device, copy=True)
            for name in Returned._fields
            if name in self._tensors
        }
        return Returned(**copies)

    def close_extras(self, **kwargs: object) -> None:
        self._simulator.close()
        self._shared.close()
