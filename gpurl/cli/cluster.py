"""`gpurl pbt` and `gpurl tournament`: train a population on a cluster, then print its members."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gpurl.cli.settings import ClusterOptions
from gpurl.cluster.board import Board
from gpurl.cluster.driver import Places, Plan, train_population
from gpurl.cluster.ray_places import begin, check_installed
from gpurl.cluster.schedule import Member, Schedule
from gpurl.errors import UsageError
from gpurl.run.display import counted
from gpurl.run.run_folder import absolute, safe_name
from gpurl.run.settings import Settings, TrainConfig
from gpurl.run.terminal import say


def run_population(
    command: str, settings: Settings, options: ClusterOptions, words: Sequence[str]
) -> int:
    """Train, print the table; returns the exit code. command: pbt or tournament."""
    train = settings.train
    if train.pbt_leaderboard and command == "pbt":
        raise UsageError(
            f"pbt_leaderboard {train.pbt_leaderboard}: gpurl tournament has a leaderboard"
        )
    if command == "tournament":
        _check_tournament(settings, options)
    check_installed()  # or an error, before there is a folder
    default = Path(train.root) / safe_name(settings.env) / safe_name(settings.algorithm) / command
    plan = Plan(
        settings,
        absolute(train.run_dir or default),
        is_tournament=command == "tournament",
        waits=options.synchronous,
        threads=max(int(options.cpus), 1),
        command=("gpurl", command, *words),
    )

    def tell(text: str) -> None:
        if not train.quiet:
            say(text)

    def places(cleanup: ExitStack) -> tuple[Places, Board]:
        return begin(cleanup, plan, options.address, options.cpus, options.gpus, tell)

    schedule, signal_number = train_population(plan, places, tell)
    tell(member_table(schedule))
    if (best := best_member(schedule)) is not None:
        tell(f"the best: gpurl eval {Path(train.run_dir or default) / schedule.run_folder(best)}")
    if signal_number is not None:
        say("stopped; the same command goes on", is_error=True)
        return 128 + signal_number
    return 0


def _check_tournament(settings: Settings, options: ClusterOptions) -> None:
    """UsageError for what only gpurl pbt does."""
    rule = settings.train.pbt_rule
    given = "--synchronous" if options.synchronous else ""
    if rule != TrainConfig.pbt_rule:
        given = f"--pbt-rule {rule}"
    if given:
        raise UsageError(
            f"gpurl tournament with {given}: its members draw entries of a leaderboard whenever "
            f"they finish a slice; leave it out, or gpurl pbt"
        )


def best_member(schedule: Schedule) -> int | None:
    """The member with the best newest return; None if none has one."""
    scored = [k for k in schedule.live if schedule.members[k].score > float("-inf")]
    return max(scored, key=lambda k: schedule.members[k].score, default=None)


def member_table(schedule: Schedule) -> str:
    """A line for each member."""
    names = [*schedule.options.spans]
    heads = ["member", "state", "slices", "steps", "return", "taken over", *names]
    lines = [heads]
    for k, member in enumerate(schedule.members):
        lines.append(_cells(k, member, schedule, names))
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    ]
    text.append(f"{counted(len(schedule.members), 'member')}, {len(schedule.live)} of them live")
    return "\n".join(text)


def _cells(k: int, member: Member, schedule: Schedule, names: Sequence[str]) -> list[str]:
    slices = member.slices
    state = "lost" if member.lost else "finished" if schedule.is_finished(k) else "goes on"
    return [
        *(str(k), state, str(len(slices)), f"{slices[-1].steps if slices else 0:,}"),
        f"{slices[-1].score:.4g}" if slices else "-",
        str(sum(bool(each.source) for each in slices)),
        *(f"{member.settings[name]:.3g}" for name in names),
    ]
