"""What a user calls from Python: `train` runs a job from its settings to its learning curve,
`evaluate_run` plays a trained policy.
"""

import logging
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from gymnasium.spaces import Box

from gpurl.algorithms import resolve_algorithm
from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.folders import check_exists, is_checkpoint, load_checkpoint
from gpurl.checkpoints.plain_files import Json
from gpurl.checkpoints.run_parts import LARGE_PARTS
from gpurl.checks import check_torch_defaults
from gpurl.discovery import is_of_session
from gpurl.engine.determinism import deterministic
from gpurl.engine.threads import refuse_fork
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import EndlessEpisodeError, UsageError
from gpurl.nn.ranks import Alone
from gpurl.policy import Policy, load
from gpurl.run.callbacks import Callback, check_callbacks
from gpurl.run.display import Display, SilentDisplay, counted
from gpurl.run.evaluator import EVAL_SEED, evaluate, scripted
from gpurl.run.given import EnvOrName, name_of_algorithm, name_of_env
from gpurl.run.listing import note_end
from gpurl.run.logger import Logger
from gpurl.run.memory_need import check_memory
from gpurl.run.notebook import show_picture
from gpurl.run.once import warn_once
from gpurl.run.out_of_memory import explain_out_of_memory
from gpurl.run.own_algorithm import explain_own_errors
from gpurl.run.plot import note_references, plot_curve
from gpurl.run.ranks import device_of_rank, folder_to_resume, is_rank, join_ranks
from gpurl.run.resume import resume_notes
from gpurl.run.run_folder import (
    ENDED_FILE,
    LOCK_SECONDS,
    RANK_LOCK_SECONDS,
    absolute,
    create_run_folder,
    lock_run,
    note_resume,
    run_of,
    safe_name,
    same_directory,
    write_run_info,
)
from gpurl.run.settings import Settings, TrainConfig, make_settings, merge
from gpurl.run.setup import choose_device, evaluation_env, make_trainer, training_env
from gpurl.run.shards import settings_of_rank
from gpurl.run.summary import html_summary, spread, summary
from gpurl.run.terminal import fill_standard_streams, say
from gpurl.run.trackers.process import Trackers
from gpurl.run.trackers.tracker import RunCard, check_installed
from gpurl.run.trainer import Outcome, Trainer
from gpurl.video.film import MAX_FPS, Film, greedy_film


@dataclass(repr=False)
class Run:
    """A finished training run."""

    folder: Path
    outcome: Outcome
    baseline: dict[str, float]  # evaluation of the environment's scripted policy, {} if it has none
    needs_env: bool = False  # no command can make its environment: see `gpurl.resume`
    needs_session: bool = False  # only this process knows its algorithm
    rank: int = 0  # of the process, among those of the run: the first one reports
    member: int | None = None  # of the run's population, if this is one of its seeds

    def __repr__(self) -> str:
        values = self.outcome.evaluation
        text = "" if self.member is None else f"member {self.member}, "
        text += f"return {spread(values, 2)}, " if values else ""
        steps = counted(self.outcome.steps, "step")
        return f"Run({self.folder}, {text}{steps}, {self.outcome.reason})"

    def _repr_html_(self) -> str:
        """A notebook shows this table."""
        return html_summary(self.folder, self.outcome, self.baseline)

    @property
    def final_evaluation(self) -> dict[str, float]:
        """The evaluation at the run's last step; {} where it has none: its episodes did not end, or
        all gave NaN. `outcome.evaluation` is then an earlier one.
        """
        values = self.outcome.evaluation
        return values if values.get("at_step") == self.outcome.steps else {}

    def policy(self) -> Policy:
        """The best policy of the run, or of this member of its population."""
        return load(self.folder, member=self.member)

    def summary(self) -> str:
        """How good the policy is, how the run ended, and what to do next, in a few lines."""
        return summary(self.folder, self.outcome, self.baseline, self.needs_env, self.needs_session)


def train(
    algorithm: str | type[Algorithm] = "ppo",
    env: EnvOrName = "chasing",
    callbacks: Sequence[Callback] = (),
    **settings: object,
) -> Run:
    """Train `algorithm` on `env` and return the run.

    algorithm: a name, a module path or a class. env: those too, a Gymnasium id, a function that
    makes a gymnasium.Env, or existing environments, which are evaluated after the training only.
    callbacks: see `gpurl.Callback`.

    settings: any field of `gpurl.run.settings.TrainConfig` and of the algorithm's config, and
    `env_options`, a dict of the task's options. `gpurl train ALGORITHM ENV --help` lists
    them. Raises UsageError, EnvError, NonFiniteError or CheckpointError (gpurl.errors). After
    SIGINT or SIGTERM the run is saved, then the signal goes to the caller: KeyboardInterrupt, or
    the caller's handler.
    """
    env_name, instance = name_of_env(env)
    settings |= _of_instance(instance, settings)
    chosen = make_settings(name_of_algorithm(algorithm), env_name, **settings)
    return _close(run(chosen, callbacks=callbacks, env=instance), chosen, instance)


def resume(
    path: str | Path,
    callbacks: Sequence[Callback] = (),
    env: EnvOrName | None = None,
    **changes: object,
) -> Run:
    """Continue the run in `path` from its latest intact checkpoint; `changes` are settings that may
    change, above all total_steps. A path of one checkpoint begins a new run with it, in the folder
    run_dir, and leaves the old one as it is.

    env: the environment again, as `train` takes it, for a run whose own cannot be made by its name,
    or another with the same spaces. Raises as `train` does.
    """
    algorithm, env_name, saved = saved_settings(Path(path))
    instance = None
    if env is not None:
        saved_name = env_name
        env_name, instance = name_of_env(env)
        if env_name != saved_name:
            saved["env_options"] = {}
        changes |= _of_instance(instance, changes)
    settings = make_settings(algorithm, env_name, **merge(saved, changes))
    finished = run(settings, Path(path), callbacks=callbacks, env=instance)
    return _close(finished, settings, instance)


def _of_instance(instance: VecEnv | None, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that existing environments decide, their number and device; UsageError where
    `settings` say something else, or have options, which nothing would read.
    """
    if instance is None:
        return {}
    if options := settings.get("env_options"):
        raise UsageError(f"env_options {options} are for a name; the given environments are made")
    decided: dict[str, object] = {"num_envs": instance.num_envs, "device": str(instance.device)}
    for key, value in decided.items():
        if settings.get(key, value) not in (value, instance.device):
            raise UsageError(f"{key} is {settings[key]}, the given environment's is {value}")
    return decided


def saved_settings(folder: Path) -> tuple[str, str, dict[str, Json]]:
    """(algorithm, env, all other settings) of the run in `folder`, or of a checkpoint; UsageError
    if it is none, has no checkpoint or another process trains in it, CheckpointError if it is
    damaged.
    """
    check_exists(folder)
    if is_checkpoint(folder):
        return _settings_of(folder)
    if not (folder / "checkpoints").is_dir() and not (folder / "run.pid").exists():
        raise UsageError(
            f"{folder} is not a run folder: it has no checkpoints/; give the folder of the run, or "
            f"of one of its checkpoints, step_*"
        )
    # ranks read it one after another, before one of them locks the folder to train
    seconds = RANK_LOCK_SECONDS if is_rank() else LOCK_SECONDS
    with lock_run(folder, seconds=seconds):
        return _settings_of(folder)


def _settings_of(path: Path) -> tuple[str, str, dict[str, Json]]:
    parts, _ = load_checkpoint(path, quiet=True, without=LARGE_PARTS)
    saved = dict(parts["meta"]["settings"])
    return saved.pop("algorithm"), saved.pop("env"), saved


def _close(finished: Run, settings: Settings, instance: VecEnv | None) -> Run:
    """`finished`, with its summary printed, and in a notebook its learning curve. If a signal ended
    it, the signal goes to the caller: a sweep of runs must end, too.
    """
    # an instance may have been made with any arguments
    finished.needs_env = instance is not None or is_of_session(settings.env)
    finished.needs_session = is_of_session(settings.algorithm)
    if not settings.train.quiet and finished.rank == 0:
        say(finished.summary())
        show_picture(finished.folder / "learning_curve.png")
    if finished.outcome.signal_number is not None:
        signal.raise_signal(finished.outcome.signal_number)
    return finished


def run(
    settings: Settings,
    resume_from: Path | None = None,
    command: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    env: VecEnv | None = None,
    draws: bool = True,
    is_quiet: bool = False,
) -> Run:
    """Train by `settings`, in a new run folder or resuming the one in `resume_from`; a checkpoint
    there is continued in a new folder.

    command: for command.txt, by default that of this process. env: existing environments to train,
    instead of new ones. draws: the learning curve at the end, and what its scripted policy reaches.
    is_quiet: as the setting `quiet`, in this process only.
    """
    config = settings.train
    callbacks = check_callbacks(callbacks)
    fill_standard_streams()
    # absolute, as an environment may change the working directory; shown as it was given
    given = str(config.run_dir or resume_from or config.root)
    source = str(resume_from)
    home = None if given[:1] in "/~" else absolute("")
    resume_from = resume_from and absolute(resume_from)
    root, chosen = absolute(config.root), config.run_dir and str(absolute(config.run_dir))
    _check_folder(resume_from, config.run_dir)
    check_installed(config.track)
    refuse_fork(torch.get_num_threads())
    with ExitStack() as cleanup:
        cleanup.enter_context(warn_once())
        cleanup.enter_context(same_directory())
        ranks = cleanup.enter_context(join_ranks(config.rank_timeout))
        is_first = ranks.index == 0
        if ranks.count > 1:
            _check_for_ranks(ranks, env)
        if ranks.count > 1 or config.requeue:
            # the first rank decides: another one may not see a new file yet
            found = ranks.of_first(str(folder_to_resume(resume_from, chosen, config.requeue) or ""))
            resume_from = Path(found) if found else None
        is_new = resume_from is None or is_checkpoint(resume_from)
        settings_here = settings_of_rank(settings, ranks)
        cleanup.enter_context(deterministic(config.deterministic))
        device = _device_of_run(device_of_rank(config.device, ranks), resume_from is not None)
        check_torch_defaults(device)
        # lock the folder of a resumed run before reading it: another process may be saving
        if resume_from is not None and not is_new and is_first:
            cleanup.enter_context(lock_run(resume_from))
        memory_user = cleanup.enter_context(explain_out_of_memory(settings_here, device))
        cleanup.enter_context(explain_own_errors(resolve_algorithm(settings.algorithm)))
        # only what setting up needs: the large parts are read later
        begun = None
        if resume_from is not None:
            begun, _ = load_checkpoint(resume_from, quiet=True, without=LARGE_PARTS)
        # set up, and undo it in the end
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        matmul = torch.backends.cuda.matmul
        cleanup.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        is_given = env is not None
        eval_env = evaluation_env(settings, device, is_given, ranks)
        if eval_env is not None:
            cleanup.callback(eval_env.close)
        if env is None:
            env = training_env(settings_here, device, ranks)
            cleanup.callback(env.close)
        else:
            check_memory(settings_here, device, env)
        # the last bits of torch's sums depend on the number of threads: a resumed run keeps it
        threads = None if begun is None else begun["trainer"]["threads"]
        if config.video_every is not None and is_first:
            from gpurl.video.during_training import Videos

            callbacks = [*callbacks, Videos(settings, config.video_every)]
        trainer = make_trainer(
            settings, device, eval_env, env, threads=threads, callbacks=callbacks, ranks=ranks
        )
        trainer.needs_env |= is_given
        memory_user.engine = trainer.engine
        # begin or continue
        command = command or sys.argv
        kinds = {type(each) for each in (env, *callbacks, *trainer.algorithm.modules())}
        if resume_from is not None and not is_new:
            trainer.folder = resume_from
        elif is_first:
            trainer.folder = create_run_folder(
                root, settings.env, settings.algorithm, config.seed, chosen
            )
        trainer.folder = Path(ranks.of_first(str(trainer.folder)))
        record = None
        if is_new and is_first:
            cleanup.enter_context(lock_run(trainer.folder))
            write_run_info(trainer.folder, settings.to_dict(), command, kinds)
        if resume_from is None:
            trainer.start()
        else:
            before = _restore(trainer, resume_from, is_new)
            if not is_new and is_first:
                record = note_resume(trainer.folder, settings.to_dict(), command, kinds)
            notes = resume_notes(before, settings, trainer.steps, record)
            trainer.engine.notes[:0] = [f"a new run from {source}"] * is_new + notes
        # train, then compare with the scripted policy and draw the curve
        folder = trainer.folder
        if home is not None and is_first:
            folder = folder.relative_to(home)
        if resume_from is None and config.run_dir is None:  # for who looks while it trains
            trainer.engine.notes.append(f"logs to {folder}")
        if is_first:
            outcome = _run_logged(trainer, not is_new, is_quiet or config.quiet)
        else:
            outcome = _run_silently(trainer)
        baseline = {}
        if draws and eval_env is not None:
            baseline = _scripted_baseline(outcome, eval_env, config, ranks)
        if draws and is_first:
            _draw_curve(trainer.folder, baseline)
        return Run(folder, outcome, baseline, rank=ranks.index)


def _check_folder(resume_from: Path | None, run_dir: str | None) -> None:
    """UsageError where a run would not go on in its folder, or a checkpoint not in a new one."""
    if resume_from is None:
        return
    if is_checkpoint(resume_from):
        if run_dir is None:
            raise UsageError(
                f"{resume_from} is a checkpoint, which a new run continues: name its folder with "
                f"--run-dir; the run itself goes on from its latest checkpoint with --resume "
                f"{run_of(resume_from)}"
            )
    elif Path(run_dir or resume_from).resolve() != resume_from.resolve():
        raise UsageError(
            f"a resumed run continues in its folder, {resume_from}: omit run_dir {run_dir}, or "
            f"resume one of its checkpoints, checkpoints/step_*, there"
        )


def _restore(trainer: Trainer, folder: Path, in_new_folder: bool) -> dict[str, Json]:
    """Continue from the checkpoint in `folder`; returns its settings. What was read of it, above
    all a replay buffer, is freed.
    """
    parts, _ = load_checkpoint(folder, trainer.env.device)
    trainer.restore(parts, in_new_folder)
    return dict(parts["meta"]["settings"])


def _device_of_run(name: str, is_resumed: bool) -> torch.device:
    try:
        return choose_device(name)
    except UsageError as error:
        if not is_resumed:
            raise
        raise UsageError(
            f"{error}; the run was trained on it, --device auto continues it here"
        ) from None


def _check_for_ranks(ranks: Alone, env: VecEnv | None) -> None:
    """UsageError for what only one process can do."""
    if env is not None:
        raise UsageError(
            f"an environment that exists is one process', this run has {ranks.count}: give its "
            f"name, so that each makes its own"
        )


def _run_silently(trainer: Trainer) -> Outcome:
    """Train on a rank that writes nothing."""
    return trainer.run(None, SilentDisplay("", None, quiet=True))


def _run_logged(trainer: Trainer, is_resumed: bool, is_quiet: bool) -> Outcome:
    """Train with log files, trackers and display open."""
    settings = trainer.settings
    config = settings.train
    device = trainer.env.device
    trackers = Trackers(config.track, _card(settings, trainer.folder), trainer.folder, is_resumed)
    logger = Logger(trainer.folder, config.tag_style, trainer.steps, trackers)
    # a run that is killed says nothing
    with suppress(OSError):
        (trainer.folder / ENDED_FILE).unlink(missing_ok=True)
    ended_by = ""
    try:
        if not trainer.steps or not is_resumed:
            logger.hyper_parameters(settings.to_dict())
        environments = counted(config.num_envs, "environment")
        if config.population > 1:
            environments = f"{config.population} members of {environments}"
        title = f"{settings.algorithm} on {settings.env}, {environments}, {device}"
        if trainer.ranks.count > 1:
            title += f", {trainer.ranks.count} processes"
        if device.type == "cpu":
            title += f", {counted(torch.get_num_threads(), 'thread')}"
        total_steps = trainer.steps + trainer.remaining_steps()
        limit = config.max_seconds
        with Display(title, total_steps, quiet=is_quiet, max_seconds=limit) as display:
            outcome = trainer.run(logger, display)
        ended_by = outcome.reason
        return outcome
    except BaseException as error:
        ended_by = f"error: {type(error).__name__}"
        raise
    finally:
        logger.close()
        note_end(trainer.folder, ended_by, trainer.steps)
        trackers.close(_tracked_summary(trainer, ended_by))


def _card(settings: Settings, folder: Path) -> RunCard:
    """The run as trackers show it."""
    name = f"{settings.env}-{settings.algorithm}-{folder.name}"
    root = Path(settings.train.root).expanduser().absolute()
    # a run may be resumed from another directory than that to which its root is relative
    algorithm, env = folder.absolute().parent, folder.absolute().parent.parent
    if (algorithm.name, env.name) == (safe_name(settings.algorithm), safe_name(settings.env)):
        root = env.parent
    return RunCard(settings.train.project, name, str(root), settings.to_dict())


def _tracked_summary(trainer: Trainer, ended_by: str) -> dict[str, Json]:
    """What trackers show of the whole run."""
    summary: dict[str, Json] = {"ended_by": ended_by, "env_steps": trainer.steps}
    if math.isfinite(best := trainer.evaluations.best_return):
        summary["best_return"] = best
    return summary


def _scripted_baseline(
    outcome: Outcome, env: VecEnv, config: TrainConfig, ranks: Alone
) -> dict[str, float]:
    """The evaluation of the environment's scripted policy; {} if it has none, if its episodes do
    not end, or after a signal to one of the ranks.
    """
    act = scripted(env)
    (was_signaled,) = ranks.any(outcome.signal_number is not None)
    if act is None or was_signaled or not outcome.evaluation:
        return {}
    try:
        values = evaluate(act, env, config.eval_episodes, seed=EVAL_SEED, ranks=ranks)
    except EndlessEpisodeError:
        return {}
    return values if values["eval/episodes"] else {}


def _draw_curve(folder: Path, baseline: dict[str, float]) -> None:
    """The learning curve; a failure, for example a full disk, is a warning: the training is
    done.
    """
    try:
        if baseline:
            note_references(folder, {"scripted policy": baseline["eval/mean_reward"]})
        plot_curve(folder)
    except Exception as error:  # of a file, a font, a name that matplotlib cannot draw
        logging.getLogger("gpurl").warning("no learning curve: %s", error)


def evaluate_run(
    path: str | Path,
    episodes: int = 100,
    device: str = "auto",
    seed: int | None = None,
    best: bool = True,
    env: EnvOrName | None = None,
    env_options: Mapping[str, object] | None = None,
    member: int | str | None = None,
) -> dict[str, float]:
    """Play `episodes` greedy episodes with the policy of a run; returns mean, standard deviation
    and length, and `step`, the environment steps that the policy was trained for.

    seed: of the environments, by default one that no evaluation of a training uses. env: as `train`
    takes it, for another task than that of the training or one that its name cannot make;
    an instance is not closed. env_options: changes of the training's, or those of the other task.
    member: of a population, by default the best one; "all": all of them as an ensemble.
    UsageError if the task has other spaces.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, got {episodes}")
    name, instance = ("", None) if env is None else name_of_env(env)
    _of_instance(instance, {"env_options": env_options})
    chosen = choose_device(device) if instance is None else instance.device
    policy = load(path, str(chosen), best=best, member=member)
    name, options = task_to_play(policy, name, env_options)
    # not more environments than the run had: each may be a process
    count = min(episodes, policy.settings["num_envs"])
    seed = EVAL_SEED + 1 if seed is None else seed
    made = instance
    if made is None:
        made = make_env(name, count, chosen, seed, **options)
    try:
        check_spaces(policy.algorithm, made, name)
        act, policy_state = policy.player(made.num_envs)
        values = evaluate(act, made, episodes, policy_state, seed)
        return {"step": float(policy.step), **values}
    finally:
        if instance is None:
            made.close()


def task_to_play(
    policy: Policy, env: str | None, changes: Mapping[str, object] | None
) -> tuple[str, dict[str, object]]:
    """(name, options) of `env`, or of the task of the training, whose options stay where `changes`
    has no others.
    """
    settings = policy.settings
    name = env or settings["env"]
    of_training = settings["env_options"] if name == settings["env"] else {}
    return name, {**of_training, **(changes or {})}


def film(
    path: str | Path,
    episodes: int | None = None,
    device: str = "auto",
    seed: int = 0,
    height: int | None = None,
    speed: float = 1.0,
    max_fps: float = MAX_FPS,
    best: bool = True,
    env: str | None = None,
    env_options: Mapping[str, object] | None = None,
    member: int | str | None = None,
) -> Film:
    """Greedy episodes of the policy of a run as pictures, `for picture in film(RUN)`.

    episodes: side by side, by default 4 of a tensor task and 1 of any other. height: pixels of one
    picture, by default 400, and 240 of several. speed: 2 plays twice as fast. best, env,
    env_options and member: as `evaluate_run`, env by its name. Raises as `Film`.
    """
    policy = load(path, str(choose_device(device)), best=best, member=member)
    name, options = task_to_play(policy, env, env_options)
    made = greedy_film(
        policy.player, policy.device, name, options, episodes, seed, height, speed, max_fps
    )
    try:
        check_spaces(policy.algorithm, made.env, name)
    except UsageError:
        made.env.close()
        raise
    return made


def make_env_for(
    policy: Policy, name: str, device: torch.device, seed: int, options: Mapping[str, object]
) -> VecEnv:
    """One environment `name` for `policy`; UsageError if it has other spaces."""
    made = make_env(name, 1, device, seed, **options)
    try:
        check_spaces(policy.algorithm, made, name)
    except UsageError:
        made.close()
        raise
    return made


def check_spaces(algorithm: Algorithm, env: VecEnv, name: str) -> None:
    """UsageError if the policy cannot act in `env`."""
    pairs = (
        ("observations", algorithm.observation_space, env.single_observation_space),
        ("actions", algorithm.action_space, env.single_action_space),
    )
    for what, trained, offered in pairs:
        if isinstance(trained, Box) and isinstance(offered, Box):
            # a saved StackedBox is a plain Box; observations may have other limits, actions not
            fits = (trained.shape, trained.dtype) == (offered.shape, offered.dtype)
            fits &= getattr(trained, "groups", None) == getattr(offered, "groups", None)
            fits &= what == "observations" or trained == offered
        else:
            fits = trained == offered
        if not fits:
            raise UsageError(f"the policy was trained on {what} {trained}, {name} has {offered}")
