"""What a user calls from Python: `train` runs one job from its settings to its learning curve;
`evaluate_run` plays a trained policy.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.engine.determinism import deterministic
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import CheckpointError, EndlessEpisodeError, GpurlError, UsageError
from gpurl.policy import Policy, load
from gpurl.run.callbacks import Callback
from gpurl.run.display import Display
from gpurl.run.evaluator import EVAL_SEED, evaluate, greedy, scripted
from gpurl.run.given import Given, name_of_algorithm, name_of_env
from gpurl.run.logger import Logger
from gpurl.run.out_of_memory import Watch, explain_out_of_memory
from gpurl.run.plot import note_references, plot_curve
from gpurl.run.run_folder import create_run_folder, lock_run, note_resume, write_run_info
from gpurl.run.settings import Settings, make_settings, merge
from gpurl.run.setup import choose_device, evaluation_env, make_trainer, training_env
from gpurl.run.trainer import Outcome, Trainer


@dataclass
class Run:
    """A finished training run."""

    folder: Path
    outcome: Outcome
    baseline: dict[
        str, float
    ]  # the scripted policy's evaluation, {} where the environment has none

    def policy(self) -> Policy:
        """The best policy of the run."""
        return load(self.folder)


def train(
    algorithm: str | type[Algorithm] = "ppo",
    env: Given = "chasing",
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Train `algorithm` on `env` and return the run.

    algorithm: a name, a module path or a class. env: those too, a Gymnasium id, a function that
    makes a gymnasium.Env, or environments that exist already; the latter train as they are and are
    evaluated after the training. callbacks: see `gpurl.Callback`.

    settings: any field of `gpurl.run.settings.TrainConfig` and of the algorithm's config, and
    `env_options`, a dict of the task's own options. `gpurl train ALGORITHM ENV --help` lists
    them. Raises UsageError, EnvError, NonFiniteError or CheckpointError (gpurl.errors). After
    SIGINT or SIGTERM the run is saved, then the signal goes to the caller: KeyboardInterrupt, or
    the caller's own handler.
    """
    name, made = name_of_env(env)
    if made is not None:
        for key, value in (("num_envs", made.num_envs), ("device", str(made.device))):
            if settings.setdefault(key, value) not in (value, made.device):
                raise UsageError(f"{key} is {settings[key]}, the given environment's is {value}")
    chosen = make_settings(name_of_algorithm(algorithm), name, **settings)
    return _signals_passed_on(run(chosen, callbacks=callbacks, env=made))


def resume(path: str | Path, callbacks: Sequence[Callback] = (), **changes: Any) -> Run:
    """Go on with the run in `path` from its latest good checkpoint; `changes` are settings that may
    change, total_steps above all.

    Raises as `train` does.
    """
    algorithm, env, saved = saved_settings(Path(path))
    return _signals_passed_on(
        run(make_settings(algorithm, env, **merge(saved, changes)), Path(path), callbacks=callbacks)
    )


def saved_settings(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """(algorithm, env, all other settings) of the run in `folder`; CheckpointError where there is
    none or another process trains.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no run folder {folder}")
    if not (folder / "checkpoints").is_dir() and not (folder / "run.pid").exists():
        raise CheckpointError(
            f"{folder} is not a run folder, there is no checkpoints/ in it; give the folder of the "
            f"run itself"
        )
    with lock_run(folder):
        saved = dict(load_checkpoint(folder, quiet=True)[0]["meta"]["settings"])
    return saved.pop("algorithm"), saved.pop("env"), saved


def _signals_passed_on(finished: Run) -> Run:
    """`finished`, unless a signal ended it: a sweep around the run must end too."""
    if finished.outcome.signal_number is not None:
        signal.raise_signal(finished.outcome.signal_number)
    return finished


def run(
    settings: Settings,
    resume_from: Path | None = None,
    command: list[str] | None = None,
    callbacks: Sequence[Callback] = (),
    env: VecEnv | None = None,
) -> Run:
    """Train by `settings`, in a new run folder or on from the one in `resume_from`.

    env: environments that exist already, in place of new ones.
    """
    config = settings.train
    if (
        resume_from is not None
        and config.run_dir is not None
        and Path(config.run_dir).resolve() != resume_from.resolve()
    ):
        raise UsageError(
            f"a run goes on in its own folder, {resume_from}: leave out run_dir {config.run_dir}"
        )
    with deterministic(config.deterministic):
        try:
            device = choose_device(config.device)
        except UsageError as error:
            if resume_from is None:
                raise
            raise UsageError(
                f"{error}; the run trained there, and goes on here with --device auto"
            ) from None
        if resume_from is None:
            with explain_out_of_memory(settings, device) as memory:
                return _run(
                    settings, device, None, None, command or sys.argv, memory, callbacks, env
                )
        with (
            lock_run(resume_from),
            explain_out_of_memory(settings, device) as memory,
        ):  # first the lock: its holder may be about to save
            return _run(
                settings,
                device,
                resume_from,
                load_checkpoint(resume_from, device)[0],
                command or sys.argv,
                memory,
                callbacks,
                env,
            )


def _run(
    settings: Settings,
    device: torch.device,
    folder: Path | None,
    parts: dict[str, Any] | None,
    command: list[str],
    memory: Watch,
    callbacks: Sequence[Callback],
    given: VecEnv | None,
) -> Run:
    """Train in a new run folder, or on from `parts` of a checkpoint in `folder`, which is
    locked.
    """
    config = settings.train
    threads, allow_tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    earlier = (
        None if parts is None else parts["trainer"]["threads"]
    )  # sums of torch depend on it in their last bits
    envs = list[VecEnv]()
    try:
        eval_env = evaluation_env(settings, device, is_given=given is not None)
        envs += [] if eval_env is None else [eval_env]
        if given is None:
            envs.append(training_env(settings, device))
        trainer = make_trainer(
            settings, device, eval_env, given or envs[-1], threads=earlier, callbacks=callbacks
        )
        memory.engine = trainer.engine
        trainer.folder = folder or create_run_folder(
            Path(config.root), settings.env, settings.algorithm, config.seed, config.run_dir
        )
        with lock_run(trainer.folder) if parts is None else nullcontext():
            if parts is None:
                write_run_info(trainer.folder, settings.to_dict(), command)
                trainer.start()
            else:
                trainer.restore(parts)
                note_resume(trainer.folder, settings.to_dict(), command)
            outcome, baseline = _run_logged(trainer, eval_env)
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        for each in envs:
            each.close()
    return Run(trainer.folder, outcome, baseline)


def _run_logged(trainer: Trainer, eval_env: VecEnv | None) -> tuple[Outcome, dict[str, float]]:
    """Train with files and screen open, then draw the curve."""
    settings, config = trainer.settings, trainer.settings.train
    logger = Logger(trainer.folder, config.tag_style, trainer.steps)
    try:
        if not trainer.steps:
            logger.hyper_parameters(settings.to_dict())
        title = (
            f"{settings.algorithm} on {settings.env}, {config.num_envs} environments, "
            f"{trainer.env.device}"
        )
        title += f", {torch.get_num_threads()} threads" if trainer.env.device.type == "cpu" else ""
        with Display(title, trainer.planned_steps(), quiet=config.quiet) as display:
            outcome = trainer.run(logger, display)
    finally:
        logger.close()
    baseline: dict[str, float] = {}
    if (
        outcome.signal_number is None
        and eval_env is not None
        and outcome.evaluation
        and (act := scripted(eval_env))
    ):
        with suppress(EndlessEpisodeError):
            values = evaluate(act, eval_env, config.eval_episodes, seed=EVAL_SEED)
            baseline = values if values["eval/episodes"] else {}
    try:
        if baseline:
            note_references(trainer.folder, {"scripted policy": baseline["eval/mean_reward"]})
        plot_curve(trainer.folder)
    except (
        GpurlError
    ) as error:  # a full disk: the training is done and must not fail for its picture
        logging.getLogger("gpurl").warning("no learning curve: %s", error)
    return outcome, baseline


def evaluate_run(
    path: str | Path,
    episodes: int = 100,
    device: str = "auto",
    seed: int = EVAL_SEED + 1,
    best: bool = True,
) -> dict[str, float]:
    """Play `episodes` greedy episodes with the policy of a run; returns mean, standard deviation
    and length.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    chosen = choose_device(device)
    policy = load(path, str(chosen), best=best)
    count = min(episodes, policy.settings["num_envs"])  # an environment may be a process
    env = make_env(policy.settings["env"], count, chosen, seed, **policy.settings["env_options"])
    policy_state = policy.algorithm.initial_policy_state(env.num_envs)
    try:
        return evaluate(greedy(policy.algorithm), env, episodes, policy_state, seed)
    finally:
        env.close()
