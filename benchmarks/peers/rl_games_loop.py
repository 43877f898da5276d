"""rl_games' Runner on Chasing or Pursuit; it uses torch.compile by default.

Its Runner lets CUDA compute float32 products in TF32. It splits the rollout into minibatches
without shuffling.
"""

import dataclasses
import tempfile
from typing import Any

from rl_games.common.algo_observer import IsaacAlgoObserver
from rl_games.torch_runner import Runner

from benchmarks.peers.job import TENSOR_TASK, Job, Outcome, rollouts
from benchmarks.peers.timed_env import timed_env
from gpurl.adapters import to_rl_games

# its documentation calls max-autotune the fastest; its examples use bf16
MODES: dict[str, dict[str, Any]] = {
    "default": {"torch_compile": True},
    "eager": {"torch_compile": False},
    "max-autotune": {"torch_compile": "max-autotune"},
    "bf16": {"torch_compile": "max-autotune", "mixed_precision": True},
}


def tensor_task(job: Job) -> Outcome:
    """rl_games' continuous A2CAgent, which is its PPO."""
    env = timed_env(job)
    to_rl_games(env, "chasing")
    runner = Runner(IsaacAlgoObserver())
    with tempfile.TemporaryDirectory() as folder:
        runner.load_config(settings(job, folder))
        runner.run({"train": True})
    return dataclasses.replace(env.outcome(), note="TF32" if job.device.startswith("cuda") else "")


def settings(job: Job, folder: str) -> dict[str, Any]:
    """The content of rl_games' YAML file, with the common hyper-parameters."""
    space = {
        "mu_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_activation": "None",
        "sigma_init": {"name": "const_initializer", "val": 0},
        "fixed_sigma": True,
    }
    mlp = {
        "units": list(job.hidden),
        "activation": job.activation,
        "initializer": {"name": "default"},
    }
    config = {
        # sizes
        "num_actors": job.num_envs,
        "horizon_length": job.horizon,
        "mini_epochs": job.epochs,
        "max_epochs": rollouts(job),
        "minibatch_size": job.num_envs * job.horizon // job.minibatches,
        # learning
        "gamma": TENSOR_TASK["gamma"],
        "tau": TENSOR_TASK["gae_lambda"],
        "e_clip": TENSOR_TASK["clip_range"],
        "entropy_coef": TENSOR_TASK["entropy_coef"],
        "critic_coef": 2 * TENSOR_TASK["value_coef"],
        "clip_value": False,
        "bound_loss_type": "none",
        "bounds_loss_coef": 0.0,
        "learning_rate": TENSOR_TASK["learning_rate"],
        "lr_schedule": None,
        "grad_norm": TENSOR_TASK["max_grad_norm"],
        "truncate_grads": True,
        "normalize_input": False,
        "normalize_value": False,
        "normalize_advantage": True,
        "value_bootstrap": True,
        "reward_shaper": {"scale_value": 1.0},
        # files and device
        "name": "chasing",
        "env_name": "chasing",
        "train_dir": folder,
        "print_stats": False,
        "save_best_after": 1_000_000,
        "device": job.device,
        **MODES[job.mode],
    }
    return {
        "seed": job.seed + 1,  # 0 means no seed
        "torch_threads": 0,  # OMP_NUM_THREADS counts
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": True,
            "space": {"continuous": space},
            "mlp": mlp,
        },
        "config": config,
    }
