"""rsl_rl's OnPolicyRunner on Chasing, as it comes or with torch.compile, which it documents as its fastest mode."""

from typing import Any

from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from benchmarks.peers.job import CHASING, EPOCHS, HIDDEN, MINIBATCHES, Job, Outcome, rollouts
from benchmarks.peers.timed_chasing import TimedChasing

MODES = {"default": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}  # it refuses the modes with CUDA graphs


class RslEnv:
    """TimedChasing as rsl_rl's VecEnv; actions are clipped to the Box, as the others do."""

    def __init__(self, env: TimedChasing) -> None:
        self.env, self.num_envs, self.device = env, env.num_envs, env.device
        self.num_actions, self.max_episode_length, self.cfg = env.dim, env.max_episode_steps, dict[str, Any]()
        self.episode_length_buf = env.episode_length_buf
        self._obs = env.reset()[0]

    def get_observations(self) -> Any:
        """The observations as rsl_rl groups them."""
        return TensorDict({"policy": self._obs}, batch_size=[self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
        """(observations, rewards [N], dones [N] int64, extras)."""
        self._obs, reward, terminated, truncated, _ = self.env.step(actions.clamp(-1.0, 1.0))
        return self.get_observations(), reward, (terminated | truncated).long(), {"time_outs": truncated}


def chasing(job: Job) -> Outcome:
    """rsl_rl's OnPolicyRunner."""
    env = TimedChasing(job)
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
    settings = {
        "num_steps_per_env": job.horizon,
        "save_interval": 1_000_000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": model | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}},
        "critic": dict(model),
        "algorithm": algorithm,
        "torch_compile_mode": MODES[job.mode],
    }
    OnPolicyRunner(RslEnv(env), settings, log_dir=None, device=job.device).learn(rollouts(job))
    return env.outcome()
