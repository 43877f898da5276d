"""Presets of the MuJoCo tasks: for many environments, and for few (a CPU, or up to MAX_FEW)."""

from gpurl.run.presets.bases import FEW_FLASH, MANY_FLASH
from gpurl.run.presets.table import Preset, Table

MUJOCO_TASKS = (
    *("half_cheetah", "hopper", "walker2d", "ant", "swimmer", "humanoid", "humanoid_standup"),
    *("inverted_pendulum", "inverted_double_pendulum", "reacher", "pusher"),
)
ANY_MUJOCO = (*MUJOCO_TASKS, "mujoco")  # the last one: a task of one's own

# ---- many environments ----

# as in rsl_rl and mjlab: many environments, short rollouts, a learning rate that follows the KL
# divergence
LEGGED: Preset = {
    "num_envs": 4096,
    "horizon": 24,
    "epochs": 5,
    "minibatches": 8,
    "network": {"hidden": [256, 128, 64], "activation": "elu"},
}
ARM = LEGGED | {"gamma": 0.97, "total_steps": 20_000_000}

PRESETS: Table = {
    **{("flash_sac", name): MANY_FLASH for name in MUJOCO_TASKS},
    ("ppo", "inverted_pendulum"): {"num_envs": 256, "horizon": 16, "total_steps": 300_000},
    ("ppo", "inverted_double_pendulum"): {"num_envs": 256, "horizon": 32, "total_steps": 2_000_000},
    **{
        ("ppo", name): LEGGED | {"total_steps": 50_000_000}
        for name in ("hopper", "walker2d", "swimmer", "half_cheetah")
    },
    ("ppo", "ant"): LEGGED | {"total_steps": 100_000_000},
    **{
        ("ppo", name): LEGGED | {"total_steps": 200_000_000, "horizon": 32}
        for name in ("humanoid", "humanoid_standup")
    },
    **{("ppo", name): ARM for name in ("reacher", "pusher")},
}

# ---- few environments ----

# one preset of PPO for all of these tasks, found by runs of a million steps (docs/results.md)
FEW_CONTINUOUS: Preset = {
    "num_envs": 64,
    "horizon": 32,
    "epochs": 7,
    "minibatches": 32,
    "learning_rate": 3e-4,
    "schedule": "linear",
    "value_coef": 0.25,
    "normalize_advantage": "minibatch",
    "initial_std": 0.45,
    "total_steps": 1_000_000,
}
# its 78 columns of contact forces are nearly always 0: scaled to a variance of 1 they would be most
# of what a network sees. In other tasks small observations matter
FEW_ANT = FEW_CONTINUOUS | {"normalize_obs_epsilon": 0.1}
# what an action of Swimmer is worth shows over hundreds of steps: with 0.99 it stays at 50, with
# 0.999 alone at 158. rl-zoo3's discounts, rate, epochs and noise, on rollouts of a quarter episode
FEW_SWIMMER = FEW_CONTINUOUS | {
    "num_envs": 16,
    "horizon": 256,
    "epochs": 10,
    "minibatches": 16,
    "learning_rate": 6e-4,
    "gamma": 0.9999,
    "gae_lambda": 0.98,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "initial_std": 1.0,
}
# it falls from some starts for good if it learns little from them, which soon are rare: with seed 3
# it stands from 64 % of 200 starts by the preset of the others, from all by rl-zoo3's discounts,
# rate, epochs, minibatches, clipping and noise
FEW_DOUBLE_PENDULUM = FEW_CONTINUOUS | {
    "epochs": 10,
    "minibatches": 4,
    "learning_rate": 1.55e-4,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "clip_range": 0.4,
    "value_coef": 0.7,
    "initial_std": 1.0,
}
# in Reacher it shows at once
FEW_REACHER = FEW_CONTINUOUS | {"gamma": 0.9}
# one update of 256 transitions for each step of an environment, as in the publications
ONE_UPDATE_A_STEP: Preset = {
    "num_envs": 8,
    "updates": 8,
    "learning_starts": 10_000,
    "total_steps": 1_000_000,
}
# cleanrl's rates of SAC
SAC_RATES: Preset = {"learning_rate": 1e-3, "actor_learning_rate": 3e-4}
# four updates of five critics for each step and one of the actor; the publication has 20 of ten,
# which takes a CPU six times as long
FEW_REDQ: Preset = {
    "num_envs": 2,
    "updates": 8,
    "policy_delay": 4,
    "num_critics": 5,
    "learning_starts": 5_000,
    "total_steps": 100_000,
}
# the publication has 128 environments and batches of 8192 and 32,768; a value is at most
# 1 / (1 - gamma) = 100 times the reward of a step, which is about 10 here, scaled by 0.1
# (humanoid_standup has 30 and more: a warning then asks for another v_max)
FEW_FAST: Preset = {
    "num_envs": 16,
    "updates": 16,
    "batch_size": 512,
    "learning_starts": 5_000,
    "replay_size": 300_000,
    "reward_scale": 0.1,
    "v_min": -20.0,
    "v_max": 100.0,
    "actor_network": {"hidden": [256, 256]},
    "critic_network": {"hidden": [256, 256]},
    "total_steps": 1_000_000,
}

# those of a CPU and of up to MAX_FEW environments, which take the place of PRESETS
FEW_PRESETS: Table = {
    **{("ppo", task): FEW_CONTINUOUS for task in ANY_MUJOCO},
    ("ppo", "ant"): FEW_ANT,
    ("ppo", "swimmer"): FEW_SWIMMER,
    ("ppo", "inverted_double_pendulum"): FEW_DOUBLE_PENDULUM,
    ("ppo", "reacher"): FEW_REACHER,
    **{
        (name, task): ONE_UPDATE_A_STEP | SAC_RATES
        for name in ("sac", "mod_sac")
        for task in ANY_MUJOCO
    },
    **{("redq", task): FEW_REDQ for task in ANY_MUJOCO},
    **{(name, task): FEW_FAST for name in ("fast_td3", "fast_sac") for task in ANY_MUJOCO},
    **{("flash_sac", task): FEW_FLASH for task in ANY_MUJOCO},
    # a deterministic actor explores little, so more random actions come first
    **{
        (name, task): ONE_UPDATE_A_STEP | {"learning_starts": 25_000}
        for name in ("ddpg", "td3")
        for task in ANY_MUJOCO
    },
}
