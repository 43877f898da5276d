"""What `gpurl profile` prints: a table of the phases, counts a step and a minibatch, and the
longest operators.
"""

from gpurl.cli.profile import Profile

IN_ROLLOUT, IN_UPDATE = ("env", "policy", "store", "rollout"), ("update",)
NAME_LENGTH = 70


def report(found: Profile) -> str:
    """The whole text."""
    everything = [
        _title(found),
        _phases(found),
        _counts(found),
        "",
        *_top(found),
        "",
        f"trace for chrome://tracing or Perfetto: {found.trace}",
    ]
    return "\n".join(everything)


def _title(found: Profile) -> str:
    times = "host times without the profiler, operators under it"
    return (
        f"{found.title}\n{found.seconds * 1e3:.2f} ms an iteration (median of {found.iterations}); "
        f"{times}\n"
    )


def _phases(found: Profile) -> str:
    total, busy = (
        sum(phase.host for phase in found.phases.values()),
        sum(phase.device for phase in found.phases.values()),
    )
    header = (
        ["phase", "host ms", "share"]
        + (["device ms", "share"] if found.is_cuda else [])
        + ["operators"]
    )
    lines = [header + (["launches"] if found.is_cuda else [])]
    for name, phase in found.phases.items():
        line = [name, *_time_and_share(phase.host, total, found.iterations)]
        line += _time_and_share(phase.device, busy, found.iterations) if found.is_cuda else []
        counts = [phase.operators, phase.launches] if found.is_cuda else [phase.operators]
        lines.append(line + [f"{count / found.iterations:.0f}" for count in counts])
    text = _columns(lines)
    if found.is_cuda:
        idle = 1.0 - busy / found.iterations / found.seconds
        text += f"\nthe device waits {max(idle, 0.0):.0%} of an iteration"
    return text


def _time_and_share(seconds: float, total: float, iterations: int) -> list[str]:
    return [f"{seconds / iterations * 1e3:.3f}", f"{seconds / total:.1%}" if total else "-"]


def _counts(found: Profile) -> str:
    """Operators and launches of an iteration, of a step of all environments and of a minibatch."""

    def mean(names: tuple[str, ...], count: str, parts: int) -> float:
        return sum(getattr(found.phases[name], count) for name in names) / found.iterations / parts

    kinds = ["operators", "launches"] if found.is_cuda else ["operators"]
    cases = {
        "an iteration": (tuple(found.phases), 1),
        "a step of all environments": (IN_ROLLOUT, found.horizon),
    }
    cases["a minibatch"] = (IN_UPDATE, found.minibatches)
    said = [
        f"{label} {' and '.join(f'{mean(names, kind, parts):.1f} {kind}' for kind in kinds)}"
        for label, (names, parts) in cases.items()
    ]
    return "; ".join(said)


def _top(found: Profile) -> list[str]:
    lines = [["kernel" if found.is_cuda else "operator", "own ms", "calls"]]
    lines += [
        [_short(name), f"{own / found.iterations * 1e3:.3f}", f"{calls / found.iterations:.0f}"]
        for name, own, calls in found.top
    ]
    return [f"longest by themselves, an iteration, under the profiler:\n{_columns(lines)}"]


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _columns(lines: list[list[str]]) -> str:
    """The first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
