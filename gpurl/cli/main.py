"""The command line: heavy modules are imported by the command that needs them, so that --help is
printed at once.
"""

import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from gpurl.errors import CheckpointError, GpurlError, RankError, UsageError, did_you_mean
from gpurl.run.terminal import fill_standard_streams, say

if TYPE_CHECKING:
    from gpurl.api import Run
    from gpurl.cli.settings import TrainOptions
    from gpurl.run.settings import Settings

USAGE = """usage: gpurl COMMAND ...

  gpurl train ALGORITHM ENV [settings]          train; --help shows the settings, --help-all all
  gpurl train --resume RUN [settings]           continue a run
        (RUN/checkpoints/step_X --run-dir NEW)  or an earlier checkpoint, as a new run
  gpurl train ... --run-dir RUN --requeue       begin a run, and continue it by the same command
  gpurl train ... --callback MODULE:CLASS       with your own callback
  gpurl train ... --seeds 5                     five seeds, and their mean
  gpurl train ... --seeds 5 --jobs 1            a run of its own for each seed
  gpurl train ... --processes 4                 one agent on four GPUs
  gpurl train ... --population 5                five agents at once in one run
  gpurl tune ALGORITHM ENV [--trials 30]        search for good settings (needs Optuna)
        [--space FILE] [--storage FILE] [--jobs 1] [settings]
  gpurl tune --show STORAGE                     list the trials of a search
  gpurl pbt ALGORITHM ENV --population 8        members on a cluster (needs Ray), selected
        [--address auto] [--cpus 1] [--gpus 0]
  gpurl tournament ALGORITHM ENV --population 8
                                                members that go on from a leaderboard
  gpurl config ALGORITHM ENV [settings]         print all settings, explained, for --config
  gpurl eval RUN [--episodes 100] [--env ENV]   evaluate a trained policy, here or elsewhere
  gpurl play RUN [--episodes 3]                 play episodes and draw the first
  gpurl play RUN --video FILE.mp4               film episodes, side by side
  gpurl play RUN --viewer                       in the browser, MuJoCo tasks
  gpurl export RUN [--format onnx|pt2|torchscript] [--out FILE]
                                                one file that acts without gpurl
  gpurl soup RUN [--run-dir FOLDER]             average the members of a population, a new run
  gpurl plot RUN                                draw the learning curve again
  gpurl plot RUN RUN ... [--by SETTING]         compare runs: mean over seeds with its interval
  gpurl plot --bench [FOLDER] [--out FOLDER]    draw the results of the benchmarks
  gpurl report RUN [--out FILE.html]            one page: curves, video, settings, versions
  gpurl runs [ROOT] [--filter env=chasing]      list runs; --prune deletes some
  gpurl profile ALGORITHM ENV [settings]        measure where the time goes, write a trace
        [--out FOLDER] [--iterations 3]
  gpurl convert FILE [--out FILE.safetensors]   read weights of other trainers, execute nothing
  gpurl convert FILE --algorithm ppo --env ENV --network.activation tanh
                                                make a run from them, to evaluate and train
  gpurl envs [NAME]                             list the environments, or explain one
  gpurl check-env MODULE                        find what is wrong with an environment
  gpurl bench                                   measure throughput and kernels
  gpurl doctor                                  report what this machine has and lacks
  gpurl completion bash|zsh|fish                print a script that completes all of this
  gpurl doctor DUMP                             report what led to NaN, from a run's non_finite/

RUN is a run folder. Settings are written --num-envs 4096, --num_envs 4096 or num_envs=4096;
--config FILE.yaml reads them from a file.
Exit codes: 0 done, 1 a file cannot be written, 2 wrong use, 3 the environment misbehaves, 4 NaN or
infinity, 5 checkpoint, 6 another process of the run, 129, 130, 143, 152 stopped by a signal.
"""
FAULT_SECONDS = 10.0  # that a rank waits at most after the error of another one


def run() -> NoReturn:
    """The process of one command: ends with its exit code."""
    fill_standard_streams()
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal: escapes, no traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # torch ends the process at its import there, with a word of another library
    try:
        os.getcwd()
    except FileNotFoundError:
        say("gpurl: this folder does not exist any more: change to another one", is_error=True)
        sys.exit(2)
    code = main()
    # Isaac Sim ends the process when it closes, and must know the code
    if simulator := sys.modules.get("gpurl.envs.isaac_lab"):
        simulator.close_simulator(code)
    sys.exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Python finds my_env.py in the working directory; last, so that no file there hides a library
    with suppress(FileNotFoundError):  # it was deleted
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        from gpurl import __version__

        print(f"gpurl {__version__}")
        return 0
    try:
        return _run_command(words[0], words[1:])
    except GpurlError as error:
        say(f"gpurl: {error}", is_error=True)
        if isinstance(error, UsageError):
            from gpurl.cli.run_modules import module_hint

            if hint := module_hint(words, str(error)):
                say(hint, is_error=True)
        if isinstance(error, RankError):
            time.sleep(FAULT_SECONDS)  # until the launcher has the exit code of the rank at fault
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except (MemoryError, RuntimeError) as error:
        from gpurl.kernels.memory_errors import is_out_of_memory

        if is_out_of_memory(error):
            say(f"gpurl: memory ran out: {error or type(error).__name__}", is_error=True)
        elif "start new thread" in str(error):
            say(f"gpurl: {error}: the system's limit of processes (ulimit -u)", is_error=True)
        else:
            raise
        return UsageError.exit_code


def _run_command(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise UsageError(
            f"gpurl has no command {name!r}; {did_you_mean(name, COMMANDS)}Known: "
            f"{', '.join(COMMANDS)}"
        )
    if name in TAKE_NAMES:
        from gpurl.cli.names_page import asks_for_names, names_page

        if asks_for_names(words):
            print(names_page(name))
            return 0
    if name in PARSE_THEMSELVES:
        return COMMANDS[name](words)
    import tyro

    from gpurl.cli.flags import WHOLE_NUMBERS, check_options
    from gpurl.cli.names_page import HELP

    command = COMMANDS[name]
    if not HELP & {*words}:
        check_options(words, command, f"gpurl {name}")
    # a help text is one line: tyro would keep the line breaks of the source
    command.__doc__ = re.sub(r"\n {12,}(?=\S)", " ", command.__doc__ or "")
    # prints help and wrong options, ends with exit code 2 there; errors of the command pass through
    return tyro.cli(command, args=words, prog=f"gpurl {name}", registry=WHOLE_NUMBERS)


# ---- commands that parse their words themselves ----


def train(words: list[str]) -> int:
    """Parse the settings, train, print the result."""
    # to import torch takes seconds: a terminal says at once that something happens
    is_rank = "RANK" in os.environ  # one of several, which another process has started
    is_silent = is_rank or any(word in SILENT for word in words)
    if sys.stdout is not None and sys.stdout.isatty() and words and not is_silent:
        print(f"gpurl train {shlex.join(words[:2])} starts ...", flush=True)
    from gpurl.cli.settings import parse_train

    settings, options = parse_train(words)
    if options.processes > 1 and not is_rank:
        from gpurl.cli.processes import train_on

        return train_on(options.processes, options.max_restarts, settings, options.resume, words)
    from gpurl.api import run
    from gpurl.run.callbacks import make_callbacks

    command = ["gpurl", "train", *words]
    if options.seeds > 1:
        return _train_seeds(settings, options, command)
    callbacks = make_callbacks(options.callback)
    finished = run(settings, options.resume, command, callbacks=callbacks)
    if not settings.train.quiet and finished.rank == 0:
        say(finished.summary())
    return _exit_code(finished)


def _train_seeds(settings: "Settings", options: "TrainOptions", command: list[str]) -> int:
    """Train several seeds, print each and their mean."""
    from gpurl.run.comparison import comparison_table
    from gpurl.seeds import compare_seeds, run_seeds

    is_quiet = settings.train.quiet
    seeds = range(settings.train.seed, settings.train.seed + options.seeds)
    runs, failed = run_seeds(
        settings,
        seeds,
        command,
        options.callback,
        after=lambda finished: None if is_quiet else say(f"{finished.summary()}\n"),
        jobs=options.jobs,
    )
    # after a signal; those before it say themselves how they continue
    if (later := seeds[len(runs) + len(failed) :]) and not is_quiet:
        named = ", ".join(map(str, later))
        flags = f"--seed {later[0]}" + (f" --seeds {len(later)}" if len(later) > 1 else "")
        say(f"not begun: seed {named}; {flags} in place of --seeds {options.seeds} trains the rest")
    if failed:
        say(f"{len(failed)} of {options.seeds} seeds failed, see above", is_error=True)
    codes = [_exit_code(one) for one in runs] + [error.exit_code for error in failed]
    # the mean needs scipy, and a return of each run: the trainings are done all the same
    if len(runs) > 1:
        try:
            group, picture = compare_seeds(runs)
            if not is_quiet:
                say(f"{comparison_table([group])}\npicture {picture}")
        except GpurlError as error:
            say(f"no mean over seeds: {error}", is_error=True)
    return next((code for code in codes if code), 0)


def _exit_code(finished: "Run") -> int:
    # the shell's convention for a process that a signal ended
    if finished.outcome.signal_number:
        return 128 + finished.outcome.signal_number
    return CheckpointError.exit_code if finished.outcome.unsaved else 0


def tune(words: list[str]) -> int:
    """Search for settings by Optuna, print the trials."""
    from gpurl.cli.settings import parse_tune

    settings, options = parse_tune(words)
    from gpurl.cli.tune import run_tuning, show

    if settings is None:
        assert options.show is not None
        return show(options.show)
    return run_tuning(settings, options, words)


def pbt(words: list[str]) -> int:
    """Population based training on a cluster."""
    return _train_population("pbt", words)


def tournament(words: list[str]) -> int:
    """A population on a cluster whose members go on from a leaderboard."""
    return _train_population("tournament", words)


def _train_population(name: str, words: list[str]) -> int:
    from gpurl.cli.settings import parse_population

    settings, options = parse_population(words, name)
    from gpurl.cli.cluster import run_population

    return run_population(name, settings, options, words)


def config(words: list[str]) -> int:
    """Print a file of all settings, explained."""
    from gpurl.cli.settings import parse_config

    settings = parse_config(words)
    from gpurl.cli.config_template import config_template

    print(config_template(settings), end="")
    return 0


def profile(words: list[str]) -> int:
    """Train for a few iterations, print where their time goes, write a trace file."""
    from gpurl.cli.settings import parse_profile

    settings, options = parse_profile(words)
    from gpurl.cli import profile as module
    from gpurl.cli.profile_report import report

    print(report(module.profile(settings, options.iterations, options.warm_up, options.out)))
    return 0


def convert(words: list[str]) -> int:
    """Write the tensors of another trainer's file as safetensors, or its policy as a run."""
    from gpurl.cli.settings import parse_convert

    options, settings = parse_convert(words)
    from gpurl.cli.convert.tensors import read_foreign, write_safetensors

    converted = read_foreign(options.file)
    # only the tensors
    if settings is None:
        target = options.out or options.file.with_suffix(".safetensors")
        write_safetensors(converted, target)
        print(f"{converted.table()}\n{len(converted.tensors)} tensors in {target}")
        return 0
    # a run with this policy
    from gpurl.cli.convert.policy import write_policy

    command = ["gpurl", "convert", *words]
    folder, notes = write_policy(converted, settings, options.unit_actions, command)
    print("\n".join([*converted.notes, *notes, f"run folder {folder}: gpurl eval {folder}"]))
    return 0


def bench(words: list[str]) -> int:
    """Run the scripts of benchmarks/."""
    from gpurl.cli.doctor import run_benchmarks

    return run_benchmarks(words)


def print_json(values: Mapping[str, object]) -> None:
    """One line of JSON, which has no NaN and no infinity."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    print(json.dumps(known))


# ---- commands whose options are their parameters, parsed by tyro ----


def evaluate(
    run: Path,
    /,
    episodes: int = 100,
    device: str = "auto",
    latest: bool = False,
    env: str | None = None,
    env_options: tuple[str, ...] = (),
    seed: int | None = None,
    member: str | None = None,
    json: bool = False,
) -> int:
    """Evaluate a trained policy.

    Args:
        run: RUN, a run folder
        episodes: greedy episodes that count, the first of each environment
        device: cpu, cuda or auto
        latest: the latest checkpoint, not the best one
        env: another environment than that of the training, with the same spaces
        env_options: its options as NAME=VALUE, the others are those of the training
        seed: of the environments; by default one that no evaluation of a training uses
        member: its number in a population, by default the best one; all: all as an ensemble
        json: print the numbers as one line of JSON
    """
    from gpurl.api import evaluate_run
    from gpurl.run.config_file import read_options
    from gpurl.run.display import counted
    from gpurl.run.summary import spread

    options = read_options(env_options) if env_options else None
    values = evaluate_run(run, episodes, device, seed, not latest, env, options, member)
    if json:
        print_json({"run": str(run), **values})
        return 0
    skipped = values.get("eval/non_finite_episodes", 0.0)
    note = f"; {skipped:.0f} gave NaN or infinity and were skipped" if skipped else ""
    print(
        f"return {spread(values, 3)}, length {values['eval/mean_ep_length']:.1f}, "
        f"{counted(int(values['eval/episodes']), 'episode')}{note}; "
        f"policy of step {values['step']:,.0f}"
    )
    return 0


def play(
    run: Path,
    /,
    episodes: int | None = None,
    device: str = "auto",
    seed: int = 0,
    latest: bool = False,
    env: str | None = None,
    env_options: tuple[str, ...] = (),
    member: str | None = None,
    out: Path | None = None,
    video: Path | None = None,
    height: int | None = None,
    speed: float | None = None,
    viewer: bool = False,
    port: int | None = None,
) -> int:
    """Play greedy episodes and draw the first, film them, or show them in the browser.

    Args:
        run: RUN, a run folder
        episodes: greedy episodes to play, by default 3; in a video side by side, by default 4 of a
            tensor task and 1 of any other
        device: cpu, cuda or auto
        seed: seed of the environment
        latest: the latest checkpoint, not the best one
        env: another environment than that of the training, with the same spaces
        env_options: its options as NAME=VALUE, the others are those of the training
        member: its number in a population, by default the best one; all: all as an ensemble
        out: FILE to write, .png, .svg or .pdf, by default episode.png in the run folder
        video: write this file, .mp4 or .gif, instead of the picture
        height: of the video, pixels of each environment, by default 400, and 240 of several
        speed: of the video or the viewer, by default 1: the time of the task, or 30 steps a second
        viewer: show a MuJoCo task in the browser of this machine, until Ctrl-C or for --episodes
        port: of the viewer's page, by default 8080
    """
    from gpurl.cli.play import film_run, play_run
    from gpurl.run.config_file import read_options

    options = read_options(env_options) if env_options else None
    if out is not None and (viewer or video is not None):
        raise UsageError(
            "--out names the picture of an episode: leave it out with --video, --viewer"
        )
    if viewer:
        from gpurl.cli.viewer import PORT, view_run

        if video is not None or height is not None:
            raise UsageError("--viewer shows episodes, --video and --height are of a video")
        if device not in ("auto", "cpu"):
            raise UsageError(f"--viewer plays on the CPU: leave out --device {device}")
        speed = 1.0 if speed is None else speed
        port = PORT if port is None else port
        view_run(run, episodes, seed, speed, port, print, not latest, env, options, member)
        return 0
    if port is not None:
        raise UsageError("--port is of the viewer: add --viewer")

    if video is None:
        if height is not None or speed is not None:
            raise UsageError("--height and --speed are of a video: add --video FILE.mp4")
        episodes = 3 if episodes is None else episodes
        picture = play_run(run, episodes, device, seed, not latest, env, options, member, out)
        print(f"picture of the first episode: {picture}")
        return 0
    speed = 1.0 if speed is None else speed
    written = film_run(
        run, video, episodes, device, seed, height, speed, not latest, env, options, member
    )
    print(f"video: {written}")
    return 0


def export(
    run: Path,
    /,
    format: Literal["auto", "onnx", "pt2", "torchscript"] = "auto",
    out: Path | None = None,
    latest: bool = False,
    member: int | None = None,
) -> int:
    """Write the policy as one file that acts without gpurl, and its description as JSON.

    Args:
        run: RUN, a run folder
        format: onnx, pt2 (torch.export) or torchscript; auto is that of the suffix of --out,
            .onnx, .pt2 or .pt, else onnx
        out: FILE to write, by default policy.onnx in the run folder; the JSON is FILE.json
        latest: the latest checkpoint, not the best one
        member: of a population, by default the best one
    """
    from gpurl.export.run import export_run

    exported = export_run(run, format, out, not latest, member)
    print(f"policy {exported.file}\ndescription {exported.description}")
    if exported.difference is not None:
        print(f"compared with the policy: actions differ by {exported.difference:.1g} at most")
    if exported.note:
        print(f"note: {exported.note}")
    return 0


def soup(
    run: Path,
    /,
    episodes: int = 100,
    device: str = "cpu",
    latest: bool = False,
    run_dir: str | None = None,
) -> int:
    """Average the members of a population, those that make the average better, into a new run.

    Args:
        run: RUN, a run folder of a population
        episodes: greedy episodes by which an average is judged
        device: cpu, cuda or auto
        latest: the latest checkpoint, not the best one
        run_dir: the folder of the new run
    """
    from gpurl.model_soup import soup as make_soup

    made = make_soup(run, episodes, device, not latest, run_dir, sys.argv)
    members = ", ".join(map(str, made.members))
    print(
        f"members {members}: return {made.mean_return:.3f} over other episodes, member "
        f"{made.members[0]} alone {made.best_return:.3f}\nrun folder {made.folder}"
    )
    return 0


def plot(
    folders: tuple[Path, ...] = (),
    /,
    bench: bool = False,
    out: Path | None = None,
    by: str = "algorithm",
) -> int:
    """Draw the learning curve of a run again, several runs in one picture, or the benchmarks.

    Args:
        folders: RUN, a run folder, or several of one task; with --bench the folder of results, by
            default runs/bench
        bench: draw the results of gpurl bench
        out: FILE to write, .png, .svg or .pdf, by default learning_curve.png in the run folder, and
            of several runs comparison.png; with --bench a folder
        by: setting by which several runs are grouped, such as learning_rate or network.hidden
    """
    if bench:
        from gpurl.cli.doctor import OWN_RESULTS
        from gpurl.cli.plot_bench import plot_bench

        if len(folders) > 1:
            raise UsageError(f"--bench draws one folder of results, got {len(folders)}")
        if by != "algorithm":
            raise UsageError(f"--by {by} groups runs, --bench draws results: leave out one")
        for picture in plot_bench(folders[0] if folders else OWN_RESULTS, out):
            print(picture)
        return 0
    from gpurl.run.plot import PICTURES, check_picture_path, place_hint, plot_curve

    if out is not None:
        check_picture_path(out)
    # a shell's runs/chasing/ppo/* names the pictures that --seeds puts beside runs, too
    folders = tuple(each for each in folders if each.suffix not in PICTURES or each.is_dir())
    if len(folders) > 1 or (folders and by != "algorithm"):
        from gpurl.run.comparison import compare_runs, comparison_table, plot_comparison

        groups = compare_runs(folders, by)
        print(comparison_table(groups))
        with place_hint():
            print(plot_comparison(groups, out or Path("comparison.png")))
        return 0
    if not folders:
        raise UsageError("gpurl plot draws one run, gpurl plot RUN, or several, gpurl plot RUN RUN")
    with place_hint():
        print(plot_curve(folders[0], out))
    return 0


def report(run: Path, /, out: Path | None = None, video: Path | None = None) -> int:
    """Write one HTML page of a run: curves, video, times, settings, machine, versions, changes.

    Args:
        run: RUN, a run folder
        out: FILE to write, by default report.html in the run folder
        video: to show, .mp4 or .gif, by default the newest one in the run folder
    """
    from gpurl.run.report import write_report

    print(write_report(run, out, video))
    return 0


def runs(
    root: Path = Path("runs"),
    /,
    sort: Literal[
        "name", "env", "algorithm", "steps", "best", "last", "state", "age", "size"
    ] = "age",
    filter: tuple[str, ...] = (),
    json: bool = False,
    prune: bool = False,
    yes: bool = False,
) -> int:
    """List runs: how far each came, how good it became and how it ended.

    Args:
        root: ROOT, a folder with runs
        sort: column by which they are sorted: the youngest and the largest numbers first
        filter: NAME=PATTERN: runs whose column or setting matches, such as env=chasing state=failed
        json: print one line of JSON for each run
        prune: say which runs would be deleted: those of the filter, without one those that failed
            before their first checkpoint
        yes: delete them
    """
    from gpurl.cli.runs import as_json, choose_runs, run_table
    from gpurl.cli.runs import prune as prune_runs
    from gpurl.run.listing import has_checkpoint

    if yes and not prune:
        raise UsageError("--yes goes with --prune")
    if json and prune:
        raise UsageError("--prune has no form in JSON: leave out --json")
    chosen = choose_runs(root, sort, filter)
    if prune:
        if not filter:
            chosen = [run for run in chosen if run.state == "failed" and not has_checkpoint(run)]
        print("\n".join(prune_runs(chosen, yes)))
    elif json:
        for run in chosen:
            print_json(as_json(run))
    elif not chosen:
        print(f"no run in {root}{' matches the filter' if filter else ''}")
    else:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        print(run_table(chosen, shutil.get_terminal_size().columns if is_terminal else None))
    return 0


def envs(name: str = "", /) -> int:
    """List the environments, or explain one and its options.

    Args:
        name: NAME of an environment, such as ant, or its module path
    """
    from gpurl.cli.env_table import describe_env, env_table

    print(describe_env(name) if name else env_table())
    return 0


def check_env(module: str, /, steps: int = 64) -> int:
    """Find what is wrong with an environment.

    Args:
        module: name or module path of the environment
        steps: steps to play at least; up to the time limit where that takes seconds
    """
    from gpurl.cli.check_env import NUM_ENVS, advice
    from gpurl.cli.check_env import check_env as find_problems
    from gpurl.envs.registry import make_env
    from gpurl.run.display import counted

    if steps < 1:
        raise UsageError(f"--steps must be at least 1, got {steps}")
    env = make_env(module, NUM_ENVS)
    problems = find_problems(env, steps=steps)
    for problem in problems:
        print(f"- {problem}")
    if not problems:
        for text in advice(env, steps):
            print(f"note: {text}")
    env.close()
    print(f"{module}: {counted(len(problems), 'problem') if problems else 'keeps the contract'}")
    return 3 if problems else 0


def doctor(dump: str = "", /) -> int:
    """Report what this machine has and lacks, or what led to NaN.

    Args:
        dump: DUMP, a file from the non_finite/ folder of a run
    """
    if not dump:
        from gpurl.cli.doctor import report

        print(report())
    else:
        from gpurl.guards.dump import describe_dump

        print(describe_dump(Path(dump)))
    return 0


def completion(shell: str = "", /) -> int:
    """Print a script by which a shell completes commands, names, run folders and flags.

    Args:
        shell: SHELL, bash, zsh or fish; the script's first lines say where it goes
    """
    from gpurl.cli.completion import completion_script

    print(completion_script(shell, COMMANDS), end="")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "tune": tune,
    "pbt": pbt,
    "tournament": tournament,
    "config": config,
    "eval": evaluate,
    "play": play,
    "export": export,
    "soup": soup,
    "plot": plot,
    "report": report,
    "convert": convert,
    "runs": runs,
    "envs": envs,
    "check-env": check_env,
    "bench": bench,
    "profile": profile,
    "doctor": doctor,
    "completion": completion,
}
SILENT = {"-h", "--help", "--help-all", "--quiet", "quiet=true"}
TAKE_NAMES = {
    "train",
    "tune",
    "pbt",
    "tournament",
    "config",
    "profile",
}  # an algorithm and an environment
PARSE_THEMSELVES = TAKE_NAMES | {"convert", "bench"}

if __name__ == "__main__":
    sys.exit(main())
