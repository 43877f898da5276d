"""One measurement of one trainer, in a process of its own in the peers' environment; peers.py gives it a Job and reads its result.

Every trainer steps the same environments and learns by the same hyper-parameters; what a trainer cannot be told is left as it comes.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import gpurl
from benchmarks.results_table import machine
from benchmarks.throughput import ready_trainer
from benchmarks.timing import now
from gpurl.config import make_settings
from gpurl.envs.chasing import Chasing
from gpurl.envs.registry import make_env
from gpurl.evaluator import evaluate, greedy
from gpurl.kernels.random import CounterRandom

EPOCHS = MINIBATCHES = 4
HIDDEN = (64, 64)
CHASING = {
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "entropy_coef": 0.0,
    "value_coef": 1.0,
    "max_grad_norm": 1.0,
}
# rl-zoo's PPO on Pendulum-v1, without state-dependent exploration
PENDULUM = {
    "learning_rate": 1e-3,
    "gamma": 0.9,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "entropy_coef": 0.0,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
}
PENDULUM_HORIZON, PENDULUM_EPOCHS, PENDULUM_BATCH, PENDULUM_EPISODES = 1024, 10, 64, 50
ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU, "relu": nn.ReLU}
DISTRIBUTIONS = {"gpurl": "gpurl", "rsl_rl": "rsl-rl-lib", "skrl": "skrl", "sb3": "stable-baselines3"}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    case: str  # chasing or pendulum
    trainer: str
    num_envs: int = 4096
    horizon: int = 32  # of chasing
    iterations: int = 12  # timed ones, of chasing
    warm_up: int = 3  # iterations not timed
    total_steps: int = 100_000  # of pendulum, rounded up to whole iterations
    activation: str = "tanh"
    device: str = "cpu"
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trainer did: the clock once an iteration, environment steps between two readings, and how well it did in the end."""

    marks: list[float]
    steps: int
    score: float  # chasing: mean reward of a step in the last rollout; pendulum: mean return of greedy episodes
    note: str = ""


def result(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What peers.py reads."""
    seconds = [after - before for before, after in itertools.pairwise(outcome.marks)][job.warm_up :]
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    values: dict[str, Any] = {"steps_per_second": outcome.steps / statistics.median(seconds), "score": outcome.score, "note": outcome.note}
    values["peak_mib"] = int(peak[1]) / 1024 if peak else float("nan")
    values["gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20 if job.device.startswith("cuda") else 0.0
    values["version"] = gpurl.__version__ if job.trainer == "gpurl" else importlib.metadata.version(DISTRIBUTIONS[job.trainer])
    return values | {"machine": machine(job.device)}


# ---- chasing ----


class TimedChasing(Chasing):
    """Chasing that reads the clock and the mean reward after every `horizon` steps: one stopwatch for all trainers.

    It starts at different clocks, so that time limits do not all fall on one step.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.num_envs, job.device, job.seed)
        self.horizon = job.horizon
        self.marks: list[float] = []
        self.mean_reward = float("nan")
        self._rewards: list[Tensor] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        start = super().reset(seed=seed, options=options)
        self.stagger(CounterRandom(7, self.num_envs, self.device).integers(0, self.max_episode_steps or 1))
        return start

    def step(self, actions: Tensor) -> Any:
        timestep = super().step(actions)
        self._rewards.append(timestep.reward.mean())
        if len(self._rewards) == self.horizon:
            self.marks.append(now(self.device))
            self.mean_reward = float(torch.stack(self._rewards).mean())
            self._rewards.clear()
        return timestep

    def outcome(self) -> Outcome:
        """What was seen so far."""
        return Outcome(self.marks, self.num_envs * self.horizon, self.mean_reward)


def rollouts(job: Job) -> int:
    """Rollouts that a chasing job takes: the first only starts the clock."""
    return 1 + job.warm_up + job.iterations


def chasing_gpurl(job: Job) -> Outcome:
    """gpurl's own trainer."""
    network = {"hidden": list(HIDDEN), "activation": job.activation}
    shape = {"num_envs": job.num_envs, "horizon": job.horizon, "epochs": EPOCHS, "minibatches": MINIBATCHES, "seed": job.seed}
    plain = {"schedule": "constant", "normalize_obs": False, "normalize_value": False}
    env = TimedChasing(job)
    trainer = ready_trainer(make_settings("ppo", "chasing", **CHASING, **shape, **plain, network=network), torch.device(job.device), env)
    for _ in range(rollouts(job)):
        trainer.iterate()
    return env.outcome()


class RslEnv:
    """TimedChasing as rsl_rl's VecEnv; actions are clipped to the Box, as the others do."""

    def __init__(self, env: TimedChasing) -> None:
        self.env, self.num_envs, self.device = env, env.num_envs, env.device
        self.num_actions, self.max_episode_length, self.cfg = env.dim, env.max_episode_steps, dict[str, Any]()
        self.episode_length_buf = env.episode_length_buf
        self._obs = env.reset()[0]

    def get_observations(self) -> Any:
        """The observations as rsl_rl groups them."""
        from tensordict import TensorDict

        return TensorDict({"policy": self._obs}, batch_size=[self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
        """(observations, rewards [N], dones [N] int64, extras)."""
        self._obs, reward, terminated, truncated, _ = self.env.step(actions.clamp(-1.0, 1.0))
        return self.get_observations(), reward, (terminated | truncated).long(), {"time_outs": truncated}


def chasing_rsl_rl(job: Job) -> Outcome:
    """rsl_rl's OnPolicyRunner."""
    from rsl_rl.runners import OnPolicyRunner

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
    }
    OnPolicyRunner(RslEnv(env), settings, log_dir=None, device=job.device).learn(rollouts(job))
    return env.outcome()


class SkrlEnv:
    """TimedChasing as skrl's trainer takes it: columns of rewards and flags; actions are clipped to the Box."""

    num_agents = 1

    def __init__(self, env: TimedChasing) -> None:
        self.env, self.num_envs, self.device = env, env.num_envs, env.device

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        """(observations, info)."""
        return self.env.reset()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Observations, and reward, terminated and truncated as [N, 1]."""
        obs, reward, terminated, truncated, _ = self.env.step(actions.clamp(-1.0, 1.0))
        return obs, reward.unsqueeze(1), terminated.unsqueeze(1), truncated.unsqueeze(1), {}

    def state(self) -> None:
        """No privileged state."""

    def close(self) -> None:
        """Nothing to close."""


def skrl_models(env: TimedChasing, activation: str) -> dict[str, Any]:
    """Policy and value networks as in skrl's examples."""
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

    spaces = {"observation_space": env.single_observation_space, "action_space": env.single_action_space, "device": env.device}

    def network(inputs: int, outputs: int) -> nn.Sequential:
        sizes, layers = (inputs, *HIDDEN), list[nn.Module]()
        for size, next_size in itertools.pairwise(sizes):
            layers += [nn.Linear(size, next_size), ACTIVATIONS[activation]()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    class Policy(GaussianMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self)
            self.net, self.log_std = network(self.num_observations, self.num_actions), nn.Parameter(torch.zeros(self.num_actions))

        def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Tensor]]:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = network(self.num_observations, 1)

        def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Tensor]]:
            return self.net(inputs["observations"]), {}

    return {"policy": Policy(), "value": Value()}


def chasing_skrl(job: Job) -> Outcome:
    """skrl's PPO in its SequentialTrainer."""
    from skrl.agents.torch.ppo import PPO
    from skrl.memories.torch import RandomMemory
    from skrl.trainers.torch import SequentialTrainer

    env = TimedChasing(job)
    settings = {
        "rollouts": job.horizon,
        "learning_epochs": EPOCHS,
        "mini_batches": MINIBATCHES,
        "discount_factor": CHASING["gamma"],
        "gae_lambda": CHASING["gae_lambda"],
        "learning_rate": CHASING["learning_rate"],
        "grad_norm_clip": CHASING["max_grad_norm"],
        "ratio_clip": CHASING["clip_range"],
        "value_clip": 0.0,
        "value_loss_scale": CHASING["value_coef"],
        "entropy_loss_scale": CHASING["entropy_coef"],
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }
    agent = PPO(
        models=skrl_models(env, job.activation),
        memory=RandomMemory(memory_size=job.horizon, num_envs=job.num_envs, device=env.device),
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
        device=env.device,
        cfg=settings,
    )
    limits = {"timesteps": rollouts(job) * job.horizon, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=SkrlEnv(env), agents=agent, cfg=limits).train()
    return env.outcome()


def sb3_env(env: TimedChasing) -> Any:
    """TimedChasing as stable-baselines3's VecEnv: numpy views of the tensors on a CPU, one shared empty info but where an episode ended."""
    from stable_baselines3.common.vec_env import VecEnv

    class Sb3Env(VecEnv):
        def __init__(self) -> None:
            super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

        def reset(self) -> np.ndarray:
            return env.reset()[0].cpu().numpy()

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = torch.from_numpy(actions).to(env.device)

        def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
            obs, reward, terminated, truncated, info = env.step(self.actions)
            done, limit, final_obs = (tensor.cpu().numpy() for tensor in (terminated | truncated, truncated, info["final_obs"]))
            infos: list[dict[str, Any]] = [{}] * env.num_envs
            for index in done.nonzero()[0]:
                infos[index] = {"terminal_observation": final_obs[index], "TimeLimit.truncated": bool(limit[index])}
            return obs.cpu().numpy(), reward.cpu().numpy(), done, infos

        def close(self) -> None: ...

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * env.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            return [None] * env.num_envs

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * env.num_envs

    return Sb3Env()


def sb3_settings(values: dict[str, float]) -> dict[str, Any]:
    """Our names of hyper-parameters in stable-baselines3's."""
    names = {"entropy_coef": "ent_coef", "value_coef": "vf_coef"}
    return {names.get(name, name): value for name, value in values.items()}


def chasing_sb3(job: Job) -> Outcome:
    """stable-baselines3's PPO."""
    from stable_baselines3 import PPO

    env = TimedChasing(job)
    shape = {"n_steps": job.horizon, "batch_size": job.num_envs * job.horizon // MINIBATCHES, "n_epochs": EPOCHS}
    network = {"net_arch": list(HIDDEN), "activation_fn": ACTIVATIONS[job.activation]}
    model = PPO("MlpPolicy", sb3_env(env), **shape, **sb3_settings(CHASING), policy_kwargs=network, seed=None, device=job.device)
    model.learn(rollouts(job) * job.horizon * job.num_envs)
    return env.outcome()


# ---- pendulum ----


def pendulum_gpurl(job: Job) -> Outcome:
    """gpurl on Gymnasium's own Pendulum-v1."""
    device, rows = torch.device(job.device), job.num_envs * PENDULUM_HORIZON
    shape = {"num_envs": job.num_envs, "horizon": PENDULUM_HORIZON, "epochs": PENDULUM_EPOCHS, "minibatches": rows // PENDULUM_BATCH}
    plain = {"schedule": "constant", "normalize_obs": False, "normalize_value": False, "normalize_advantage": "minibatch", "seed": job.seed}
    network = {"hidden": list(HIDDEN), "activation": job.activation}
    name = "gymnasium_cpu:Pendulum-v1"
    trainer = ready_trainer(make_settings("ppo", name, **PENDULUM, **shape, **plain, network=network), device)
    marks = [now(device)]
    while trainer.steps < job.total_steps:
        trainer.iterate()
        marks.append(now(device))
    score = evaluate(greedy(trainer.algorithm), make_env(name, PENDULUM_EPISODES, device), PENDULUM_EPISODES)["eval/mean_reward"]
    return Outcome(marks, rows, score)


def pendulum_sb3(job: Job) -> Outcome:
    """stable-baselines3 on Pendulum-v1, in whichever of its vector environments is quicker."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv

    marks: list[float] = []

    class Clock(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            marks.append(now(torch.device(job.device)))

    env = quicker_vec_env(job.num_envs)
    shape = {"n_steps": PENDULUM_HORIZON, "batch_size": PENDULUM_BATCH, "n_epochs": PENDULUM_EPOCHS}
    network = {"net_arch": list(HIDDEN), "activation_fn": ACTIVATIONS[job.activation]}
    model = PPO("MlpPolicy", env, **shape, **sb3_settings(PENDULUM), policy_kwargs=network, seed=job.seed, device=job.device)
    model.learn(job.total_steps, callback=Clock())
    marks.append(now(torch.device(job.device)))
    copies = DummyVecEnv([pendulum] * PENDULUM_EPISODES)
    score, _ = evaluate_policy(model, copies, n_eval_episodes=PENDULUM_EPISODES, deterministic=True, warn=False)
    note = type(env).__name__
    env.close()
    return Outcome(marks, job.num_envs * PENDULUM_HORIZON, float(score), note)


def pendulum() -> gymnasium.Env:
    """One Pendulum-v1; processes need a function of a module."""
    return gymnasium.make("Pendulum-v1")


def quicker_vec_env(num_envs: int) -> Any:
    """stable-baselines3's vector environment, in this process or in others, that takes 200 steps sooner."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    seconds, kept = {}, {}
    for kind in (DummyVecEnv, SubprocVecEnv):
        env = kind([pendulum] * num_envs)
        env.reset()
        action = np.zeros((num_envs, 1), np.float32)
        began = time.perf_counter()
        for _ in range(200):
            env.step(action)
        seconds[kind], kept[kind] = time.perf_counter() - began, env
    quicker = min(seconds, key=lambda kind: seconds[kind])
    for kind, env in kept.items():
        if kind is not quicker:
            env.close()
    return kept[quicker]


LOOPS: dict[tuple[str, str], Callable[[Job], Outcome]] = {
    ("chasing", "gpurl"): chasing_gpurl,
    ("chasing", "rsl_rl"): chasing_rsl_rl,
    ("chasing", "skrl"): chasing_skrl,
    ("chasing", "sb3"): chasing_sb3,
    ("pendulum", "gpurl"): pendulum_gpurl,
    ("pendulum", "sb3"): pendulum_sb3,
}

if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    torch.manual_seed(asked.seed)
    print("RESULT " + json.dumps(result(asked, LOOPS[asked.case, asked.trainer](asked))))
