"""The comparison with rsl_rl: pairs of cases with the same hyper-parameters, tasks and seeds, under
the names that each library has for them. On gpurl's own tasks rsl_rl trains through `to_rsl_rl`; on
mjlab's tasks with mjlab's own wrapper and runner.
"""

from typing import NamedTuple

from benchmarks.learning.case import Case, Settings

SEEDS = 3
CURVE_EPISODES = 5
GYMNASIUM_STEPS, GYMNASIUM_POINTS = 500_000, 10
MJLAB_STEPS, MJLAB_POINTS = 245_760, 3
MJLAB = "torch_vector:mjlab.tasks:"  # prefix of mjlab's tasks


class Sizes(NamedTuple):
    """What a pair shares."""

    num_envs: int
    horizon: int  # steps of each environment in an iteration
    epochs: int
    minibatches: int
    learning_rate: float
    entropy_coef: float
    clips_values: bool  # by the range of the ratios, 0.2
    desired_kl: float | None  # of an adaptive learning rate; None: it is constant
    normalizes: bool  # observations
    hidden: tuple[int, ...]
    init: str  # of gpurl's weights; rsl_rl's start as "uniform" does


# many steps of few environments, a constant learning rate
GYMNASIUM = Sizes(64, 64, 5, 4, 1e-3, 0.0, False, None, True, (256, 128, 64), "orthogonal")
# as mjlab registers its cart-pole tasks for rsl_rl, but for the environments, 4096 there
CART_POLE = Sizes(256, 32, 5, 4, 1e-3, 0.01, True, 0.01, False, (64, 64), "uniform")


def _own(sizes: Sizes) -> Settings:
    """gpurl's settings. rsl_rl learns the standard deviation itself, and normalises advantages over
    the whole rollout.
    """
    network: Settings = {"hidden": list(sizes.hidden), "activation": "elu"}
    if sizes.init != "orthogonal":
        network["init"] = sizes.init
    adaptive: Settings = {"schedule": "constant"}
    if sizes.desired_kl is not None:
        adaptive = {"schedule": "kl_minibatch", "target_kl": sizes.desired_kl}
    return adaptive | {
        "num_envs": sizes.num_envs,
        "horizon": sizes.horizon,
        "epochs": sizes.epochs,
        "minibatches": sizes.minibatches,
        "learning_rate": sizes.learning_rate,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "clip_range_value": 0.2 if sizes.clips_values else None,
        "value_coef": 1.0,
        "entropy_coef": sizes.entropy_coef,
        "max_grad_norm": 1.0,
        "normalize_advantage": "batch",
        "normalize_obs": sizes.normalizes,
        "normalize_value": False,
        "std_type": "scalar",
        "initial_std": 1.0,
        "network": network,
    }


def _rsl_rl(sizes: Sizes) -> Settings:
    """The configuration of rsl_rl's runner, and the number of environments."""
    model = {
        "class_name": "MLPModel",
        "hidden_dims": list(sizes.hidden),
        "activation": "elu",
        "obs_normalization": sizes.normalizes,
    }
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    return {
        "num_envs": sizes.num_envs,
        "num_steps_per_env": sizes.horizon,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": model | {"distribution_cfg": distribution},
        "critic": model,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": sizes.epochs,
            "num_mini_batches": sizes.minibatches,
            "learning_rate": sizes.learning_rate,
            "schedule": "fixed" if sizes.desired_kl is None else "adaptive",
            "desired_kl": sizes.desired_kl,
            "gamma": 0.99,
            "lam": 0.95,
            "clip_param": 0.2,
            "use_clipped_value_loss": sizes.clips_values,
            "value_loss_coef": 1.0,
            "entropy_coef": sizes.entropy_coef,
            "max_grad_norm": 1.0,
        },
    }


def _pair(group: str, task: str, env: str, steps: int, points: int, sizes: Sizes) -> list[Case]:
    """The case of gpurl and that of rsl_rl."""
    return [
        Case(
            f"{prefix}-ppo-{task}",
            group,
            "ppo",
            env,
            steps,
            seeds=SEEDS,
            settings=settings,
            points=points,
            curve_episodes=CURVE_EPISODES,
            trainer=trainer,
        )
        for prefix, trainer, settings in (
            ("own", "gpurl", _own(sizes)),
            ("rsl_rl", "rsl_rl", _rsl_rl(sizes)),
        )
    ]


RSL_RL_CASES = [
    *_pair("rsl_rl", "half_cheetah", "half_cheetah", GYMNASIUM_STEPS, GYMNASIUM_POINTS, GYMNASIUM),
    *_pair("rsl_rl", "hopper", "hopper", GYMNASIUM_STEPS, GYMNASIUM_POINTS, GYMNASIUM),
]
# in a Python with mjlab, which brings its own version of rsl_rl
MJLAB_TASK = f"{MJLAB}Mjlab-Cartpole-Balance"
MJLAB_CASES = _pair("mjlab", "balance", MJLAB_TASK, MJLAB_STEPS, MJLAB_POINTS, CART_POLE)
