"""Sets a run up: its device, environments, algorithm and engine, and the process itself."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from gpurl.algorithms import algorithm_names, make_algorithm, resolve_algorithm
from gpurl.algorithms.base import Algorithm
from gpurl.engine.choose import choose_engine
from gpurl.engine.determinism import nondeterminism_warning
from gpurl.engine.eager import Eager
from gpurl.engine.graphs import Backend
from gpurl.engine.privileged_state import AppendPrivilegedState
from gpurl.engine.threads import fastest_threads, keep_large_blocks
from gpurl.envs.registry import make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError
from gpurl.guards.contract import reset_env
from gpurl.guards.guards import Guards
from gpurl.memory import available_bytes, in_gib
from gpurl.run.callbacks import Callback
from gpurl.run.evaluator import EVAL_SEED
from gpurl.run.load import load_teacher
from gpurl.run.settings import Settings
from gpurl.run.trainer import Trainer


def make_trainer(
    settings: Settings,
    device: torch.device,
    eval_env: VecEnv | None = None,
    env: VecEnv | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
    callbacks: Iterable[Callback] = (),
) -> Trainer:
    """The environments, the algorithm and the loop of a run, in a process set up for it; call
    `start` or `restore` next.

    threads: of the CPU, where the settings name none and torch has as many. backend: of CUDA
    graphs, by default the device's.
    """
    config = settings.train
    env = env or training_env(settings, device)
    _check_agents(settings, env)
    if config.compile:
        if not isinstance(env, TorchEnv):
            raise UsageError(
                f"compile is for tensor tasks, whose functions torch knows; {settings.env} is none"
            )
        env.compile()
    spaces = env.single_observation_space, env.single_action_space
    model = make_algorithm(
        settings.algorithm,
        settings.algorithm_config,
        *spaces,
        config.num_envs,
        device,
        config.seed,
        state_space=env.single_state_space,
    )
    load_teacher(model)
    if config.precision == "tf32" and device.type != "cuda":
        raise UsageError(
            f"precision tf32 is a GPU's, this run is on {device}; take --precision float32, or "
            f"--device cuda"
        )
    torch.backends.cuda.matmul.allow_tf32 = config.precision != "float32"
    model.set_precision(config.precision)
    if device.type == "cpu":
        keep_large_blocks()
        known = threads if threads is not None and threads <= torch.get_num_threads() else None
        known = torch.get_num_threads() if known is None and config.deterministic else known
        torch.set_num_threads(config.threads or known or _fastest_threads(model))
    engine = make_engine(settings, model, env, backend)
    if config.deterministic and (note := nondeterminism_warning(env)):
        engine.notes.append(note)
    trainer = Trainer(settings, engine, eval_env, Path(), callbacks)
    if eval_env is None and env.single_instance and config.eval_episodes:
        engine.notes.append(
            f"{settings.env} can exist only once in a process: its one evaluation follows the "
            "training"
        )
    return trainer


def make_engine(
    settings: Settings, algorithm: Algorithm, env: VecEnv, backend: Backend | None = None
) -> Eager:
    """The fastest engine that algorithm, environment and device allow; its notes say why it is not
    a faster one. backend: of CUDA graphs, by default the device's.
    """
    config = settings.train
    seen = AppendPrivilegedState(env) if algorithm.num_state else env
    guards = Guards(settings.env, algorithm, seen, config.nan)
    engine, reasons = choose_engine(algorithm, seen, guards, config.graph, config.rollout, backend)
    engine.notes.append("; ".join((f"engine {engine.name}", *reasons)))
    shape = env.single_observation_space.shape or ()
    if len(shape) - (env.num_agents > 1) == 3:
        engine.notes.append(
            f"observations of shape {shape} look like images; they are flattened into rows of "
            f"{math.prod(shape):,} numbers, there is no convolutional network yet"
        )
    return engine


def training_env(settings: Settings, device: torch.device) -> VecEnv:
    """The environments that train."""
    _must_fit(settings, device)
    return make_env(
        settings.env, settings.train.num_envs, device, settings.train.seed, **settings.env_options
    )


def _must_fit(settings: Settings, device: torch.device) -> None:
    """UsageError for more environments than there is memory for their state and a rollout of their
    observations, which is not all.
    """
    free, (env_class, _) = available_bytes(device), resolve_env(settings.env)
    if free is None or not issubclass(env_class, TorchEnv):  # one of another kind may be a process
        return
    one, count = make_env(settings.env, 1, **settings.env_options), settings.train.num_envs
    obs = reset_env(one)
    state = sum(
        leaf.nbytes for leaf in tree_leaves(one.state_dict()) if isinstance(leaf, torch.Tensor)
    )
    one.close()
    each = (
        2 * state + (settings.algorithm_config.horizon + 2) * obs.nbytes
    )  # a step has both before and after it
    if count * each > free:
        raise UsageError(
            f"{count:,} environments of {settings.env} take more than {in_gib(count * each)} on "
            f"{device}, where {in_gib(free)} are free: "
            f"num_envs must be below {free // each:,}"
        )


def _check_agents(settings: Settings, env: VecEnv) -> None:
    """UsageError where `env` has several agents and the algorithm knows of one."""
    if env.num_agents == 1 or resolve_algorithm(settings.algorithm).takes_agents:
        return
    able = [name for name in algorithm_names() if resolve_algorithm(name).takes_agents]
    hint = f"; {', '.join(able)} {'take' if len(able) > 1 else 'takes'} several" if able else ""
    raise UsageError(
        f"{settings.algorithm} is for one agent, {settings.env} has {env.num_agents}{hint}"
    )


def _fastest_threads(model: Algorithm) -> int:
    """Up to torch's own number, by a few passes of the largest batch; threads that wait for each
    other gain nothing.
    """
    rows = model.max_batch_rows()
    obs, policy_state = torch.zeros(rows, *model.row_shape()), model.initial_policy_state(rows)
    return fastest_threads(
        torch.get_num_threads(), torch.set_num_threads, lambda: model.value(obs, policy_state)
    )


def evaluation_env(
    settings: Settings, device: torch.device, is_given: bool = False
) -> VecEnv | None:
    """Environments for evaluation only, never more than episodes wanted or than training has; None
    where there can be no second ones. is_given: those that train exist already.
    """
    count = min(settings.train.eval_episodes, settings.train.num_envs)
    if count > 0 and (is_given or resolve_env(settings.env)[0].single_instance):
        if settings.train.stop_return is not None:
            raise UsageError(
                f"stop_return needs evaluations while training goes on, but {settings.env} can "
                f"exist only once in a process, or was given as it is"
            )
        return None
    return (
        make_env(settings.env, count, device, EVAL_SEED, **settings.env_options)
        if count > 0
        else None
    )


def choose_device(name: str) -> torch.device:
    """The torch device called `name`; auto takes CUDA where it is. UsageError when it is not
    there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"no device is called {name!r}; it must be auto, cpu, cuda or cuda:N"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")  # without an index, as tensors say it
    if (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            f"gpurl doctor says why"
        )
    device = torch.device("cuda", device.index or 0)  # with an index, as tensors say it
    torch.cuda.set_device(device)  # where Triton launches
    return device
