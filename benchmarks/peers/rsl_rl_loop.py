"""rsl_rl's OnPolicyRunner on Chasing, with its defaults or with torch.compile, its fastest
documented mode.
"""

from typing import Any

from rsl_rl.runners import OnPolicyRunner

from benchmarks.peers.job import CHASING, EPOCHS, HIDDEN, MINIBATCHES, Job, Outcome, rollouts
from benchmarks.peers.timed_chasing import TimedChasing
from gpurl.adapters import to_rsl_rl

# it refuses the modes with CUDA graphs
MODES = {"default": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def chasing(job: Job) -> Outcome:
    """rsl_rl's OnPolicyRunner."""
    env = TimedChasing(job)
    runner = OnPolicyRunner(to_rsl_rl(env), settings(job), log_dir=None, device=job.device)
    runner.learn(rollouts(job))
    return env.outcome()


def settings(job: Job) -> dict[str, Any]:
    """The settings of rsl_rl, with the common hyper-parameters."""
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    model = {"class_name": "MLPModel", "hidden_dims": list(HIDDEN), "activation": job.activation}
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": EPOCHS,
        "num_mini_batches": MINIBATCHES,
        "clip_param": CHASING["clip_range"],
        "gamma": CHASING["gamma"],
        "lam": CHASING["gae_lambda"],
        "value_loss_coef": CHASING["value_coef"],
        "entropy_coef": CHASING["entropy_coef"],
        "learning_rate": CHASING["learning_rate"],
        "max_grad_norm": CHASING["max_grad_norm"],
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
