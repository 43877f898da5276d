"""An algorithm out of a checkpoint, by itself: what a policy, a teacher and a start from another
run's actor are made of."""

from pathlib import Path
from typing import Any

from gpurl.algorithms import make_algorithm
from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.bc import BC
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.checkpoints.spaces import space_from_dict
from gpurl.errors import CheckpointError
from gpurl.run.settings import build_algorithm_config


def load_algorithm(
    path: str | Path, device: str = "cpu", num_envs: int = 1, best: bool = True
) -> tuple[Algorithm, dict[str, Any]]:
    """(the algorithm of a run folder, its best evaluated checkpoint or with best=False its latest,
    or of one checkpoint folder; the settings of its run).
    """
    parts, manifest = load_checkpoint(Path(path), device, best=best)
    try:
        meta, settings = parts["meta"], parts["meta"]["settings"]
        obs_space, action_space = (
            space_from_dict(meta[name]) for name in ("observation_space", "action_space")
        )
        config = build_algorithm_config(settings["algorithm"], settings)
        state_space = space_from_dict(meta["state_space"]) if meta["state_space"] else None
        algorithm = make_algorithm(
            settings["algorithm"],
            config,
            obs_space,
            action_space,
            num_envs,
            device,
            state_space=state_space,
        )
        algorithm.load_state_dict(parts["model"])
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}, step {manifest['step']}, is not a policy this version can read: {error}"
        ) from None
    return algorithm, settings


def load_teacher(algorithm: Algorithm) -> None:
    """Load the teacher that its settings name; before its buffer is made."""
    if isinstance(algorithm, BC) and algorithm.config.teacher is not None:
        device, num_envs = str(algorithm.device), algorithm.num_envs
        algorithm.set_teacher(load_algorithm(algorithm.config.teacher, device, num_envs)[0])


def load_initial_actor(algorithm: Algorithm) -> None:
    """Load the actor that its settings name; a resumed run needs it no more."""
    if isinstance(algorithm, OffPolicyActorCritic) and algorithm.config.actor_from is not None:
        path = algorithm.config.actor_from
        algorithm.copy_actor_from(load_algorithm(path, str(algorithm.device))[0], path)
