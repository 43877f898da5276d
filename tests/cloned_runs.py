"""Datasets of what a function of observations does, and runs that clone it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gpurl
from gpurl.api import train


def balance(obs: Tensor) -> Tensor:
    """Pushes the cart to where the pole falls: 500 steps from every start."""
    return (obs @ torch.tensor([0.1, 0.5, 5.0, 1.0]) > 0).long()


def record(path: Path, env: Any, act: Callable[[Tensor], Tensor], steps: int) -> str:
    """A dataset of what `act` does."""
    obs, _ = env.reset(seed=1)
    seen, done = [], []
    for _ in range(steps):
        seen.append(obs)
        done.append(act(obs))
        obs = env.step(done[-1]).obs
    np.savez(path, obs=torch.cat(seen).numpy(), action=torch.cat(done).numpy())
    return str(path)


def clone(folder: Path, env: str, **changes: Any) -> gpurl.Run:
    shape = {
        "num_envs": 16,
        "threads": 1,
        "learning_rate": 3e-3,
        "schedule": "linear",
        "actor_network": {"hidden": [64, 64]},
    }
    fixed = {"device": "cpu", "quiet": True, "run_dir": str(folder), "eval_every": 10**9}
    return train(
        "bc",
        env,
        **(
            shape
            | {"updates": 16, "total_steps": 16 * 60, "learning_starts": 256}
            | fixed
            | changes
        ),
    )
