"""What a user calls from Python: `train` runs one job from its settings to its learning curve;
`evaluate_run` plays a trained policy.
"""

import logging
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpurl.algorithms import algorithm_names, make_algorithm, resolve_algorithm
from gpurl.algorithms.actor_critic import OffPolicyActorCritic
from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.bc import BC
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.engine.determinism import beyond_reach, deterministic
from gpurl.engine.threads import keep_large_blocks, quickest_threads
from gpurl.envs.registry import make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import CheckpointError, EndlessEpisodeError, GpurlError, UsageError
from gpurl.guards.contract import reset_env
from gpurl.memory import available_bytes, in_gib
from gpurl.policy import Policy, load
from gpurl.run.display import Display
from gpurl.run.evaluator import evaluate, greedy, scripted
from gpurl.run.logger import Logger
from gpurl.run.out_of_memory import Watch, told_what_fits
from gpurl.run.plot import note_references, plot_curve
from gpurl.run.run_folder import create_run_folder, lock_run, note_resume, write_run_info
from gpurl.run.settings import Settings, make_settings, merge
from gpurl.run.trainer import EVAL_SEED, Outcome, Trainer


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


def train(algorithm: str = "ppo", env: str = "chasing", **settings: Any) -> Run:
    """Train `algorithm` on `env` and return the run.

    settings: any field of `gpurl.run.settings.TrainConfig` and of the algorithm's config, and
    `env_options`, a dict of the task's own options.
    `gpurl train ALGORITHM ENV --help` lists them. Raises UsageError, EnvError, NonFiniteError or
    CheckpointError (gpurl.errors). After SIGINT or SIGTERM the run is saved, then the signal goes
    to the caller: KeyboardInterrupt, or the caller's own handler.
    """
    return _signals_passed_on(run(make_settings(algorithm, env, **settings)))


def resume(path: str | Path, **changes: Any) -> Run:
    """Go on with the run in `path` from its latest good checkpoint; `changes` are settings that may
    change, total_steps above all.

    Raises as `train` does.
    """
    algorithm, env, saved = saved_settings(Path(path))
    return _signals_passed_on(
        run(make_settings(algorithm, env, **merge(saved, changes)), resume_from=Path(path))
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
    settings: Settings, resume_from: Path | None = None, command: list[str] | None = None
) -> Run:
    """Train by `settings`, in a new run folder or on from the one in `resume_from`."""
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
            with told_what_fits(settings, device) as memory:
                return _run(settings, device, None, None, command or sys.argv, memory)
        with (
            lock_run(resume_from),
            told_what_fits(settings, device) as memory,
        ):  # first the lock: its holder may be about to save
            return _run(
                settings,
                device,
                resume_from,
                load_checkpoint(resume_from, device)[0],
                command or sys.argv,
                memory,
            )


def _run(
    settings: Settings,
    device: torch.device,
    folder: Path | None,
    parts: dict[str, Any] | None,
    command: list[str],
    memory: Watch,
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
        eval_env = _eval_env(settings, device)
        envs += [] if eval_env is None else [eval_env]
        envs.append(_env_of(settings, device))
        trainer = memory.trainer = make_trainer(
            settings, device, eval_env, envs[-1], threads=earlier
        )
        trainer.folder = folder or create_run_folder(
            Path(config.root), settings.env, settings.algorithm, config.seed, config.run_dir
        )
        with lock_run(trainer.folder) if parts is None else nullcontext():
            if parts is None:
                write_run_info(trainer.folder, settings.to_dict(), command)
                start(trainer)
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


def make_trainer(
    settings: Settings,
    device: torch.device,
    eval_env: VecEnv | None = None,
    env: VecEnv | None = None,
    threads: int | None = None,
) -> Trainer:
    """The environments, the algorithm and the loop of a run, in a process set up for it; call
    `start(trainer)` or `trainer.restore` next.

    threads: of the CPU, where the settings name none and torch has as many.
    """
    config = settings.train
    env = env or _env_of(settings, device)
    _check_agents(settings, env)
    if config.compile:
        if not isinstance(env, TorchEnv):
            raise UsageError(
                f"compile is for tensor tasks, whose functions torch knows; {settings.env} is none"
            )
        env.compile()
    spaces = env.single_observation_space, env.single_action_space
    model = make_algorithm(
        settings.algorithm,
        settings.algorithm_config,
        *spaces,
        config.num_envs,
        device,
        config.seed,
        state_space=env.single_state_space,
    )
    if isinstance(model, BC) and model.config.teacher is not None:
        model.set_teacher(load(model.config.teacher, str(device), config.num_envs).algorithm)
    if config.precision == "tf32" and device.type != "cuda":
        raise UsageError(
            f"precision tf32 is a GPU's, this run is on {device}; take --precision float32, or "
            f"--device cuda"
        )
    torch.backends.cuda.matmul.allow_tf32 = config.precision != "float32"
    model.set_precision(config.precision)
    if device.type == "cpu":
        keep_large_blocks()
        known = threads if threads is not None and threads <= torch.get_num_threads() else None
        known = torch.get_num_threads() if known is None and config.deterministic else known
        torch.set_num_threads(config.threads or known or _quickest_threads(model))
    trainer = Trainer(settings, model, env, eval_env, Path())
    if config.deterministic and (note := beyond_reach(env)):
        trainer.notes.append(note)
    return trainer


def start(trainer: Trainer) -> None:
    """Begin a new run; with the actor of another one where its settings name it, which a resumed
    run needs no more.
    """
    model = trainer.algorithm
    if isinstance(model, OffPolicyActorCritic) and model.config.actor_from is not None:
        path = model.config.actor_from
        model.take_actor_from(load(path, str(model.device)).algorithm, path)
    trainer.start()


def _env_of(settings: Settings, device: torch.device) -> VecEnv:
    """The environments that train."""
    _must_fit(settings, device)
    return make_env(
        settings.env, settings.train.num_envs, device, settings.train.seed, **settings.env_options
    )


def _must_fit(settings: Settings, device: torch.device) -> None:
    """UsageError for more environments than there is memory for their state and a rollout of their
    observations, which is not all.
    """
    free, (env_class, _) = available_bytes(device), resolve_env(settings.env)
    if free is None or not issubclass(env_class, TorchEnv):  # one of another kind may be a process
        return
    one, count = make_env(settings.env, 1, **settings.env_options), settings.train.num_envs
    obs = reset_env(one)
    state = sum(
        leaf.nbytes for leaf in tree_leaves(one.state_dict()) if isinstance(leaf, torch.Tensor)
    )
    one.close()
    each = (
        2 * state + (settings.algorithm_config.horizon + 2) * obs.nbytes
    )  # a step has both before and after it
    if count * each > free:
        raise UsageError(
            f"{count:,} environments of {settings.env} take more than {in_gib(count * each)} on "
            f"{device}, where {in_gib(free)} are free: "
            f"num_envs must be below {free // each:,}"
        )


def _check_agents(settings: Settings, env: VecEnv) -> None:
    """UsageError where `env` has several agents and the algorithm knows of one."""
    if env.num_agents == 1 or resolve_algorithm(settings.algorithm).takes_agents:
        return
    able = [name for name in algorithm_names() if resolve_algorithm(name).takes_agents]
    hint = f"; {', '.join(able)} {'take' if len(able) > 1 else 'takes'} several" if able else ""
    raise UsageError(
        f"{settings.algorithm} is for one agent, {settings.env} has {env.num_agents}{hint}"
    )


def _quickest_threads(model: Algorithm) -> int:
    """Up to torch's own number, by a few passes of the largest batch; threads that wait for each
    other gain nothing.
    """
    rows = model.largest_batch()
    obs, carry = torch.zeros(rows, *model.row_shape()), model.initial_carry(rows)
    return quickest_threads(
        torch.get_num_threads(), torch.set_num_threads, lambda: model.value(obs, carry)
    )


def _run_logged(trainer: Trainer, eval_env: VecEnv | None) -> tuple[Outcome, dict[str, float]]:
    """Train with files and screen open, then draw the curve."""
    settings, config = trainer.settings, trainer.config
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


def _eval_env(settings: Settings, device: torch.device) -> VecEnv | None:
    """Environments for evaluation only, never more than episodes wanted or than training has; None
    where there can be no second ones.
    """
    count = min(settings.train.eval_episodes, settings.train.num_envs)
    if count > 0 and resolve_env(settings.env)[0].single_instance:
        if settings.train.stop_return is not None:
            raise UsageError(
                f"stop_return needs evaluations while training goes on, but {settings.env} can "
                f"exist only once in a process"
            )
        return None
    return (
        make_env(settings.env, count, device, EVAL_SEED, **settings.env_options)
        if count > 0
        else None
    )


def choose_device(name: str) -> torch.device:
    """The torch device called `name`; auto takes CUDA where it is. UsageError when it is not
    there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"no device is called {name!r}; it must be auto, cpu, cuda or cuda:N"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")  # without an index, as tensors say it
    if (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            f"gpurl doctor says why"
        )
    device = torch.device("cuda", device.index or 0)  # with an index, as tensors say it
    torch.cuda.set_device(device)  # where Triton launches
    return device


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
    carry = policy.algorithm.initial_carry(env.num_envs)
    try:
        return evaluate(greedy(policy.algorithm), env, episodes, carry, seed)
    finally:
        env.close()
