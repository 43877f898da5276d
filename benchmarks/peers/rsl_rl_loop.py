"""rsl_rl's OnPolicyRunner on Chasing or Pursuit, with its defaults or with torch.compile, its
fastest documented mode.
"""

from typing import Any

from rsl_rl.runners import OnPolicyRunner

from benchmarks.peers.job import TENSOR_TASK, Job, Outcome, rollouts
from benchmarks.peers.timed_env import timed_env
from gpurl.adapters import to_rsl_rl

# it refuses the modes with CUDA graphs
MODES = {"default": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def tensor_task(job: Job) -> Outcome:
    """rsl_rl's OnPolicyRunner."""
    env = timed_env(job)
    runner = OnPolicyRunner(to_rsl_rl(env), settings(job), log_dir=None, device=job.device)
    runner.learn(rollouts(job))
    return env.outcome()


def settings(job: Job) -> dict[str, Any]:
    """The settings of rsl_rl, with the common hyper-parameters."""
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    model = {
        "class_name": "MLPModel",
        "hidden_dims": list(job.hidden),
        "activation": job.activation,
    }
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": job.epochs,
        "num_mini_batches": job.minibatches,
        "clip_param": TENSOR_TASK["clip_range"],
        "gamma": TENSOR_TASK["gamma"],
        "lam": TENSOR_TASK["gae_lambda"],
        "value_loss_coef": TENSOR_TASK["value_coef"],
        "entropy_coef": TENSOR_TASK["entropy_coef"],
        "learning_rate": TENSOR_TASK["learning_rate"],
        "max_grad_norm": TENSOR_TASK["max_grad_norm"],
        "use_clipped_value_loss": False,
        "schedule": "fixed",
    }
    return {
        "num_steps_per_env": job.horizon,
        "save_interval": 1_000_000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": model | {"distribution_cfg": distribution},
        "critic": dict(model),
        "algorithm": algorithm,
        "torch_compile_mode": MODES[job.mode],
    }
