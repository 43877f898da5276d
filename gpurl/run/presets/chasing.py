"""Presets of Chasing."""

from gpurl.run.presets.bases import SMALL_FLASH, SMALL_NETWORK
from gpurl.run.presets.table import Preset, Table

LEARN_CHASING: Preset = {
    "num_envs": 1024,
    "updates": 8,
    "total_steps": 2_000_000,
    "learning_starts": 20_480,
    "batch_size": 512,
    "learning_rate": 1e-3,
    "n_step": 3,
    "actor_network": SMALL_NETWORK,
    "critic_network": SMALL_NETWORK,
}
# positions are up to 8, velocities near 1, and values of two actions differ by less than critics
# err: without normalised observations and a slow actor, a return of 9 falls to -20 again. On 4096
# environments 8 updates are too few, also with 4 M transitions in the replay buffer
SLOW_ACTOR: Preset = {"updates": 16, "actor_learning_rate": 1e-4, "schedule": "linear"}
CHASING: Preset = LEARN_CHASING | SLOW_ACTOR | {"normalize_obs": True}
# rewards of Chasing are about 0.02 a step, so the entropy must weigh little: with the default, an
# initial temperature of 1, SAC acts at random for 15,000 updates
CHASING_SAC: Preset = CHASING | {"initial_temperature": 0.02}
# a deterministic actor leaves a good policy again, for -9 and back: not with FastTD3's noise, a
# size for each episode, targets that move fast, and the lower of two critics
CHASING_TD3: Preset = CHASING | {
    "policy_delay": 1,
    "tau": 0.05,
    "actor_aggregate": "min",
    "noise": "episode",
    "noise_std_range": [0.001, 0.4],
}
# returns of Chasing are between -5 and 12 where policies learn: atoms further apart would hide what
# actions differ by
FAST_CHASING: Preset = (
    LEARN_CHASING
    | SLOW_ACTOR
    | {
        "policy_delay": 1,
        "atoms": 101,
        "v_min": -5.0,
        "v_max": 12.0,
    }
)
FLASH_CHASING: Preset = SMALL_FLASH | {
    "num_envs": 1024,
    "total_steps": 2_000_000,
    "n_step": 3,
    "learning_starts": 20_480,
    "replay_size": 1_000_000,
}

PRESETS: Table = {
    ("ppo", "chasing"): {
        "num_envs": 4096,
        "horizon": 32,
        "minibatches": 16,
        "gamma": 0.99,
        "initial_std": 0.5,
        "entropy_coef": 0.005,
    },
    **{(name, "chasing"): CHASING_SAC for name in ("sac", "mod_sac")},
    **{(name, "chasing"): CHASING_TD3 for name in ("ddpg", "td3")},
    ("fast_td3", "chasing"): FAST_CHASING,
    ("fast_sac", "chasing"): FAST_CHASING | {"initial_temperature": 0.01},
    ("flash_sac", "chasing"): FLASH_CHASING,
}
