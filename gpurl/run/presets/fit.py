"""A preset for another number of environments than it was made for."""

import math

from gpurl.algorithms import config_class, resolve_algorithm
from gpurl.run.presets.table import Preset

MAX_FEW = 512  # environments: with more, presets that were made for few do not fit


def with_whole_rollouts(algorithm: str, values: Preset, num_envs: int) -> Preset:
    """A preset of few environments, for fewer: each plays more steps, so that a rollout stays as
    large. One of 32 steps of one environment would be minibatches of one row.
    """
    made_for = values.get("num_envs")
    if not isinstance(made_for, int) or not num_envs < made_for <= MAX_FEW:
        return values
    if not hasattr(config_class(resolve_algorithm(algorithm)), "minibatches"):
        return values  # bc learns from no rollouts
    return values | {"horizon": fitted_horizon(algorithm, values, num_envs)}


def fitted_horizon(algorithm: str, values: Preset, num_envs: int) -> int:
    """The horizon with which rollouts of `num_envs` environments are about as large as the
    preset's, and divide into its minibatches; what the preset leaves out is the algorithm's.
    """
    config = config_class(resolve_algorithm(algorithm))
    defaults = {name: getattr(config, name) for name in ("horizon", "minibatches")}
    sizes = [(defaults | values)[name] for name in ("num_envs", "horizon", "minibatches")]
    made_for, horizon, minibatches = (size for size in sizes if isinstance(size, int))
    step = minibatches // math.gcd(minibatches, num_envs)
    return max(1, round(horizon * made_for / (num_envs * step))) * step


def fit_updates(values: Preset, num_envs: int, policy_delay: int, replay_size: int) -> Preset:
    """A preset with `updates`, for another number of environments: with as many updates in all.

    With fewer environments, or where the preset has an update for each step of an environment, the
    updates after a step change with their number; if that would be less than one update of the
    actor, there are more steps between updates. With more environments the steps of each stay the
    same, and there are more in all, also before the first update, as far as the replay buffer holds
    them.

    policy_delay, replay_size: those of the algorithm, if the preset has none.
    """
    made_for, updates = values.get("num_envs"), values.get("updates")
    if not isinstance(made_for, int) or not isinstance(updates, int) or num_envs == made_for:
        return values
    horizon, delay = values.get("horizon", 1), values.get("policy_delay", policy_delay)
    assert isinstance(horizon, int)
    assert isinstance(delay, int)
    fitted = values | {"num_envs": num_envs}
    if num_envs < made_for or updates >= made_for * horizon:
        wanted = updates * num_envs / made_for
        if wanted < delay:
            return fitted | {"updates": delay, "horizon": round(horizon * delay / wanted)}
        # the actor is updated once in `delay` updates
        return fitted | {"updates": round(wanted / delay) * delay}
    for name in ("total_steps", "learning_starts"):
        if isinstance(steps := values.get(name), int):
            fitted[name] = steps * num_envs // made_for
    size, starts = values.get("replay_size", replay_size), fitted.get("learning_starts", 0)
    assert isinstance(size, int)
    assert isinstance(starts, int)
    return fitted | {"learning_starts": size} if starts > size else fitted
