"""Runs that take a fraction of a second, in this process or in one of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpurl
from gpurl.api import train

ROOT = Path(__file__).resolve().parent.parent
SMALL: dict[str, Any] = {
    "num_envs": 16, "horizon": 8, "minibatches": 2, "eval_episodes": 4, "quiet": True, "device": "cpu", "network": {"hidden": [16]},
    "log_every": 0.0,
}  # fmt: skip
ITERATION = 16 * 8


def small_run(folder: Path, iterations: int, algorithm: str = "ppo", env: str = "pendulum", **changes: Any) -> gpurl.Run:
    minibatches = {"minibatches": 1} if algorithm == "a2c" else {}
    return train(algorithm, env, **{**SMALL, "run_dir": str(folder), "total_steps": iterations * ITERATION, **minibatches, **changes})


def start(arguments: list[str], **options: Any) -> "subprocess.Popen[str]":
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "gpurl.cli", *arguments],
        cwd=options.pop("cwd", ROOT),
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
