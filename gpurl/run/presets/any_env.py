"""Presets of every environment, of an algorithm with replay buffer, and of those of Gymnasium."""

from gpurl.run.presets.table import Preset, Table

REPLAYING = ("ddpg", "td3", "sac", "discrete_sac", "redq", "mod_sac", "dqn", "rainbow", "vdn")
# a replay buffer of single steps learns best from few environments, with 8 updates of 256 a step
FEW_ENVS: Preset = {"num_envs": 64, "updates": 8, "total_steps": 1_000_000}
# the sizes of FlashSAC's authors for robots on a GPU (scripts/run_isaaclab.sh there)
MANY_FLASH: Preset = {
    "num_envs": 1024,
    "horizon": 1,
    "updates": 2,
    "batch_size": 2048,
    "learning_starts": 100_000,
    "replay_size": 10_000_000,
    "total_steps": 50_000_000,
}
# and for Gymnasium's MuJoCo tasks (scripts/run_mujoco.sh there)
FEW_FLASH: Preset = {
    "num_envs": 1,
    "horizon": 2,
    "updates": 2,
    "batch_size": 512,
    "learning_starts": 10_000,
    "total_steps": 1_000_000,
}

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
