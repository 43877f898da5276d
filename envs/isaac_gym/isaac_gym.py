"""NVIDIA's Isaac Gym: tasks of IsaacGymEnvs and legged_gym by name,
`make_env("isaac_gym:Ant", 4096, "cuda", python=...)`.

The simulator runs in a process of its own, under the Python 3.6 to 3.8 that its binaries need; the
tensors are shared, on a GPU by CUDA IPC, on a CPU in a memory file. A simulator's state cannot be
saved: a resumed run begins new episodes.
"""

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
from gpurl.envs.isaac_gym.server import CudaTensors, HostTensors, layout_of
from gpurl.envs.isaac_gym.steps import IsaacGymSteps, Returned
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError

FAMILIES, PIPELINES = ("auto", "isaacgymenvs", "legged_gym"), ("auto", "gpu", "cpu")


class IsaacGym(CountingEnv):
    """`num_envs` environments of an Isaac Gym `task`, IsaacGymEnvs' or legged_gym's, in a process
    of its own under `python`.

    overrides: settings of the task, "env.episodeLength=500 env.clipActions=0.5", as hydra writes
    them; of legged_gym's configuration classes where the task is theirs. pipeline cpu simulates on
    the CPU. max_episode_steps counts transitions that are trained on.

    Most tasks restart a step late, and that step is no transition: info["valid"] is False. Those
    that restart at once (AnymalTerrain, legged_gym) show no terminal observation: final_obs is then
    the observation before the step. An end by time and by falling in one step counts as one by
    time, since the tasks do not tell. A reset of some environments takes effect within the next
    step, which is no transition of theirs; until then they show the old observation. Factory and
    IndustReal tasks have one clock for all
    environments: it is not staggered, and only all of them can be reset.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        python: str = "",
        family: str = "auto",
        pipeline: str = "auto",
        overrides: str = "",
        max_episode_steps: int | None = None,
        start_timeout: float = 600.0,
        step_timeout: float = 120.0,
    ) -> None:
        target = torch.device(device)
        _check(
            num_envs,
            target,
            task,
            family,
            pipeline,
            max_episode_steps,
            min(start_timeout, step_timeout),
        )
        self.task, self.python, self.family, self.pipeline, self.overrides = (
            task,
            find_python(python),
            family,
            pipeline,
            overrides,
        )
        self.start_timeout, self.step_timeout, self._seed = start_timeout, step_timeout, seed
        on_gpu = target.type == "cuda" and pipeline != "cpu"
        gpu = (
            (torch.cuda.current_device() if target.index is None else target.index)
            if on_gpu
            else None
        )
        self._simulator = SimulatorProcess(self.python, gpu)
        try:
            made = self._simulator.call(
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
            self._set_up(made, num_envs, target)
            super().__init__(num_envs, target)
            self._share(layout_of(*made["sizes"]), gpu)
        except BaseException:
            self._simulator.close()
            raise

    @classmethod
    def missing(cls) -> str:
        if not os.environ.get(PYTHON_VARIABLE):
            return (
                f"the Python 3.6 to 3.8 that has it; name it in {PYTHON_VARIABLE} or by "
                f"--env.python"
            )
        try:
            find_python("")
        except UsageError as error:
            return f"{error}, as {PYTHON_VARIABLE} names it"
        return ""

    def _set_up(self, made: dict[str, Any], num_envs: int, device: torch.device) -> None:
        """Take over what the server says of the task it made."""
        count, num_obs, num_states, num_actions = made["sizes"]
        if count != num_envs:
            raise UsageError(
                f"{self.task} makes {count} environments, num_envs is {num_envs}: give it as many"
            )
        self.single_observation_space = Box(
            -made["clip_obs"], made["clip_obs"], (num_obs,), np.float32
        )
        self.single_action_space = Box(
            -made["max_action"], made["max_action"], (num_actions,), np.float32
        )
        if num_states:
            self.single_state_space = Box(
                -made["clip_obs"], made["clip_obs"], (num_states,), np.float32
            )
        if made["restarts_later"]:
            self.autoreset_mode = AutoresetMode.NEXT_STEP
        self.max_episode_steps, self._clocks_move_together = (
            made["max_episode_steps"],
            made["clocks_move_together"],
        )
        self.resets_late = not self._clocks_move_together
        self._steps = IsaacGymSteps(made["restarts_later"], made["last_clock"])
        self._is_running = False  # before the first reset

    def _share(self, layout: Any, gpu: int | None) -> None:
        device = torch.device("cuda", gpu or 0)
        self._shared = (
            HostTensors(layout, self._simulator.memory_file)
            if gpu is None
            else CudaTensors(layout, device)
        )
        self._tensors: dict[str, Tensor] = self._shared.tensors
        self._simulator.call(
            "share",
            self.start_timeout,
            memory_file=self._simulator.memory_file,
            handles=self._shared.handles(),
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The first reset without a seed takes the constructor's."""
        mask = (options or {}).get("reset_mask")
        mask = None if mask is None else torch.as_tensor(mask, dtype=torch.bool, device=self.device)
        if (
            mask is None
            or not self._is_running
            or (self._clocks_move_together and self._is_all(mask))
        ):
            self._send(
                "reset",
                {},
                self.start_timeout,
                seed=self._seed if seed is None and not self._is_running else seed,
            )
            self._steps.restart(self._returned())
            self._restart_clocks()
            self._is_running = True
        else:
            self._send("restart", {"mask": mask})
            self._steps.end_episodes(mask)
            self._restart_clocks(mask)
        obs, *state = [rows.clone() for rows in self._steps.shown]
        return obs, {"state": state[0]} if state else {}

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if not self._is_running:
            raise UsageError("IsaacGym.step: reset() comes before the first step")
        self._send("step", {"action": self._checked_action(actions)})
        returned = self._returned()
        return self._timestep(returned.shown(), *self._steps.transition(returned))

    def stagger(self, clocks: Tensor) -> None:
        if self._clocks_move_together:
            return  # such a task would take the clock of environment 0 for all
        super().stagger(clocks)
        self._send("set_clocks", {"clock": clocks})

    def _is_all(self, mask: Tensor) -> bool:
        """Whether mask [N] is all environments; UsageError where it is some. The host waits for the
        device.
        """
        if not bool(mask.all()):
            raise UsageError(
                f"IsaacGym.reset: {self.task} has one clock for all environments: wanted a reset "
                f"of all {self.num_envs}, "
                f"got a reset_mask of {int(mask.sum())}; leave the mask out, or take --nan skip or "
                f"raise instead of reset-envs"
            )
        return True

    def _send(
        self, call: str, written: dict[str, Tensor], seconds: float | None = None, **arguments: Any
    ) -> None:
        """Write tensors where the simulator reads them, once it has read what was there, then
        call.
        """
        self._simulator.check_is_there()
        self._shared.take_over()
        for name, value in written.items():
            self._tensors[name].copy_(value)
        # also of nothing: what was copied from there must be copied before it is written again
        self._shared.hand_over()
        self._simulator.call(call, seconds or self.step_timeout, **arguments)

    def _returned(self) -> Returned:
        """Copies of what the simulator shows: it writes the next step into the same memory."""
        self._shared.take_over()
        copies: dict[str, Any] = {
            name: self._tensors[name].to(self.device, copy=True)
            for name in Returned._fields
            if name in self._tensors
        }
        return Returned(**copies)

    def close_extras(self, **kwargs: Any) -> None:
        self._simulator.close()
        self._shared.close()


def _check(
    num_envs: int,
    device: torch.device,
    task: str,
    family: str,
    pipeline: str,
    max_episode_steps: int | None,
    seconds: float,
) -> None:
    """UsageError for what can be seen before a process is started."""
    if not task:
        raise UsageError("isaac_gym needs a task: isaac_gym:Ant, or task='Ant'")
    if num_envs < 1:
        raise UsageError(f"num_envs must be at least 1, got {num_envs}")
    for name, value, known in (("family", family, FAMILIES), ("pipeline", pipeline, PIPELINES)):
        if value not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if pipeline == "gpu" and device.type != "cuda":
        raise UsageError(
            f"pipeline gpu needs a CUDA device, this run is on {device}; take --device cuda, or "
            f"pipeline cpu"
        )
    if max_episode_steps is not None and max_episode_steps < 1:
        raise UsageError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
    if not seconds > 0:
        raise UsageError(f"start_timeout and step_timeout must be above 0, got {seconds}")
