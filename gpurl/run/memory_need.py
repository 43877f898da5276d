"""What a run takes of memory, and settings with which it fits: the only place that adds it up.

An iteration is rehearsed on torch's device meta, where tensors have shapes and no memory: the sum
is of the tensors that the algorithm itself makes. `gpurl.run.out_of_memory` explains what no sum
foresaw.
"""

import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.algorithms.ppo import PPO
from gpurl.engine.cpu_ppo import cpu_ppo_obstacle
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import Timestep, VecEnv, attribute_problems, step_specs
from gpurl.errors import UsageError
from gpurl.guards.contract import reset_env, step_env
from gpurl.kernels.backend import no_host_syncs
from gpurl.memory import LiveBytes, available_bytes, in_gib
from gpurl.run.settings import Settings

META = torch.device("meta")
FEW, MORE = 64, 128  # environments that tell what one more takes
# libraries that load during a run (106 MiB: the rehearsal's, the log, the plot), and gaps between
# blocks of memory
LIBRARIES = 112 << 20
GAPS = 1.25
# no run takes more than this times its observations, its replay and its largest layers
MOST_TIMES = 64


def check_memory(settings: Settings, device: torch.device, env: VecEnv | None = None) -> None:
    """UsageError, with what would fit, if a run by `settings` takes more memory than is free. env:
    its environments if they exist, else they are counted.
    """
    free = available_bytes(device)
    is_to_come = env is None
    env = make_env(settings.env, 1, **settings.env_options) if env is None else env
    if free is None or attribute_problems(env):
        return
    # whether a look at the settings is enough
    config, population = settings.algorithm_config, settings.train.population
    specs = step_specs(env)
    read = [specs["obs"]]
    if env.single_state_space is not None and getattr(config, "asymmetric", False):
        read.append(specs["info['state']"])
    obs_bytes = sum(math.prod(each.shape[1:]) * each.dtype.itemsize for each in read)
    num_envs, replay_size = settings.train.num_envs, getattr(config, "replay_size", 0)
    rows = (config.horizon + 2) * num_envs + replay_size
    if MOST_TIMES * population * (rows * obs_bytes + _bytes_of_layers(config)) <= free:
        return

    # the objects of a run refer to each other: without this call its buffers may outlive it
    gc.collect()
    later = available_bytes(device)
    free = free if later is None else later
    # the sum
    step = getattr(config, "minibatches", 1)  # all have the same number of environments
    bytes_per_env = 0
    if is_to_come:
        few, more = (_peak_of_envs(settings, count) for count in (FEW, MORE))
        bytes_per_env = (more - few) // (MORE - FEW)

    def needed(num_envs: int, replay_size: int) -> float:
        try:
            of_agent = _peak_of_agent(settings, env, num_envs, replay_size, device)
        except Exception:  # it reads numbers, which these tensors lack, or is refused later
            of_agent = obs_bytes * ((config.horizon + 2) * num_envs + replay_size)
        if population > 1 and device.type == "cuda" and settings.train.stack != "off":
            # the largest tensor of all exists twice while they are put side by side
            of_agent += obs_bytes * ((config.horizon + 2) * num_envs + replay_size)
        return LIBRARIES + GAPS * population * (num_envs * bytes_per_env + of_agent)

    need = needed(num_envs, replay_size)
    if need <= free:
        return
    # the largest value of each that fits beside the other
    advice = []
    for name, most in (
        ("num_envs", _largest(lambda n: needed(n, replay_size), num_envs, step, free)),
        ("replay_size", _largest(lambda n: needed(num_envs, n), replay_size, 1, free)),
    ):
        advice += [f"{name} must be below {most:,}"] if most else []
    raise UsageError(
        f"{num_envs:,} environments of {settings.env} and {settings.algorithm} take "
        f"{in_gib(need)} on {device}, where {in_gib(free)} are free: "
        f"{', or '.join(advice) or 'take smaller networks or batches'}"
    )


def _largest(needed: Callable[[int], float], now: int, step: int, free: int) -> int | None:
    """The largest multiple of `step` up to `now` that needs at most `free`; None if there is none.
    needed: grows linearly.
    """
    least = needed(step)
    if least > free or needed(now) <= least:
        return None
    while (need := needed(now)) > free:
        now = int(step + (now - step) * (free - least) / (need - least)) // step * step
    return now


def _bytes_of_layers(config: object) -> int:
    """About what the hidden layers take that a config and those in it name."""
    total = 0
    for value in vars(config).values():
        if dataclasses.is_dataclass(value):
            total += _bytes_of_layers(value)
        elif isinstance(value, list | tuple) and value and all(type(n) is int for n in value):
            total += 4 * len(value) * max(value) ** 2
    return total


def _peak_of_envs(settings: Settings, num_envs: int) -> int:
    """Bytes of so many environments during a step."""
    with no_host_syncs(), LiveBytes() as memory:
        env = make_env(settings.env, num_envs, **settings.env_options)
        reset_env(env)
        action = torch.as_tensor(env.single_action_space.sample())
        step_env(env, action.expand(num_envs, *action.shape).contiguous())
        env.close()
        return memory.peak


def _peak_of_agent(
    settings: Settings, env: VecEnv, num_envs: int, replay_size: int, device: torch.device
) -> int:
    """Bytes of the algorithm for `num_envs` environments like those of `env`, of a rollout and of
    an update on it; on a GPU, which says when its memory ends, only of what lasts.
    """
    # how many updates there are does not change their memory; a mirror would need real numbers
    config = settings.algorithm_config
    changes: dict[str, Any] = {"replay_size": replay_size, "symmetry": "", "symmetry_coef": 0.0}
    changes["epochs"] = min(getattr(config, "epochs", 1), 2)
    changes["updates"] = getattr(config, "policy_delay", 1)
    names = changes.keys() & {field.name for field in dataclasses.fields(config)}
    spaces = env.single_observation_space, env.single_action_space
    with LiveBytes() as memory, META:
        algorithm = make_algorithm(
            settings.algorithm,
            dataclasses.replace(config, **{name: changes[name] for name in names}),
            *spaces,
            num_envs,
            META,
            state_space=env.single_state_space,
        )
        built = memory.peak
        # collect: one step makes all columns
        buffer = algorithm.make_buffer()
        timestep = _step_of(env, algorithm, num_envs)
        policy_state = algorithm.initial_policy_state(num_envs)
        decision = algorithm.act(timestep.obs, policy_state)
        value = None
        if algorithm.values_final_obs:
            value = algorithm.value(timestep.obs, policy_state)
        algorithm.record_step(buffer, timestep.obs, decision, timestep, value)
        buffer.size = buffer.horizon
        # C keeps no activations
        in_c = device.type == "cpu" and not algorithm.warms_critic
        in_c = in_c and not cpu_ppo_obstacle(algorithm)
        if in_c:
            memory.peak = max(built, memory.live)
        # learn
        data = algorithm.prepare(buffer)
        if isinstance(algorithm, PPO) and in_c:
            algorithm.minibatches.order(num_envs * buffer.horizon)
        else:
            with algorithm.train_mode():
                algorithm.learn(data)
        del data
    # a checkpoint is a copy of what it holds
    states: list[object] = [algorithm.state_dict(), algorithm.extra_state()]
    if isinstance(algorithm, OffPolicy) and algorithm.config.save_replay:
        states.append(algorithm.replay.ring)
    saved = sum(leaf.nbytes for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor))
    rollout = sum(column.nbytes for column in buffer.columns.values())
    beside = rollout if settings.train.asynchronous else 0
    peak = max(memory.peak, memory.live + saved) if device.type == "cpu" else memory.live
    return beside + peak


def _step_of(env: VecEnv, algorithm: Algorithm, num_envs: int) -> Timestep:
    """A step of `num_envs` environments like `env`, as the algorithm gets it."""
    made = {
        key: torch.empty(num_envs, *spec.shape[1:], dtype=spec.dtype)
        for key, spec in step_specs(env).items()
    }
    if algorithm.num_state:  # beside the observations
        width = algorithm.num_inputs + algorithm.num_state
        made["obs"] = made["info['final_obs']"] = torch.empty(num_envs, width)
    info = {"final_obs": made["info['final_obs']"]}
    return Timestep(made["obs"], made["reward"], made["terminated"], made["truncated"], info)
