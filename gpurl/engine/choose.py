"""Chooses the engine of a run: the only place that asks for device, backend, head and memory."""

from collections.abc import Collection, Sequence

import torch

from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.algorithms.ppo import PPO
from gpurl.engine.asynchronous import (
    Asynchronous,
    LearningStream,
    LearningThread,
    asynchronous_obstacle,
)
from gpurl.engine.cpu_off_policy import CpuOffPolicy, cpu_off_policy_obstacle
from gpurl.engine.cpu_ppo import CpuPpo, cpu_ppo_obstacle
from gpurl.engine.eager import Eager
from gpurl.engine.fused_update import FusedUpdate, PersistentFused, fused_update_obstacle
from gpurl.engine.graphs import Backend, CudaGraphs, Graphed
from gpurl.engine.persistent import PersistentRollout, persistent_obstacle
from gpurl.engine.population import Population, Share
from gpurl.engine.stacked import StackedPopulation, stacked_obstacle
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError
from gpurl.guards.guards import Guards
from gpurl.kernels import c_library

Reasons = list[tuple[str, str]]  # (a faster engine, why it cannot run)


def choose_engine(
    algorithm: Algorithm,
    env: VecEnv,
    guards: Guards,
    graph: str = "auto",
    rollout: str = "auto",
    update: str = "auto",
    backend: Backend | None = None,
    asynchronous: bool = False,
) -> tuple[Eager, list[str]]:
    """(the engine, why it is none of the faster ones).

    graph, rollout, update, asynchronous: as `TrainConfig` has them. backend: of CUDA graphs, by
    default that of the device. UsageError if the algorithm cannot learn beside collecting and
    should.
    """
    reasons: Reasons = []
    if (num_ranks := algorithm.ranks.count) > 1:
        if asynchronous:
            raise UsageError(
                f"asynchronous is for one process, this run has {num_ranks}: leave out one of them"
            )
        engine = Eager(algorithm, env, guards)
        reason = f"{num_ranks} processes average their gradients before each step"
        reasons.append(("C, fused update kernels, persistent rollout kernel", reason))
        # no machine with several GPUs has shown yet that graphs hold what they exchange
        if graph == "auto" and env.device.type == "cuda":
            reason = "several processes take them by --graph full or policy only"
            reasons.append(("CUDA graphs", reason))
            graph = "off"
    elif asynchronous:
        engine = _beside(algorithm, env, guards, reasons)
    else:
        engine = _without_graphs(algorithm, env, guards, graph, rollout, update, reasons)
    if graph == "off":
        return engine, _texts(reasons)
    if backend is None and env.device.type == "cuda":
        backend = CudaGraphs(env.device)
    if backend is None:
        reasons.append(("CUDA graphs", f"the device is {env.device}"))
        return engine, _texts(reasons)
    levels = ["policy"] if graph == "policy" else ["full", "policy"]
    learning_backend: Backend | None = None
    if isinstance(engine, PersistentRollout):
        levels = ["full"]  # the other level steps the environment
    if isinstance(engine, Asynchronous):
        levels = ["policy"]
        learning_backend = backend.another()
    engine.stages = Graphed(engine, backend, levels, learning_backend)
    return engine, _texts(reasons)


def choose_population(
    algorithms: Sequence[Algorithm],
    env: VecEnv,
    env_name: str,
    nan: str,
    update: str = "auto",
    workers: int = 1,
    stack: str = "auto",
    graph: str = "auto",
    explored: Collection[str] = (),
    backend: Backend | None = None,
    deterministic: bool = False,
) -> tuple[Population, list[str]]:
    """(the engine of a population, why its members are none of the faster ones).

    env: an equal share for each of `algorithms`; env_name, nan: as `Guards` has them. workers:
    members that learn at a time, on a CPU. stack, graph: as `TrainConfig` has them. explored:
    settings that population based training changes. backend: of CUDA graphs, by default that of the
    device. deterministic: members that may be in turn are, as a resumed stack is equal up to
    rounding only, and its priorities and atoms have no fixed order. UsageError if members cannot be
    stacked and should.
    """
    reasons: Reasons = []
    shares = [Share(env, algorithm.num_envs) for algorithm in algorithms]
    guards = [Guards(env_name, each, share, nan) for each, share in zip(algorithms, shares)]
    # side by side
    is_cuda = env.device.type == "cuda"
    if stack == "on" or (stack == "auto" and is_cuda):
        obstacle = stacked_obstacle(algorithms, explored, knows_only=stack == "auto")
        if deterministic and stack == "auto":
            obstacle = "deterministic members keep their bits after a resume in turn only"
        if update == "fused":
            obstacle = obstacle or "update fused has kernels of each member"
        if obstacle and stack == "on":
            raise UsageError(f"stack on is not possible: {obstacle}; take --stack off")
        if not obstacle:
            engines = [Eager(*each) for each in zip(algorithms, shares, guards)]
            if backend is None and is_cuda and graph != "off":
                backend = CudaGraphs(env.device)
            if backend is None and graph != "off":
                reasons.append(("CUDA graphs", f"the device is {env.device}"))
            return StackedPopulation(engines, env, backend, ["full", "policy"]), _texts(reasons)
        reasons.append(("stack of members", obstacle))
    # in turn; the reasons are the same for all
    members = list[Eager]()
    for each in zip(algorithms, shares, guards):
        own: Reasons = []
        members.append(_without_graphs(*each, "off", "steps", update, own))
    threads = torch.get_num_threads()
    if is_cuda:
        own.append(("CUDA graphs", "a population launches for each member in turn"))
        workers = 1
    return Population(members, env, workers, threads), _texts(reasons + own)


def _texts(reasons: Reasons) -> list[str]:
    """`no CUDA graphs: the device is cpu`; what has the same reason stands together."""
    engines: dict[str, list[str]] = {}
    for engine, reason in reasons:
        engines.setdefault(reason, []).append(engine)
    return [f"no {', '.join(names)}: {reason}" for reason, names in engines.items()]


def _beside(algorithm: Algorithm, env: VecEnv, guards: Guards, reasons: Reasons) -> Eager:
    """The engine that learns beside collecting."""
    if obstacle := asynchronous_obstacle(algorithm):
        raise UsageError(f"asynchronous is not possible: {obstacle}")
    assert isinstance(algorithm, PPO)
    is_cuda = env.device.type == "cuda"
    if not is_cuda and (obstacle := cpu_ppo_obstacle(algorithm)):
        reasons.append(("C", obstacle))
    beside = LearningStream(env.device) if is_cuda else LearningThread()
    return Asynchronous(algorithm, env, guards, beside)


def _without_graphs(
    algorithm: Algorithm,
    env: VecEnv,
    guards: Guards,
    graph: str,
    rollout: str,
    update: str,
    reasons: Reasons,
) -> Eager:
    """The engine without CUDA graphs."""
    # one kernel for the whole rollout, three for a minibatch step
    is_fused = False
    if update != "autograd":
        obstacle = fused_update_obstacle(algorithm)
        is_fused = not obstacle
        if obstacle:
            reasons.append(("fused update kernels", obstacle))
    if rollout != "steps" and graph != "policy":
        if not (obstacle := persistent_obstacle(algorithm, env)):
            assert isinstance(algorithm, PPO)
            assert isinstance(env, TorchEnv)
            engine = PersistentFused if is_fused else PersistentRollout
            return engine(algorithm, env, guards)
        reasons.append(("persistent rollout kernel", obstacle))
    if is_fused:
        assert isinstance(algorithm, PPO)
        return FusedUpdate(algorithm, env, guards)
    if env.device.type != "cpu":
        return Eager(algorithm, env, guards)
    # C on a CPU
    if isinstance(algorithm, PPO):
        if not (obstacle := cpu_ppo_obstacle(algorithm)):
            return CpuPpo(algorithm, env, guards)
        reasons.append(("C", obstacle))
    if isinstance(algorithm, OffPolicy):
        if not (obstacle := cpu_off_policy_obstacle(algorithm)):
            return CpuOffPolicy(algorithm, env, guards)
        reasons.append(("C", obstacle))
    return Eager(algorithm, env, guards)


def machine_engines() -> list[tuple[str, str]]:
    """(engine, why this machine cannot run it or nothing), the slowest first."""
    no_gpu = "" if torch.cuda.is_available() else "there is no GPU that torch can use"
    library = c_library.load()
    in_c = "" if library.functions is not None else f"it could not be built: {library.why}"
    return [
        ("eager", ""),
        ("C for PPO on a CPU", in_c),
        ("C for off-policy algorithms on a CPU", in_c),
        ("CUDA graphs", no_gpu),
        ("persistent rollout", no_gpu),
        ("fused update", no_gpu),
    ]
