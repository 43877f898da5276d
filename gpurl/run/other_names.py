"""What other libraries call the settings: for help texts, and for a hint where one of their names
is used here.
"""

from collections.abc import Callable, Collection

NETWORKS = ("network", "actor_network", "critic_network")
HIDDEN = {"SB3": "net_arch, policy_kwargs", "rsl_rl": "hidden_dims", "rl_games": "units"}
ACTIVATION = {"SB3": "activation_fn", "rsl_rl": "activation", "rl_games": "activation"}

# setting: its names elsewhere, several of one library with commas between them
OTHER_NAMES: dict[str, dict[str, str]] = {
    "num_envs": {"SB3": "n_envs", "rl_games": "num_actors"},
    "total_steps": {
        "SB3": "total_timesteps",
        "rsl_rl": "num_learning_iterations",
        "rl_games": "max_epochs, max_frames",
        "skrl": "timesteps",
    },
    "video_every": {"CleanRL": "capture_video"},
    "project": {"CleanRL": "wandb_project_name"},
    "quiet": {"SB3": "verbose"},
    "init_from": {"SB3": "load", "rsl_rl": "load", "rl_games": "load_checkpoint"},
    "max_grad_norm": {"rl_games": "grad_norm"},
    "horizon": {
        "SB3": "n_steps",
        "CleanRL": "num_steps",
        "rsl_rl": "num_steps_per_env",
        "rl_games": "horizon_length",
        "skrl": "rollouts",
    },
    "learning_rate": {"torch": "lr"},
    "actor_learning_rate": {"CleanRL": "policy_lr"},
    "schedule": {"rl_games": "lr_schedule", "CleanRL": "anneal_lr"},
    "epochs": {
        "SB3": "n_epochs",
        "CleanRL": "update_epochs",
        "rsl_rl": "num_learning_epochs",
        "rl_games": "mini_epochs",
        "skrl": "learning_epochs",
    },
    "minibatches": {
        "SB3": "batch_size",
        "rl_games": "minibatch_size",
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
    "clip_range_value": {
        "SB3": "clip_range_vf",
        "rsl_rl": "use_clipped_value_loss",
        "rl_games": "clip_value",
        "CleanRL": "clip_vloss",
        "skrl": "value_clip",
    },
    "entropy_coef": {"SB3": "ent_coef", "skrl": "entropy_loss_scale"},
    "value_coef": {
        "SB3": "vf_coef",
        "rsl_rl": "value_loss_coef",
        "rl_games": "critic_coef",
        "skrl": "value_loss_scale",
    },
    "bounds_coef": {"rl_games": "bounds_loss_coef"},
    "std_type": {"rsl_rl": "noise_std_type"},
    "initial_std": {
        "SB3": "log_std_init",
        "rsl_rl": "init_std, init_noise_std",
        "rl_games": "sigma_init",
        "CleanRL": "actor_logstd",
    },
    "target_kl": {"rsl_rl": "desired_kl", "rl_games": "kl_threshold"},
    "normalize_advantage": {
        "rsl_rl": "normalize_advantage_per_mini_batch",
        "CleanRL": "norm_adv",
    },
    "normalize_obs": {"rsl_rl": "obs_normalization", "rl_games": "normalize_input"},
    "symmetry": {"rsl_rl": "symmetry_cfg"},
    "gamma": {"skrl": "discount_factor"},
    "replay_size": {"SB3": "buffer_size", "skrl": "memory_size"},
    "learning_starts": {"skrl": "random_timesteps"},
    "updates": {"SB3": "gradient_steps", "skrl": "gradient_steps"},
    "n_step": {"SB3": "n_steps"},
    "tau": {"skrl": "polyak"},
    "noise_std": {"SB3": "action_noise", "CleanRL": "exploration_noise"},
    "target_noise": {"SB3": "target_policy_noise", "CleanRL": "policy_noise"},
    "target_noise_clip": {"CleanRL": "noise_clip"},
    "policy_delay": {"CleanRL": "policy_frequency"},
    "target_interval": {"SB3": "target_update_interval", "CleanRL": "target_network_frequency"},
    "epsilon_start": {"SB3": "exploration_initial_eps", "CleanRL": "start_e"},
    "epsilon_end": {"SB3": "exploration_final_eps", "CleanRL": "end_e"},
    "epsilon_fraction": {"SB3": "exploration_fraction"},
    "temperature": {"SB3": "ent_coef", "CleanRL": "alpha, autotune"},
    **{f"{network}.hidden": HIDDEN for network in NETWORKS},
    **{f"{network}.activation": ACTIVATION for network in NETWORKS},
    "network.memory": {"rsl_rl": "rnn_type", "rl_games": "rnn"},
    "network.memory_size": {"rsl_rl": "rnn_hidden_dim"},
}
# those of algorithms with a replay buffer, where they are others
OFF_POLICY = {
    "horizon": OTHER_NAMES["horizon"] | {"SB3": "train_freq", "CleanRL": "train_frequency"},
    "learning_rate": OTHER_NAMES["learning_rate"] | {"CleanRL": "q_lr"},
}
# what to write where the value is not the same: {(setting, name elsewhere): text}
VALUES = {
    ("total_steps", "num_learning_iterations"): "iterations * num_envs * horizon",
    ("total_steps", "max_epochs"): "max_epochs * num_envs * horizon",
    ("total_steps", "timesteps"): "timesteps * num_envs",
    ("video_every", "capture_video"): "environment steps from one video to the next",
    ("project", "wandb_project_name"): "beside track wandb",
    ("quiet", "verbose"): "true prints nothing",
    ("init_from", "load"): "resume goes on with the same run",
    ("init_from", "load_checkpoint"): "resume goes on with the same run",
    ("schedule", "anneal_lr"): "linear, or constant",
    ("minibatches", "batch_size"): "a number: num_envs * horizon / batch_size",
    ("minibatches", "minibatch_size"): "a number: num_envs * horizon / minibatch_size",
    ("clip_range_value", "use_clipped_value_loss"): "a number, as clip_range, or None",
    ("clip_range_value", "clip_value"): "a number, as clip_range, or None",
    ("clip_range_value", "clip_vloss"): "a number, as clip_range, or None",
    ("initial_std", "log_std_init"): "exp(log_std_init)",
    ("initial_std", "actor_logstd"): "exp(actor_logstd)",
    ("normalize_advantage", "normalize_advantage_per_mini_batch"): "batch, minibatch or none",
    ("normalize_advantage", "norm_adv"): "batch, minibatch or none",
    ("temperature", "ent_coef"): "without it learned, from initial_temperature",
    ("temperature", "autotune"): "without it learned, from initial_temperature",
}


def names_of(known: Collection[str]) -> dict[str, dict[str, str]]:
    """OTHER_NAMES for an algorithm with the settings `known`."""
    return OTHER_NAMES | (OFF_POLICY if "replay_size" in known else {})


def names_elsewhere(setting: str, known: Collection[str]) -> str:
    """ "n_steps in SB3, num_steps in CleanRL", empty where none is listed; known: as below."""
    names = names_of(known).get(setting, {})
    return ", ".join(f"{name} in {where}" for where, name in names.items())


def here(name: str, known: Collection[str]) -> dict[str, str]:
    """{setting: what to write where the value is another one, else ""} of those that another
    library calls `name`. known: all settings of the algorithm, or the groups of those in groups.
    """
    name = name.lstrip("-").replace("-", "_").removeprefix("no_")
    return {
        setting: VALUES.get((setting, name), "")
        for setting, names in names_of(known).items()
        if (setting in known or setting.partition(".")[0] in known)
        and any(name in each.split(", ") for each in names.values())
    }


def other_name_hint(name: str, known: Collection[str], write: Callable[[str], str]) -> str:
    """ "here it is --total-steps (max_epochs * num_envs * horizon)", "" where none is listed.
    write: the form of a setting.
    """
    found = here(name, known)
    settings = " and ".join(map(write, found))
    values = "".join(f" ({text})" for text in found.values() if text)
    return f"here it is {settings}{values}" if found else ""
