"""Isaac Lab's tasks, in this process:
`make_env("isaac_lab:Isaac-Cartpole-Direct", 4096, "cuda:0")`.

Isaac Lab 2 starts Isaac Sim, once and without a window; Isaac Lab 3 starts the simulator that the
task's configuration needs, which is none with Newton. Only one such environment can exist in a
process at a time.
"""

import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from gpurl.envs._torch_tasks import parse_overrides, set_values
from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.numpy.vector import explain_construction, find_spec
from gpurl.envs.torch_vector import TorchVector
from gpurl.envs.vec_env import Options
from gpurl.errors import UsageError

# overrides that Isaac Lab 3 reads itself: they choose between variants of a configuration
SELECTORS = ("physics", "renderer", "presets")

_runtime = ExitStack()  # closes the simulator when the process ends
_launchers: list[Any] = []  # of Isaac Sim, one at most
_living: list["IsaacLab"] = []  # one at most


class IsaacLab(TorchVector):
    """`num_envs` environments of `task`, an id of isaaclab_tasks, or PACKAGE:ID if importing
    PACKAGE registers it.

    overrides: `sim.dt=0.01 rewards.alive.weight=2.0`, paths in the task's configuration, with or
    without Isaac Lab's prefix `env.`; with Isaac Lab 3 also `physics=newton_mjwarp`, `renderer=`
    and `presets=`. cameras: needed for rendering in Isaac Lab 2. action_limit and observation
    groups are those of TorchVector. `compute_final_obs` is set if the configuration has it; without
    it the observation before the last step replaces the final one.
    """

    single_instance = True

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        overrides: str = "",  # NAME=VALUE NAME=VALUE, paths in the task's configuration
        action_limit: float | None = None,  # clip actions to +-limit; the action space is this wide
        cameras: bool = False,  # render, in Isaac Lab 2
        obs_groups: str = "",  # NAME NAME, observation groups of the policy
        state_groups: str = "",  # NAME NAME, observation groups of the critic
    ) -> None:
        if not task:
            raise UsageError("isaac_lab needs a task, as in isaac_lab:Isaac-Cartpole-Direct")
        if _living:
            raise UsageError(
                f"Isaac Lab allows one simulation per process, and {_living[0].task} is open: "
                f"close it first"
            )
        env = _make(task, num_envs, str(device), seed, parse_overrides(overrides), cameras)
        super().__init__(
            num_envs,
            device,
            seed,
            action_limit=action_limit,
            obs_groups=obs_groups,
            state_groups=state_groups,
            env=env,
        )
        if isinstance(self._attribute("single_action_space"), Discrete):
            # its choices are [N, 1]
            decode = self._decode
            self._decode = lambda actions: decode(actions).unsqueeze(1)
        self.task = task
        self.overrides = overrides
        self.cameras = cameras
        _living.append(self)

    @classmethod
    def missing(cls) -> str:
        if importlib.util.find_spec("isaaclab") is not None:
            return ""
        return (
            "isaaclab is not in this Python; version 3 needs Python 3.12: pip install 'isaaclab>=3'"
        )

    def _restart(
        self, index: Tensor, mask: Tensor, seed: int | None, options: Options
    ) -> tuple[Batch, bool]:
        inner = self._env.unwrapped
        if hasattr(inner, "observation_manager"):
            return super()._restart(index, mask, seed, options)
        # the reset of a direct task takes no indices; these are the calls that it makes itself
        if seed is not None:
            inner.seed(seed)
        inner._reset_idx(index.int())
        inner.scene.write_data_to_sim()
        inner.sim.forward()
        if _renders(inner):  # else cameras have pictures of before
            for _ in range(getattr(inner.cfg, "num_rerenders_on_reset", 0)):
                inner.sim.render()
        return inner._get_observations(), True

    def close_extras(self, **kwargs: object) -> None:
        super().close_extras(**kwargs)
        if self in _living:
            _living.remove(self)


def _renders(inner: Any) -> bool:
    """Whether sensors of the environment read rendered pictures: in version 3 an attribute, in
    version 2 a function of the simulation.
    """
    has_sensors = getattr(inner, "has_rtx_sensors", getattr(inner.sim, "has_rtx_sensors", False))
    return bool(has_sensors() if callable(has_sensors) else has_sensors)


def _make(
    task: str, num_envs: int, device: str, seed: int, values: dict[str, Any], cameras: bool
) -> gymnasium.Env:
    """Starts the simulator, then makes the task."""
    app = _import("isaaclab.app")
    with _without_arguments(), explain_construction(task):
        launch = getattr(app, "launch_simulation", None)  # of Isaac Lab 3
        if launch is None:
            _start_isaac_sim(app, device, cameras)
        _import("isaaclab_tasks")
        spec = find_spec(task)
        if "env_cfg_entry_point" not in spec.kwargs:
            raise UsageError(
                f"{spec.id} is no task of Isaac Lab: it is registered without env_cfg_entry_point"
            )
        # the configuration, in the variants that the overrides select
        selectors = [] if launch is None else [name for name in SELECTORS if name in values]
        variants = [f"{name}={values[name]}" for name in selectors]
        options = {"overrides": variants} if variants else {}
        config = _import("isaaclab_tasks.utils").parse_env_cfg(
            spec.id, device=device, num_envs=num_envs, **options
        )
        # its values
        config.seed = seed
        if hasattr(config, "compute_final_obs"):
            config.compute_final_obs = True
        paths = {
            path.removeprefix("env."): value
            for path, value in values.items()
            if path not in selectors
        }
        set_values(config, paths, spec.id)
        # Isaac Lab 3 starts the simulator of this configuration
        if launch is not None:
            _runtime.enter_context(
                launch(config, {"headless": True, "device": device, "enable_cameras": cameras})
            )
        return gymnasium.make(spec, cfg=config, max_episode_steps=-1, disable_env_checker=True)


def _import(name: str) -> ModuleType:
    """The module; UsageError that says what to install into which Python."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # the package itself lacks another one
        here = ".".join(map(str, sys.version_info[:3]))
        raise UsageError(
            f"isaac_lab needs the package {error.name}, which this Python ({here}) does not have. "
            f"Isaac Lab 3 needs Python 3.12: pip install 'isaaclab>=3'. Isaac Lab 2.3 needs Python "
            f"3.11 and Isaac Sim 5.1: on Python 3.11 `pip install isaaclab` installs it without "
            f"any notice. Installation of both: https://isaac-sim.github.io/IsaacLab"
        ) from None


def _start_isaac_sim(app: ModuleType, device: str, cameras: bool) -> None:
    """Start it once per process: a second launcher is an error."""
    if not _launchers:
        _launchers.append(
            app.AppLauncher({"headless": True, "device": device, "enable_cameras": cameras})
        )
        _runtime.push(partial(_end_isaac_sim, _launchers[0].app))


def _end_isaac_sim(app: Any, kind: object, error: BaseException | None, trace: object) -> None:
    """Isaac Sim ends the process while it closes, with code 0: where another one is wanted, the end
    of the process closes it.
    """
    if isinstance(error, SystemExit) and error.code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(error.code))
    app.close()


def close_simulator(exit_code: int) -> None:
    """Close what was started in this process, which is about to end with `exit_code` and has
    nothing else to do: Isaac Sim ends it.
    """
    if exit_code:  # as Isaac Lab 3 learns the code
        _runtime.__exit__(SystemExit, SystemExit(exit_code), None)
    else:
        _runtime.close()


def _at_exit() -> None:
    """Of a Python script: after an error that nobody caught the code is 1."""
    close_simulator(int(getattr(sys, "last_value", None) is not None))


@contextmanager
def _without_arguments() -> Iterator[None]:
    """Hide this command line, which Isaac Sim and Isaac Lab would parse as theirs."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


atexit.register(_at_exit)
