"""One training of stable-baselines3 in a process of its own, in the environment of the peers: the
same evaluations and rows as gpurl's. It cannot be resumed.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from stable_baselines3.common.vec_env import sync_envs_normalization as copy_statistics

from benchmarks.learning import results
from benchmarks.learning.case import Case
from benchmarks.learning.one_run import job_parser
from benchmarks.learning.results import Point
from benchmarks.learning.suite import case_named
from gpurl.run.evaluator import EVAL_SEED

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ppo": PPO, "sac": SAC, "dqn": DQN}


def make_envs(env: str, count: int, normalize_obs: bool, is_training: bool) -> VecEnv:
    """`count` copies of Gymnasium's `env` in this process, with observations normalised by running
    statistics or not; rewards never are. DummyVecEnv is the faster one on one core.
    """
    name = env.rpartition(":")[2]
    envs: VecEnv = DummyVecEnv([lambda: gymnasium.make(name)] * count)
    if normalize_obs:
        envs = VecNormalize(envs, training=is_training, norm_obs=True, norm_reward=False)
    return envs


class Evaluations(BaseCallback):
    """Plays greedy episodes on the way, in environments of their own."""

    def __init__(self, case: Case, envs: VecEnv) -> None:
        super().__init__()
        self.every = case.eval_every
        self.episodes = case.curve_episodes
        self.next_at = self.every
        self.envs = envs
        self.curve: list[Point] = []
        self.began = time.monotonic()

    def seconds(self) -> float:
        """Wall clock since the training began."""
        return time.monotonic() - self.began

    def play(self, episodes: int, seed: int) -> float:
        """The mean return of greedy episodes; the same seed plays the same episodes."""
        copy_statistics(self.training_env, self.envs)
        self.envs.seed(seed)
        mean, _ = evaluate_policy(
            self.model, self.envs, n_eval_episodes=episodes, deterministic=True, warn=False
        )
        return float(mean)

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.next_at:
            self.next_at = (self.num_timesteps // self.every + 1) * self.every
            value = self.play(self.episodes, EVAL_SEED)
            self.curve.append(Point(self.num_timesteps, self.seconds(), value))
        return True


def train_seed(case: Case, seed: int) -> tuple[list[Point], Point]:
    """(curve, end) of a training."""
    settings: dict[str, Any] = dict(case.settings)
    count = settings.pop("num_envs")
    normalize_obs = settings.pop("normalize_obs", False)
    envs = make_envs(case.env, count, normalize_obs, is_training=True)
    # one environment an episode, at most as many as training has, as in gpurl
    copies = make_envs(case.env, min(count, case.curve_episodes), normalize_obs, is_training=False)
    model = ALGORITHMS[case.algorithm]("MlpPolicy", envs, seed=seed, device="cpu", **settings)
    evaluations = Evaluations(case, copies)
    model.learn(case.steps, callback=evaluations)
    seconds = evaluations.seconds()
    value = evaluations.play(results.END_EPISODES, EVAL_SEED + 1)
    return evaluations.curve, Point(model.num_timesteps, seconds, value)


def main(words: Sequence[str]) -> None:
    """Train a seed of a case and write its rows."""
    job = job_parser().parse_args(words)
    case = case_named(job.case).scaled(job.scale)
    torch.set_num_threads(1)
    columns = results.provenance(case.resolved_settings())
    curve, end = train_seed(case, job.seed)
    results.add(case, job.seed, curve, end, columns, job.out)
    print(f"return {end.mean_return:.1f} after {end.steps:,} steps, {end.seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
