"""Sets a run up: its device, environments, algorithm and engine, and the process itself."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from gpurl.algorithms import algorithm_names, make_algorithm, resolve_algorithm
from gpurl.algorithms.base import Algorithm, AlgorithmConfig
from gpurl.algorithms.bc import BC
from gpurl.algorithms.off_policy import OffPolicyConfig
from gpurl.checkpoints.leaderboard import Leaderboard
from gpurl.checkpoints.storage import is_url
from gpurl.engine.choose import choose_engine, choose_population
from gpurl.engine.determinism import nondeterminism_warning
from gpurl.engine.eager import Eager
from gpurl.engine.graphs import Backend
from gpurl.engine.pbt import PopulationBasedTraining
from gpurl.engine.privileged_state import AppendPrivilegedState
from gpurl.engine.threads import fastest_threads, keep_large_blocks
from gpurl.envs.registry import make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv, attribute_problems
from gpurl.errors import EnvError, UsageError
from gpurl.guards.guards import Guards
from gpurl.kernels.backend import find_device
from gpurl.nn.actor_critic import NetworkConfig
from gpurl.nn.encoders import describe_encoders
from gpurl.nn.ranks import ALONE, Alone
from gpurl.run.callbacks import Callback
from gpurl.run.evaluator import EVAL_SEED
from gpurl.run.load import load_symmetry, load_teachers
from gpurl.run.memory_need import check_memory
from gpurl.run.run_folder import absolute
from gpurl.run.settings import Settings, TrainConfig
from gpurl.run.shards import check_same_run, settings_of_rank
from gpurl.run.trainer import Trainer


def make_trainer(
    settings: Settings,
    device: torch.device,
    eval_env: VecEnv | None = None,
    env: VecEnv | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
    callbacks: Iterable[Callback] = (),
    ranks: Alone = ALONE,
) -> Trainer:
    """The environments, the algorithm and the loop of a run, in a process set up for it; call
    `start` or `restore` next.

    threads: of the CPU, used if the settings name none and torch has that many. backend: of CUDA
    graphs, by default the device's. ranks: the processes that train together.
    """
    of_run, settings = settings, settings_of_rank(settings, ranks)
    config = settings.train
    env = env or training_env(settings, device, ranks)
    check_same_run(of_run, {type(env), *map(type, callbacks)}, ranks)
    # the environments
    _check_agents(settings, env)
    if config.population > 1:
        _check_population(settings, env)
    if config.compile:
        if not isinstance(env, TorchEnv):
            raise UsageError(f"compile needs a TorchEnv; {settings.env} is not one")
        env.compile()
    # the algorithm; a student's rows hold privileged observations if a teacher reads them
    teachers = load_teachers(settings.algorithm_config, config.num_envs, device)
    space = env.single_observation_space
    needs_state = not teachers or any(each.observation_space != space for each in teachers)
    algorithms = [
        make_algorithm(
            settings.algorithm,
            member,
            env.single_observation_space,
            env.single_action_space,
            config.num_envs,
            device,
            config.seed + k,
            state_space=env.single_state_space if needs_state else None,
        )
        for k, member in enumerate(settings.member_configs())
    ]
    for algorithm in algorithms:
        if ranks.count > 1:
            algorithm.join(ranks)
        if isinstance(algorithm, BC):
            algorithm.set_teachers(teachers)
        load_symmetry(algorithm, env)
        _set_precision(algorithm, config.precision)
    # the process, the engine and its notes
    if device.type == "cpu":
        keep_large_blocks()
        # what is fastest for small networks, or a member's part, is not so for a simulator
        for each in filter(None, (env, eval_env)):
            each.use_threads(config.threads or torch.get_num_threads())
    if config.population > 1:
        engine = make_population(settings, algorithms, env, threads, backend)
    else:
        if device.type == "cpu":
            torch.set_num_threads(_choose_threads(algorithms[0], config, threads))
        engine = make_engine(settings, algorithms[0], env, backend)
    if config.deterministic and (note := nondeterminism_warning(env)):
        engine.notes.append(note)
    if note := _replay_note(of_run.algorithm_config):
        engine.notes.append(note)
    if eval_env is None and env.single_instance and config.eval_episodes:
        engine.notes.append(
            f"{settings.env} can exist only once in a process: its only evaluation follows the "
            f"training"
        )
    return Trainer(of_run, engine, eval_env, Path(), callbacks)


def make_engine(
    settings: Settings, algorithm: Algorithm, env: VecEnv, backend: Backend | None = None
) -> Eager:
    """The fastest engine that algorithm, environment and device allow; its notes say why it is not
    a faster one. backend: of CUDA graphs, by default the device's.
    """
    config = settings.train
    policy_env = AppendPrivilegedState(env) if algorithm.num_state else env
    guards = Guards(settings.env, algorithm, policy_env, config.nan)
    engine, reasons = choose_engine(
        algorithm,
        policy_env,
        guards,
        config.graph,
        config.rollout,
        config.update,
        backend,
        config.asynchronous,
    )
    engine.notes.append("; ".join((f"engine {engine.name}", *reasons)))
    if note := _image_note(algorithm, env):
        engine.notes.append(note)
    return engine


def make_population(
    settings: Settings,
    algorithms: Sequence[Algorithm],
    env: VecEnv,
    earlier: int | None = None,
    backend: Backend | None = None,
) -> Eager:
    """The engine of a population; its notes say why its members are none of the faster ones.
    earlier: threads of a member, in the checkpoint. backend: of CUDA graphs, by default the
    device's.

    On a CPU as many members learn at a time as there are threads; where there are fewer members,
    each has several threads.
    """
    config = settings.train
    first = algorithms[0]
    workers = 1
    if env.device.type == "cpu":
        total = config.threads or torch.get_num_threads()
        workers = min(len(algorithms), total)
        each = total // workers
        if earlier is not None and config.threads is None and earlier <= each:
            each = earlier  # of the checkpoint: they change the last bits of sums
        torch.set_num_threads(each)
    policy_env = AppendPrivilegedState(env) if first.num_state else env
    options = settings.pbt_options()
    engine, reasons = choose_population(
        algorithms,
        policy_env,
        settings.env,
        config.nan,
        config.update,
        workers,
        config.stack,
        config.graph,
        () if options is None else options.spans,
        backend,
        config.deterministic,
    )
    if options:
        board = None
        if config.pbt_leaderboard is not None:
            place, capacity = config.pbt_leaderboard, 2 * len(algorithms)
            if is_url(place):
                board = Leaderboard.at_url(place, capacity)
            else:
                board = Leaderboard(absolute(place), capacity)
        engine.pbt = PopulationBasedTraining(options, engine.members, config.seed, board)
    engine.notes.append("; ".join((f"engine {engine.name}", *reasons)))
    if note := _image_note(first, env):
        engine.notes.append(note)
    return engine


def population_obstacle(settings: Settings, takes_share_seeds: bool) -> str:
    """What of algorithm and environment cannot be trained as a population, "" if nothing."""
    if issubclass(resolve_algorithm(settings.algorithm), BC):
        return (
            f"a population is for algorithms that learn from rewards, not for {settings.algorithm}"
        )
    if not takes_share_seeds:
        return (
            f"a population needs an environment that begins each share of its environments by a "
            f"seed of its own, as tensor tasks and MuJoCo tasks do, {settings.env} does not"
        )
    return ""


def _check_population(settings: Settings, env: VecEnv) -> None:
    """UsageError for what cannot be trained as a population."""
    size = settings.train.population
    if obstacle := population_obstacle(settings, env.takes_share_seeds):
        raise UsageError(f"{obstacle}: train its seeds one after another, --seeds {size}")
    wanted = size * settings.train.num_envs
    if env.num_envs != wanted:
        raise UsageError(
            f"population {size} needs {size} x {settings.train.num_envs} environments, got "
            f"{env.num_envs} existing ones: give the environment by its name"
        )


def _replay_note(config: AlgorithmConfig) -> str:
    """That transitions are lost before the first update, "" if none are."""
    if not isinstance(config, OffPolicyConfig) or config.is_filled:
        return ""
    starts, size = config.learning_starts, config.replay_size
    if starts <= size:
        return ""
    return (
        f"learning_starts {starts} is more than replay_size {size}: the first transitions are "
        f"overwritten before anything is learned from them"
    )


def _image_note(algorithm: Algorithm, env: VecEnv) -> str:
    """What reads images, "" where observations are none."""
    encoders = algorithm.encoder_config()
    if algorithm.reads_bytes and encoders is not None:
        if isinstance(encoders, NetworkConfig) and encoders.trunk:
            return f"images: {encoders.trunk}, scaled to 0 to 1"
        return describe_encoders(algorithm.observation_space, encoders)
    shape = algorithm.observation_space.shape
    if len(shape) - (env.num_agents > 1) != 3:
        return ""
    return (
        f"observations of shape {shape} look like images; they are flattened into rows of "
        f"{math.prod(shape):,} numbers: convolutions read uint8 ones, with network.encoder or "
        f"actor_network.encoder and critic_network.encoder auto, cnn or impala"
    )


def training_env(settings: Settings, device: torch.device, ranks: Alone = ALONE) -> VecEnv:
    """The training environments of a rank with these settings; UsageError if they do not fit into
    memory.
    """
    env_class, named = resolve_env(settings.env)
    is_quick = env_class.is_quick_to_make({**named, **settings.env_options})
    if is_quick:
        check_memory(settings, device)
    config = settings.train
    num_envs = config.num_envs * config.population
    first = ranks.index * num_envs
    seed = config.seed + first  # of simulators without streams by environment
    env = make_env(settings.env, num_envs, device, seed, **settings.env_options)
    env.begin_at(first)
    if problems := attribute_problems(env):
        env.close()
        raise EnvError("; ".join(problems))
    if not is_quick:
        try:
            check_memory(settings, device, env)
        except UsageError:
            env.close()
            raise
    return env


def _check_agents(settings: Settings, env: VecEnv) -> None:
    """UsageError if `env` has several agents and the algorithm is for one."""
    if env.num_agents == 1 or resolve_algorithm(settings.algorithm).takes_agents:
        return
    names = [name for name in algorithm_names() if resolve_algorithm(name).takes_agents]
    hint = f"; for several agents: {', '.join(names)}" if names else ""
    raise UsageError(
        f"{settings.algorithm} is for one agent, {settings.env} has {env.num_agents}{hint}"
    )


def _set_precision(algorithm: Algorithm, precision: str) -> None:
    """Of the networks' products, for this algorithm and for torch's matrix products."""
    device = algorithm.device
    if precision == "tf32" and device.type != "cuda":
        raise UsageError(
            f"precision tf32 needs a GPU, this run is on {device}; use --precision float32 or "
            f"--device cuda"
        )
    torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
    torch.backends.cudnn.allow_tf32 = precision != "float32"  # of convolutions
    algorithm.set_precision(precision)


def _choose_threads(algorithm: Algorithm, config: TrainConfig, earlier: int | None) -> int:
    """In this order: the setting `threads`; the number in the checkpoint, if torch has that many;
    the fastest. A deterministic run takes all, since measurements vary.
    """
    available = torch.get_num_threads()
    if config.threads is not None:
        return config.threads
    if earlier is not None and earlier <= available:
        return earlier
    return available if config.deterministic else _fastest_threads(algorithm)


def _fastest_threads(algorithm: Algorithm) -> int:
    """At most torch's own number, measured by a few forward passes of the largest batch."""
    rows = algorithm.max_batch_rows()
    dtype = torch.uint8 if algorithm.reads_bytes else torch.float32
    obs = torch.zeros(rows, algorithm.num_inputs + algorithm.num_state, dtype=dtype)
    policy_state = algorithm.initial_policy_state(rows)
    return fastest_threads(
        torch.get_num_threads(), torch.set_num_threads, lambda: algorithm.value(obs, policy_state)
    )


def evaluation_env(
    settings: Settings, device: torch.device, is_given: bool = False, ranks: Alone = ALONE
) -> VecEnv | None:
    """A rank's environments for evaluation only. All ranks together have one for each episode, but
    no more than training has and no fewer than one each. None if they cannot exist beside those of
    training. is_given: the user made the training environments.
    """
    config = settings.train
    count = min(config.eval_episodes, config.num_envs)
    if count == 0:
        return None
    env_class, named = resolve_env(settings.env)
    if not is_given and not env_class.exists_once({**named, **settings.env_options}):
        # every rank has one, even if there are fewer episodes
        indices = torch.arange(max(count * config.population, ranks.count))
        mine = indices.tensor_split(ranks.count)[ranks.index]
        first = int(mine[0])
        env = make_env(settings.env, len(mine), device, EVAL_SEED + first, **settings.env_options)
        env.begin_at(first)
        return env
    if config.stop_return is not None:
        raise UsageError(
            f"stop_return needs evaluations during training, but {settings.env} can exist only "
            f"once in a process, or was given as an instance"
        )
    return None


def choose_device(name: str) -> torch.device:
    """As `named_device`; a GPU becomes the current one, on which Triton launches."""
    device = named_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def named_device(name: str) -> torch.device:
    """The torch device called `name`; auto is CUDA if there is a GPU. UsageError if it does not
    exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = find_device(name)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")  # without an index, as tensors have it
    return torch.device("cuda", device.index or 0)  # with an index, as tensors have it
