"""The command line. Nothing heavy is imported before it is known what is wanted, so that --help
answers at once.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from gpurl.errors import CheckpointError, GpurlError, UsageError, did_you_mean

USAGE = """usage: gpurl COMMAND ...

  gpurl train ALGORITHM ENV [settings]          train; --help behind it lists every setting
  gpurl train --resume RUN [settings]           go on with a run
  gpurl train ... --callback MODULE:CLASS       with a callback of your own
  gpurl eval RUN [--episodes 100]               evaluate a trained policy
  gpurl play RUN [--episodes 3]                 play episodes and draw one
  gpurl plot RUN                                draw the learning curve again
  gpurl plot --bench [FOLDER] [--out FOLDER]    draw what the benchmarks measured
  gpurl profile ALGORITHM ENV [settings]        where the time of a training goes, and a trace
        [--out FOLDER] [--iterations 3]
  gpurl convert FILE [--out FILE.safetensors]   weights of other trainers, nothing executed
  gpurl convert FILE --algorithm ppo --env ENV --network.activation tanh
                                                the same as a run to evaluate and go on with
  gpurl envs                                    what there is to train on
  gpurl check-env MODULE                        say what is wrong with an environment
  gpurl bench                                   measure throughput and kernels
  gpurl doctor                                  what this machine has and lacks
  gpurl doctor DUMP                             what led to NaN, from a run's non_finite/

RUN is a run folder. Settings are written --num-envs 4096, --num_envs 4096 or num_envs=4096;
--config FILE.yaml reads them from a file.
Exit codes: 0 done, 2 wrong use, 3 the environment misbehaves, 4 NaN or infinity, 5 checkpoint,
130/143 stopped by a signal.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(
            os.getcwd()
        )  # finds my_env.py beside the user; last, so that no file there hides a library
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        from gpurl import __version__

        print(f"gpurl {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise UsageError(
                f"gpurl has no command {words[0]!r}; {did_you_mean(words[0], COMMANDS)}Known: "
                f"{', '.join(COMMANDS)}"
            )
        return COMMANDS[words[0]](words[1:])
    except GpurlError as error:
        print(f"gpurl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


# ---- gpurl train, gpurl profile ----


def train(words: list[str]) -> int:
    """Parse the settings, train, tell the result."""
    from gpurl.cli.settings import parse_train, take_callbacks

    settings_words, names = take_callbacks(words)
    settings, resume_from = parse_train(settings_words)
    from gpurl.api import run
    from gpurl.run.callbacks import make_callbacks

    command = ["gpurl", "train", *words]
    finished = run(settings, resume_from, command, callbacks=make_callbacks(names))
    outcome, quiet = finished.outcome, settings.train.quiet
    if not quiet:
        print(summary(finished))
    if outcome.signal_number:
        return 128 + outcome.signal_number
    return CheckpointError.exit_code if outcome.unsaved else 0


def profile(words: list[str]) -> int:
    """`gpurl profile ALGORITHM ENV [settings]`: a few iterations, what they spend their time on,
    and a trace file.
    """
    from gpurl.cli.settings import parse_profile

    settings, options = parse_profile(words)
    from gpurl.cli.profile import profile as measure
    from gpurl.cli.profile_report import report

    print(report(measure(settings, **options)))
    return 0


def summary(finished: Any) -> str:
    """The closing lines of a run."""
    outcome, lines = finished.outcome, []
    values = outcome.evaluation
    if values:
        text = f"evaluated return {spread(values, 2)} over {values['eval/episodes']:.0f} episodes"
        if finished.baseline:
            text += f"; the scripted policy gets {spread(finished.baseline, 2)}"
        lines.append(text)
    lines.append(f"ended by {outcome.reason} after {outcome.steps:,} steps")
    if outcome.unsaved:
        lines.append(f"its last state is in no checkpoint: {outcome.unsaved}")
    lines.append(
        f"run folder {finished.folder} (learning_curve.png, metrics.jsonl, checkpoints; "
        f"tensorboard --logdir {finished.folder})"
    )
    return "\n".join(lines)


def spread(values: dict[str, float], digits: int) -> str:
    """`mean ± standard deviation` of an evaluation."""
    return f"{values['eval/mean_reward']:.{digits}f} ± {values['eval/std_reward']:.{digits}f}"


# ---- commands on a run ----


def evaluate(words: list[str]) -> int:
    """`gpurl eval RUN`."""
    options = parse(words, "eval", "RUN", {"episodes": 100, "device": "auto", "latest": False})
    from gpurl.api import evaluate_run

    values = evaluate_run(
        options["RUN"], options["episodes"], options["device"], best=not options["latest"]
    )
    skipped = values.get("eval/non_finite_episodes", 0.0)
    more = f"; {skipped:.0f} gave NaN or infinity and are left out" if skipped else ""
    print(
        f"return {spread(values, 3)}, length {values['eval/mean_ep_length']:.1f}, "
        f"{values['eval/episodes']:.0f} episodes{more}"
    )
    return 0


def play(words: list[str]) -> int:
    """`gpurl play RUN`."""
    options = parse(words, "play", "RUN", {"episodes": 3, "device": "auto", "seed": 0})
    from gpurl.cli.play import play_run

    picture = play_run(options["RUN"], options["episodes"], options["device"], options["seed"])
    print(f"picture of the first episode: {picture}")
    return 0


def plot(words: list[str]) -> int:
    """`gpurl plot RUN`, `gpurl plot --bench [FOLDER]`."""
    if "--bench" in words:
        return plot_bench([word for word in words if word != "--bench"])
    options = parse(words, "plot", "RUN", {})
    from pathlib import Path

    from gpurl.run.plot import plot_curve

    print(plot_curve(Path(options["RUN"])))
    return 0


def plot_bench(words: list[str]) -> int:
    """`gpurl plot --bench [FOLDER] [--out FOLDER]`."""
    from pathlib import Path

    from gpurl.cli.doctor import results_folder
    from gpurl.cli.plot_bench import plot_bench as draw

    folder = [words.pop(0)] if words and not words[0].startswith("-") else []
    out = parse(words, "plot --bench [FOLDER]", None, {"out": ""})["out"]
    for picture in draw(
        Path(folder[0]) if folder else results_folder(), Path(out) if out else None
    ):
        print(picture)
    return 0


def convert(words: list[str]) -> int:
    """`gpurl convert FILE [--out FILE.safetensors]`,
    `gpurl convert FILE --algorithm ALGORITHM --env ENV [settings]`.
    """
    from gpurl.cli.settings import parse_convert

    options, settings = parse_convert(words)
    from pathlib import Path

    from gpurl.cli.convert.tensors import read_foreign, write_safetensors

    source = Path(options["FILE"])
    converted = read_foreign(source)
    if settings is None:
        target = Path(options["out"]) if options["out"] else source.with_suffix(".safetensors")
        write_safetensors(converted, target)
        print(f"{converted.table()}\n{len(converted.tensors)} tensors in {target}")
        return 0
    from gpurl.cli.convert.policy import write_policy

    folder, notes = write_policy(
        converted, settings, options["unit_actions"], ["gpurl", "convert", *words]
    )
    print("\n".join([*converted.notes, *notes, f"run folder {folder}: gpurl eval {folder}"]))
    return 0


# ---- commands on the installation ----


def envs(words: list[str]) -> int:
    """`gpurl envs`."""
    parse(words, "envs", None, {})
    from gpurl.cli.env_table import env_table

    print(env_table())
    return 0


def check_env(words: list[str]) -> int:
    """`gpurl check-env MODULE`."""
    options = parse(words, "check-env", "MODULE", {"steps": 64})
    from gpurl.cli.check_env import check_env as check

    problems = check(options["MODULE"], steps=options["steps"])
    for problem in problems:
        print(f"- {problem}")
    print(
        f"{options['MODULE']}: "
        f"{'keeps the contract' if not problems else f'{len(problems)} problems'}"
    )
    return 3 if problems else 0


def doctor(words: list[str]) -> int:
    """`gpurl doctor`, `gpurl doctor DUMP`."""
    if words and not words[0].startswith("-"):
        options = parse(words, "doctor", "DUMP", {})
        from pathlib import Path

        from gpurl.guards.dump import describe_dump

        print(describe_dump(Path(options["DUMP"])))
        return 0
    parse(words, "doctor", None, {})
    from gpurl.cli.doctor import report

    print(report())
    return 0


def bench(words: list[str]) -> int:
    """`gpurl bench`: run the scripts of benchmarks/."""
    from gpurl.cli.doctor import run_benchmarks

    return run_benchmarks(words)


def parse(
    words: list[str], command: str, positional: str | None, defaults: dict[str, Any]
) -> dict[str, Any]:
    """A small command's arguments: one positional and flags with defaults, whose types the defaults
    give.
    """
    import argparse

    parser = argparse.ArgumentParser(prog=f"gpurl {command}")
    if positional:
        parser.add_argument(positional)
    for name, default in defaults.items():
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        if isinstance(default, bool):
            parser.add_argument(*flags, action="store_true")
        else:
            parser.add_argument(
                *flags, type=type(default), default=default, help=f"default {default}"
            )
    return vars(parser.parse_args(words))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "play": play,
    "plot": plot,
    "convert": convert,
    "envs": envs,
    "check-env": check_env,
    "bench": bench,
    "profile": profile,
    "doctor": doctor,
}

if __name__ == "__main__":
    sys.exit(main())
