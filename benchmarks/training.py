"""The product's own training, set up as the benchmarks measure it, and the columns that tell how it
was run.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.results_table import Row
from gpurl.engine.graphs import CudaGraphs
from gpurl.envs.vec_env import VecEnv
from gpurl.run.settings import Settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer

HIDDEN, EPOCHS, MINIBATCHES = (64, 64), 4, 4


def ready_trainer(settings: Settings, device: torch.device, env: VecEnv | None = None) -> Trainer:
    """The product's trainer by `settings`, set up as gpurl.api.run does and ready for `iterate`;
    without evaluation, files and screen.
    """
    trainer = make_trainer(settings, device, env=env)
    trainer.start()
    return trainer


def warm(trainer: Trainer) -> None:
    """On a GPU iterate until everything is compiled and captured, so that none of it is
    measured.
    """
    for _ in range(4 if trainer.env.device.type == "cuda" else 0):
        trainer.iterate()


def shape(size: int, horizon: int) -> dict[str, Any]:
    """The settings that all measurements of training share."""
    return {
        "num_envs": size,
        "horizon": horizon,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "network": {"hidden": list(HIDDEN)},
    }


def how_trained(trainer: Trainer) -> Row:
    """The columns that tell how `trainer` really steps and learns; call `warm` first."""
    engine = trainer.engine
    rollout = "persistent" if engine.name == "persistent" else "steps"
    return {
        "precision": trainer.settings.train.precision,
        "graph": getattr(engine.stages, "level", "") or "off",
        "rollout": rollout,
    }


def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """`function` as a training replays it: on a GPU Python takes longer to launch than most kernels
    to run.
    """
    graphs = CudaGraphs(device)
    graphs.warm_up(function)
    return graphs.capture(function)[0]
