"""The text that `gpurl profile` prints: a table of the phases, operators per step and minibatch,
and the longest operators.
"""

from gpurl.cli.profile import Profile

ROLLOUT_PHASES = ("env", "policy", "store", "rollout")
NUM_LONGEST, NAME_LENGTH = 10, 70


def report(profile: Profile) -> str:
    """The whole text."""
    lines = [
        profile.title,
        f"{profile.seconds * 1e3:.2f} ms an iteration (median of {profile.iterations}); "
        "host times without the profiler, operators under it",
        "",
        _phases(profile),
        _counts(profile),
        "",
        _longest(profile),
        "",
        f"trace for chrome://tracing or Perfetto: {profile.trace}",
    ]
    return "\n".join(lines)


def _phases(profile: Profile) -> str:
    """A table of the phases, each number per iteration."""
    host = sum(phase.host for phase in profile.phases.values())
    busy = sum(phase.device for phase in profile.phases.values())
    # a CPU has no times and launches of a device
    header = ["phase", "host ms", "share", "operators"]
    if profile.is_cuda:
        header = ["phase", "host ms", "share", "device ms", "share", "operators", "launches"]
    rows = [header]
    for name, phase in profile.phases.items():
        row = [name, *_time_and_share(phase.host, host, profile.iterations)]
        if profile.is_cuda:
            row += _time_and_share(phase.device, busy, profile.iterations)
        row.append(f"{phase.operators / profile.iterations:.0f}")
        if profile.is_cuda:
            row.append(f"{phase.launches / profile.iterations:.0f}")
        rows.append(row)
    text = _table(rows)
    # as if kernels never overlapped
    if profile.is_cuda:
        idle = 1.0 - busy / profile.iterations / profile.seconds
        text += f"\nthe device is idle {max(idle, 0.0):.0%} of an iteration"
    return text


def _time_and_share(seconds: float, total: float, iterations: int) -> list[str]:
    return [f"{seconds / iterations * 1e3:.3f}", f"{seconds / total:.1%}" if total else "-"]


def _counts(profile: Profile) -> str:
    """Operators and launches of an iteration, of a step of all environments and of a minibatch."""
    # (label, phases, how many of them an iteration has)
    sections = []
    for label, names, parts in (
        ("an iteration", tuple(profile.phases), 1),
        ("a step of all environments", ROLLOUT_PHASES, profile.horizon),
        ("a minibatch", ("update",), profile.minibatches),
    ):
        phases = [profile.phases[name] for name in names]
        divisor = profile.iterations * parts
        text = f"{label} {sum(phase.operators for phase in phases) / divisor:.1f} operators"
        if profile.is_cuda:
            text += f" and {sum(phase.launches for phase in phases) / divisor:.1f} launches"
        sections.append(text)
    return "; ".join(sections)


def _longest(profile: Profile) -> str:
    grid = ["blocks x threads"] if profile.is_cuda else []
    rows = [["kernel" if profile.is_cuda else "operator", *grid, "own ms", "calls"]]
    for each in profile.longest[:NUM_LONGEST]:
        name = each.name
        row = [name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"]
        row += [each.grid] if profile.is_cuda else []
        row.append(f"{each.seconds / profile.iterations * 1e3:.3f}")
        rows.append([*row, f"{each.calls / profile.iterations:.0f}"])
    return f"longest, without what they call, per iteration, under the profiler:\n{_table(rows)}"


def _table(rows: list[list[str]]) -> str:
    """The first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )
