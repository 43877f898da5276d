"""What other libraries call the settings: for help texts, and for a hint where one of their names
is used here.
"""

# setting: its names elsewhere
OTHER_NAMES: dict[str, dict[str, str]] = {
    "num_envs": {"SB3": "n_envs", "rl_games": "num_actors"},
    "total_steps": {"SB3": "total_timesteps", "skrl": "timesteps"},
    "max_grad_norm": {"rl_games": "grad_norm"},
    "horizon": {
        "SB3": "n_steps",
        "CleanRL": "num_steps",
        "rsl_rl": "num_steps_per_env",
        "rl_games": "horizon_length",
        "skrl": "rollouts",
    },
    "learning_rate": {"torch": "lr"},
    "epochs": {
        "SB3": "n_epochs",
        "CleanRL": "update_epochs",
        "rsl_rl": "num_learning_epochs",
        "rl_games": "mini_epochs",
        "skrl": "learning_epochs",
    },
    "minibatches": {
        "CleanRL": "num_minibatches",
        "rsl_rl": "num_mini_batches",
        "skrl": "mini_batches",
    },
    "gae_lambda": {"rsl_rl": "lam", "rl_games": "tau", "Isaac Lab": "lambda"},
    "clip_range": {
        "CleanRL": "clip_coef",
        "rsl_rl": "clip_param",
        "rl_games": "e_clip",
        "skrl": "ratio_clip",
    },
    "clip_range_value": {"SB3": "clip_range_vf", "CleanRL": "clip_vloss", "skrl": "value_clip"},
    "entropy_coef": {"SB3": "ent_coef", "skrl": "entropy_loss_scale"},
    "value_coef": {
        "SB3": "vf_coef",
        "rsl_rl": "value_loss_coef",
        "rl_games": "critic_coef",
        "skrl": "value_loss_scale",
    },
    "bounds_coef": {"rl_games": "bounds_loss_coef"},
    "std_type": {"rsl_rl": "noise_std_type"},
    "initial_std": {"rsl_rl": "init_noise_std"},
    "target_kl": {"rsl_rl": "desired_kl", "rl_games": "kl_threshold"},
    "normalize_advantage": {"CleanRL": "norm_adv"},
    "gamma": {"skrl": "discount_factor"},
    "replay_size": {"SB3": "buffer_size", "skrl": "memory_size"},
    "learning_starts": {"skrl": "random_timesteps"},
    "updates": {"SB3": "gradient_steps", "skrl": "gradient_steps"},
    "tau": {"skrl": "polyak"},
    "policy_delay": {"CleanRL": "policy_frequency"},
    "target_interval": {"SB3": "target_update_interval", "CleanRL": "target_network_frequency"},
    "epsilon_start": {"SB3": "exploration_initial_eps", "CleanRL": "start_e"},
    "epsilon_end": {"SB3": "exploration_final_eps", "CleanRL": "end_e"},
    "epsilon_fraction": {"SB3": "exploration_fraction"},
    "initial_temperature": {"CleanRL": "alpha"},
    "network.hidden": {"SB3": "net_arch", "rsl_rl": "hidden_dims"},
    "network.activation": {"SB3": "activation_fn"},
    "network.memory": {"rsl_rl": "rnn_type"},
    "network.memory_size": {"rsl_rl": "rnn_hidden_dim"},
}


def names_elsewhere(setting: str) -> str:
    """ "n_steps in SB3, num_steps in CleanRL", empty where none is listed."""
    return ", ".join(f"{name} in {where}" for where, name in OTHER_NAMES.get(setting, {}).items())


def here(name: str) -> str:
    """The setting that another library calls `name`; "" where none is listed."""
    name = name.lstrip("-").replace("-", "_")
    return next((key for key, names in OTHER_NAMES.items() if name in names.values()), "")
