"""Makes an algorithm from a checkpoint alone: for a policy, a teacher, or a run that starts from
another run's actor."""

from pathlib import Path
from typing import NamedTuple

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.bc import BC
from gpurl.algorithms.symmetry import find_mirror
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.checkpoints.spaces import space_from_dict
from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError
from gpurl.run.settings import build_algorithm_config


class Loaded(NamedTuple):
    """An algorithm from a checkpoint."""

    algorithm: Algorithm
    settings: State  # of its run
    step: int  # environment steps that it was trained for
    deployment: State  # what its environment told (`gpurl.envs.deployment`)


def load_algorithm(
    path: str | Path, device: str = "cpu", num_envs: int = 1, best: bool = True
) -> Loaded:
    """From a checkpoint folder, or from the best checkpoint of a run folder (best=False: the
    latest).
    """
    parts, manifest = load_checkpoint(Path(path), device, best=best)
    # the file may be another program's: every misfit is a CheckpointError
    try:
        meta = parts["meta"]
        settings = meta["settings"]
        algorithm = make_algorithm(
            settings["algorithm"],
            build_algorithm_config(settings["algorithm"], settings),
            space_from_dict(meta["observation_space"]),
            space_from_dict(meta["action_space"]),
            num_envs,
            device,
            state_space=space_from_dict(meta["state_space"]) if meta["state_space"] else None,
        )
        algorithm.load_state_dict(parts["model"])
        deployment = dict(meta.get("deployment", {}))  # converted policies have none
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}, step {manifest['step']}, is not a policy that this version can read: {error}"
        ) from None
    return Loaded(algorithm, settings, manifest["step"], deployment)


def load_teacher(algorithm: Algorithm) -> None:
    """Load the teacher that BC's settings name; call it before the buffer is made."""
    if isinstance(algorithm, BC) and algorithm.config.teacher is not None:
        teacher, *_ = load_algorithm(
            algorithm.config.teacher, str(algorithm.device), algorithm.num_envs
        )
        algorithm.set_teacher(teacher)


def load_symmetry(algorithm: Algorithm, env: object) -> None:
    """Give the algorithm the mirror that its settings name, of `env` or of a module."""
    if name := getattr(algorithm.config, "symmetry", ""):
        algorithm.set_symmetry(find_mirror(name, env), name)


def load_initial_actor(algorithm: Algorithm) -> None:
    """Load the actor that the settings name, for a new run; a resumed run has its own."""
    if isinstance(algorithm, OffPolicyActorCritic) and algorithm.config.actor_from is not None:
        path = algorithm.config.actor_from
        algorithm.copy_actor_from(load_algorithm(path, str(algorithm.device))[0], path)
