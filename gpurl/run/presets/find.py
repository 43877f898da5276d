"""The preset of an algorithm on an environment, by their names, the number of environments and the
device.
"""

import torch

from gpurl.algorithms import config_class, resolve_algorithm
from gpurl.algorithms.off_policy import OffPolicyConfig
from gpurl.errors import UsageError, did_you_mean
from gpurl.run.presets import any_env, box2d, chasing, classic, mujoco, simulators
from gpurl.run.presets.fit import MAX_FEW, fit_updates, fitted_horizon, with_whole_rollouts
from gpurl.run.presets.table import Preset, Table

PRESETS: Table = {
    **any_env.PRESETS,
    **classic.PRESETS,
    **chasing.PRESETS,
    **box2d.PRESETS,
    **mujoco.PRESETS,
    **simulators.PRESETS,
}
FEW_PRESETS = mujoco.FEW_PRESETS
NAMED = simulators.NAMED
PRESET_NAMES = ("auto", "none", *NAMED)
# tasks here by the name that Gymnasium's ids begin with
TWINS = {
    "CartPole": "cart_pole",
    "Pendulum": "pendulum",
    "Acrobot": "acrobot",
    "MountainCar": "mountain_car",
    "MountainCarContinuous": "mountain_car_continuous",
    **{task.title().replace("_", ""): task for task in mujoco.MUJOCO_TASKS},
}
# what belongs to thousands of environments, and not to their task
SIZES = ("num_envs", "horizon", "epochs", "minibatches", "learning_rate", "schedule", "total_steps")


def preset(
    algorithm: str,
    env: str,
    num_envs: object = None,
    device: object = "auto",
    name: object = "auto",
) -> Preset:
    """The preset for `algorithm` on `env`, {} if there is none; tasks of an adapter, named after a
    colon, share one and may add their own, and so may all tasks of a package, PACKAGE:TASK.

    name: "auto" for the task's own preset, "none" for no preset, or one of NAMED, which takes the
    place of the task's. UsageError for another one, and if it is not for `algorithm`.

    num_envs: the number of environments if one is given. With up to MAX_FEW, or on a CPU with none
    given, a task may have another preset. Presets with a replay buffer are fitted to the number,
    see `fit_updates`.
    """
    if name != "auto":
        return _named(algorithm, name)
    count = num_envs if isinstance(num_envs, int) and num_envs > 0 else None
    is_few = _is_cpu(device) if count is None else count <= MAX_FEW
    adapter, _, task = env.partition(":")
    package = task.partition(":")[0].partition(".")[0]
    values = _known(algorithm, adapter, f"{adapter}:{package}", env, is_few=is_few)
    twin = TWINS.get(task.partition("-v")[0]) if adapter == "gymnasium_cpu" else None
    if twin is not None:
        # on as many environments as a CPU steps in numpy
        default = values.get("num_envs")
        count = count or (default if isinstance(default, int) else None)
        values = _on_few(algorithm, values, _known(algorithm, twin, is_few=True), count)
    if count is None:
        return values
    if "updates" not in values:
        return with_whole_rollouts(algorithm, values, count)
    config = config_class(resolve_algorithm(algorithm))
    assert issubclass(config, OffPolicyConfig)
    return fit_updates(values, count, getattr(config, "policy_delay", 1), config.replay_size)


def _named(algorithm: str, name: object) -> Preset:
    """The preset that --preset names, for `algorithm`."""
    if name == "none":
        return {}
    if name not in NAMED:
        raise UsageError(
            f"no preset is called {name!r}; {did_you_mean(str(name), PRESET_NAMES)}it must be one "
            f"of {', '.join(PRESET_NAMES)}: auto is that of the task, none leaves the defaults"
        )
    if algorithm != "ppo":
        raise UsageError(
            f"preset {name} is for ppo, not for {algorithm}: take --preset auto, the task's own"
        )
    return NAMED[str(name)]


def _known(algorithm: str, *names: str, is_few: bool) -> Preset:
    """What is known of all environments and of each of `names`; the last one wins."""
    values: Preset = {}
    for name in dict.fromkeys(("*", *names)):
        key = (algorithm, name)
        if is_few and key in FEW_PRESETS:
            values |= FEW_PRESETS[key]
        else:
            values |= PRESETS.get(key, {})
    return values


def _on_few(algorithm: str, values: Preset, of_twin: Preset, count: int | None) -> Preset:
    """The preset of a task for the same task elsewhere, on `count` environments; values: the preset
    of all tasks there.
    """
    made_for = of_twin.get("num_envs")
    if "updates" in of_twin:
        return of_twin  # `fit_updates` does the rest
    if count is None or not isinstance(made_for, int) or made_for > MAX_FEW:
        return values | {name: value for name, value in of_twin.items() if name not in SIZES}
    # rollouts of the same size
    values = values | of_twin
    return values | {"num_envs": count, "horizon": fitted_horizon(algorithm, values, count)}


def _is_cpu(device: object) -> bool:
    """Whether training on `device`, or on what auto chooses, is on a CPU."""
    return not torch.cuda.is_available() if device == "auto" else device == "cpu"


def name_for_presets(name: str, kind: type, package: str) -> str:
    """The name under which presets are found: `name` itself if `package` contains it, else that of
    the nearest base class in `package`, so that a subclass of an adapter gets the adapter's
    presets; "mujoco" for a MuJoCo task of one's own.
    """
    for base in kind.__mro__:
        if base.__module__.startswith(f"{package}."):
            parent, _, base_name = base.__module__.rpartition(".")
            if base_name == "base":
                return parent.rpartition(".")[2]
            return name if name.partition(":")[0] == base_name else base_name
    return name
