"""gpurl's own training, set up for the benchmarks, and the columns that describe how it ran."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.results_table import Row
from gpurl.engine.cpu_off_policy import CpuOffPolicy
from gpurl.engine.cpu_ppo import CpuPpo
from gpurl.engine.fused_update import FusedUpdate
from gpurl.engine.graphs import CudaGraphs
from gpurl.engine.persistent import PersistentRollout
from gpurl.engine.population import Population
from gpurl.envs.vec_env import VecEnv
from gpurl.run.settings import Settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer

HIDDEN, EPOCHS, MINIBATCHES = (64, 64), 4, 4


def ready_trainer(settings: Settings, device: torch.device, env: VecEnv | None = None) -> Trainer:
    """A trainer with `settings`, set up like that of `gpurl.train` and ready for `iterate`; without
    evaluation, files and display.
    """
    trainer = make_trainer(settings, device, env=env)
    trainer.start()
    return trainer


def warm_up(trainer: Trainer) -> None:
    """On a GPU iterate until everything is compiled and captured, so that none of it is
    measured.
    """
    for _ in range(4 if trainer.env.device.type == "cuda" else 0):
        trainer.iterate()


def common_settings(num_envs: int, horizon: int) -> dict[str, Any]:
    """The settings that all measurements of training share."""
    return {
        "num_envs": num_envs,
        "horizon": horizon,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "network": {"hidden": list(HIDDEN)},
    }


def engine_columns(trainer: Trainer) -> Row:
    """The columns of the precision, CUDA graphs, rollout and update that `trainer` uses; call
    `warm_up` first.
    """
    engine = trainer.engine
    learning = engine.members[0] if isinstance(engine, Population) else engine
    update = "fused" if isinstance(learning, FusedUpdate) else "autograd"
    return {
        "precision": trainer.settings.train.precision,
        "graph": getattr(engine.stages, "level", "") or "off",
        "rollout": "persistent" if isinstance(engine, PersistentRollout) else "steps",
        "update": "C" if isinstance(learning, CpuPpo | CpuOffPolicy) else update,
    }


def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """`function` as a CUDA graph, as training replays it: Python takes longer to launch most
    kernels than a GPU to run them.
    """
    graphs = CudaGraphs(device)
    graphs.warm_up(function)
    return graphs.capture(function)[0]
