"""A soup of a population: the mean of the weights of those members that make it better, as a run of
one agent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpurl.algorithms.base import Algorithm
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError
from gpurl.kernels.backend import on_device
from gpurl.run.evaluator import EVAL_SEED, evaluate, greedy
from gpurl.run.fusion import fuse
from gpurl.run.load import Loaded, load_members
from gpurl.run.members import ONE_AGENT
from gpurl.run.policy_run import write_policy_run
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import choose_device, make_trainer
from gpurl.selection import greedy_soup

CHOOSING_SEED = EVAL_SEED + 2  # of the episodes that choose; others tell how good the result is


@dataclass(frozen=True)
class Soup:
    """What became of a population."""

    folder: Path  # of the new run
    members: tuple[int, ...]  # that it is the mean of, the best one first
    mean_return: float  # over episodes that did not choose them
    best_return: float  # of the first of these members alone, over the same episodes


def soup(
    path: str | Path,
    episodes: int = 100,
    device: str = "cpu",
    best: bool = True,
    run_dir: str | None = None,
    command: Sequence[str] = ("gpurl.soup",),
) -> Soup:
    """Average the members of a population by the greedy recipe of `gpurl.selection.greedy_soup` and
    write the result as a new run of one agent: weights, Adam's moments and normalisers.

    path: a run or checkpoint folder; best=False: its latest checkpoint. run_dir: the folder to
    write, by default a new one beside other runs. UsageError for a run of one agent.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    chosen_device = choose_device(device)
    with on_device(chosen_device):
        members = load_members(path, str(chosen_device), best=best, learning=True)
        if len(members) == 1:
            raise UsageError(f"{path} has one agent to average: a soup needs a population")
        settings = _settings_of_one(members[0], run_dir)
        # not more environments than the run had: each may be a process
        saved = members[0].settings
        count = min(episodes, saved["num_envs"] * saved["population"])
        env = make_env(settings.env, count, chosen_device, CHOOSING_SEED, **settings.env_options)
        trainer = make_trainer(settings, chosen_device)
        try:
            result = trainer.algorithm

            def mean_return(algorithm: Algorithm, seed: int = CHOOSING_SEED) -> float:
                return _mean_return(algorithm, env, episodes, seed)

            def of_mean(chosen: Sequence[int]) -> float:
                fuse(result, [members[k].algorithm for k in chosen])
                return mean_return(result)

            # the recipe, then the mean that it chose
            scores = [mean_return(each.algorithm) for each in members]
            chosen, _ = greedy_soup(scores, of_mean)
            fuse(result, [members[k].algorithm for k in chosen])
            write_policy_run(trainer, command)
            returns = [
                mean_return(each, EVAL_SEED + 1) for each in (result, members[chosen[0]].algorithm)
            ]
        finally:
            trainer.env.close()
            env.close()
    return Soup(trainer.folder, tuple(members[k].member for k in chosen), *returns)


def _settings_of_one(first: Loaded, run_dir: str | None) -> Settings:
    """The settings of the population's run, of one agent, which is as its best member is."""
    changes = ONE_AGENT | {"init_from": None, "run_dir": run_dir}
    values = {name: x for name, x in first.settings.items() if name not in ("algorithm", "env")}
    made = make_settings(first.settings["algorithm"], first.settings["env"], **values | changes)
    return replace(made, algorithm_config=replace(first.algorithm.config, init_from=None))


@torch.no_grad()
def _mean_return(algorithm: Algorithm, env: VecEnv, episodes: int, seed: int) -> float:
    """Of greedy episodes, the same ones for each algorithm; NaN without a finite one."""
    policy_state = algorithm.initial_policy_state(env.num_envs)
    return evaluate(greedy(algorithm), env, episodes, policy_state, seed)["eval/mean_reward"]
