"""Presets of environments that have none of their own: of any, and of any of Gymnasium's."""

from gpurl.run.presets.bases import FEW_FLASH
from gpurl.run.presets.table import Preset, Table

REPLAYING = ("ddpg", "td3", "sac", "discrete_sac", "redq", "mod_sac", "dqn", "rainbow", "vdn")
# a replay buffer of single steps learns best from few environments, with 8 updates of 256 a step
FEW_ENVS: Preset = {"num_envs": 64, "updates": 8, "total_steps": 1_000_000}

PRESETS: Table = {
    **{(name, "*"): FEW_ENVS for name in REPLAYING},
    ("redq", "*"): FEW_ENVS | {"updates": 20, "policy_delay": 20},
    **{
        (name, "gymnasium_cpu"): {"num_envs": 8, "total_steps": 200_000}
        for name in (*REPLAYING, "bc")
    },
    **{(name, "gymnasium_cpu"): FEW_ENVS for name in ("fast_td3", "fast_sac")},
    ("flash_sac", "*"): FEW_ENVS | {"horizon": 1, "updates": 8},
    ("flash_sac", "gymnasium_cpu"): FEW_FLASH,
    ("ppo", "gymnasium_cpu"): {
        "num_envs": 8,
        "horizon": 256,
        "epochs": 10,
        "minibatches": 8,
        "total_steps": 1_000_000,
        "learning_rate": 1e-3,
        "schedule": "linear",
    },
    ("a2c", "gymnasium_cpu"): {"num_envs": 16, "total_steps": 1_000_000, "schedule": "linear"},
    ("pqn", "gymnasium_cpu"): {"num_envs": 32, "horizon": 64, "total_steps": 500_000},
}
