"""Settings that are known to train an environment well, found by runs of this program; the command line and files win over them."""

from typing import Any

PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "chasing"): {"num_envs": 4096, "horizon": 32, "minibatches": 16, "gamma": 0.99, "initial_std": 0.5, "entropy_coef": 0.005},
    ("ppo", "cart_pole"): {"num_envs": 1024, "horizon": 16, "total_steps": 1_000_000, "learning_rate": 2e-3, "schedule": "linear"},
    ("a2c", "cart_pole"): {"num_envs": 16, "horizon": 16, "total_steps": 500_000, "learning_rate": 1e-3, "schedule": "linear"},
    ("ppo", "pendulum"): {"num_envs": 1024, "horizon": 16, "total_steps": 1_000_000, "gamma": 0.95},
    ("ppo", "gymnasium_cpu"): {
        **{"num_envs": 8, "horizon": 256, "epochs": 10, "minibatches": 8, "total_steps": 1_000_000},
        **{"learning_rate": 1e-3, "schedule": "linear"},
    },
    ("a2c", "gymnasium_cpu"): {"num_envs": 16, "total_steps": 1_000_000, "schedule": "linear"},
}


def preset(algorithm: str, env: str) -> dict[str, Any]:
    """The preset for `algorithm` on `env`, {} where there is none; what stands behind a colon, a task of an adapter, shares one."""
    return dict(PRESETS.get((algorithm, env.partition(":")[0]), {}))
