"""Makes an algorithm from a checkpoint alone: for a policy, a teacher, or a run that begins with
the parts of another run."""

from pathlib import Path
from typing import NamedTuple

import torch

from gpurl.algorithms import make_algorithm, resolve_algorithm
from gpurl.algorithms.base import Algorithm, AlgorithmConfig
from gpurl.algorithms.bc import BCConfig
from gpurl.algorithms.symmetry import find_mirror
from gpurl.checkpoints.folders import (
    Manifest,
    check_exists,
    list_checkpoints,
    load_checkpoint,
)
from gpurl.checkpoints.run_parts import LARGE_PARTS, Parts
from gpurl.checkpoints.spaces import space_from_dict
from gpurl.checkpoints.state_files import State
from gpurl.engine.threads import refuse_fork
from gpurl.errors import CheckpointError
from gpurl.run.best_members import best_weights
from gpurl.run.init_from import take_parts
from gpurl.run.members import choose_member, member_configs
from gpurl.run.own_algorithm import explain_own_errors
from gpurl.run.settings import build_algorithm_config
from gpurl.run.task_spaces import TaskSpaces, read_task

NOT_OF_A_POLICY = ("training", "env", "replay")


class Loaded(NamedTuple):
    """An algorithm from a checkpoint."""

    algorithm: Algorithm
    settings: State  # of its run
    step: int  # environment steps that it was trained for
    deployment: State  # what its environment told (`gpurl.envs.deployment`)
    member: int  # of a population, else 0
    task: TaskSpaces | None = None  # of a Gymnasium environment


def load_algorithm(
    path: str | Path,
    device: str = "cpu",
    num_envs: int = 1,
    best: bool = True,
    member: int | None = None,
) -> Loaded:
    """From a checkpoint folder, or from the best checkpoint of a run folder (best=False: the
    latest). member: of a population, by default the best one. UsageError if there is nothing, and
    in a fork that would hang.
    """
    check_exists(Path(path))
    parts, manifest = load_checkpoint(Path(path), device, best=best, without=NOT_OF_A_POLICY)
    bests = _best_members(Path(path), parts, device) if best else {}
    return _loaded(path, parts, manifest, device, num_envs, member, bests)


def load_members(
    path: str | Path,
    device: str = "cpu",
    num_envs: int = 1,
    best: bool = True,
    learning: bool = False,
) -> list[Loaded]:
    """As `load_algorithm`, all members of a population that are not lost, the best one first.
    learning: with their optimisers and the settings that selection has changed, all of the same
    checkpoint.
    """
    check_exists(Path(path))
    without = [name for name in NOT_OF_A_POLICY if not (learning and name == "training")]
    parts, manifest = load_checkpoint(Path(path), device, best=best, without=without)
    bests = _best_members(Path(path), parts, device) if best and not learning else {}
    first = _loaded(path, parts, manifest, device, num_envs, None, bests)
    lost = parts["trainer"].get("lost", {})
    others = [
        _loaded(path, parts, manifest, device, num_envs, k, bests)
        for k in range(first.settings.get("population", 1))
        if k != first.member and str(k) not in lost
    ]
    members = [first, *others]
    for each in members if learning and len(members) > 1 else ():
        try:
            each.algorithm.load_learning(parts["training"][str(each.member)])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} holds no learning state to average: {error}") from None
    return members


def _best_members(path: Path, parts: Parts, device: str) -> State:
    """Each member of a run's population at the best of its evaluations, as the newest checkpoint
    has them: the one that BEST names is that of the best member. {} of one agent, and of a
    checkpoint that was given directly. parts: of the best checkpoint.
    """
    if "best" not in parts or not list_checkpoints(path):
        return {}
    return load_checkpoint(path, device, without=LARGE_PARTS)[0].get("best", {})


def _loaded(
    path: str | Path,
    parts: Parts,
    manifest: Manifest,
    device: str,
    num_envs: int,
    member: int | None,
    bests: State,
) -> Loaded:
    refuse_fork(torch.get_num_threads(), trains=False)
    # the file may be another program's: every misfit is a CheckpointError
    try:
        meta = parts["meta"]
        settings = meta["settings"]
        population = settings.get("population", 1)
        chosen = choose_member(member, population, parts["trainer"])
        shared = build_algorithm_config(settings["algorithm"], settings)
        config = member_configs(shared, population, settings.get("member", {}))[chosen]
        state_space = space_from_dict(meta["state_space"]) if meta["state_space"] else None
        spaces = (
            space_from_dict(meta["observation_space"]),
            space_from_dict(meta["action_space"]),
        )
        with explain_own_errors(resolve_algorithm(settings["algorithm"])):
            algorithm = make_algorithm(
                settings["algorithm"], config, *spaces, num_envs, device, state_space=state_space
            )
        model = parts["model"] if population == 1 else parts["model"][str(chosen)]
        model, step = best_weights(bests, chosen) or (model, manifest["step"])
        algorithm.load_state_dict(model)
        deployment = dict(meta.get("deployment", {}))  # converted policies have none
        task = read_task(meta, algorithm)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}, step {manifest['step']}, is not a policy that this version can read: {error}"
        ) from None
    return Loaded(algorithm, settings, step, deployment, chosen, task)


def load_teachers(config: AlgorithmConfig, num_envs: int, device: torch.device) -> list[Algorithm]:
    """The teachers that BC's settings name; none of any other algorithm's."""
    names = config.teacher if isinstance(config, BCConfig) else ()
    return [_load_named("teacher", name, device, num_envs)[0] for name in names]


def load_symmetry(algorithm: Algorithm, env: object) -> None:
    """Give the algorithm the mirror that its settings name, of `env` or of a module."""
    if name := getattr(algorithm.config, "symmetry", ""):
        algorithm.set_symmetry(find_mirror(name, env), name)


def begin_from_run(algorithm: Algorithm) -> list[str]:
    """Begin with the parts of the run that the settings name (`init_from`), if they name one, for a
    new run; a resumed run has its own. Returns lines for the user.
    """
    path = algorithm.config.init_from
    if path is None:
        return []
    source, step = _load_named("init_from", path, algorithm.device)
    return take_parts(algorithm, source, f"{path}, step {step:,}")


def _load_named(
    option: str, path: str, device: torch.device, num_envs: int = 1
) -> tuple[Algorithm, int]:
    """(the algorithm at `path`, its steps); errors name the option that asked for it."""
    check_exists(Path(path), option)
    try:
        loaded = load_algorithm(path, str(device), num_envs)
    except CheckpointError as error:
        raise type(error)(
            f"{option} {path} gives no policy: {error}; a run has one from its first checkpoint on"
        ) from error
    return loaded.algorithm, loaded.step
