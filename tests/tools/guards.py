"""Measures the time of the guards on a CPU, in per cent of the time of an iteration.

    python -m tests.tools.guards

`values` is the search for NaN and infinity (`gpurl.guards.finite` at each rollout,
`gpurl.guards.steps` after each update); its limit is 0.5 %. `form` is the check of shapes, types
and keys of each step by `gpurl.guards.contract`, `running` after its first thousand steps. On a GPU
the clock of the host does not measure work on the device: see `tests.tools.counters`.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.results_table import Row, machine, number, out_parser, save, table
from gpurl.guards.contract import ALWAYS_COMPARED
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device, make_trainer
from tests.tools.against import CASES

LIMIT = 0.5  # per cent
KINDS = ("values", "form")


class Watch:
    """Adds up the seconds inside the methods that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: object, name: str) -> None:
        """Wrap a method of `owner`."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def percentages(case: str, seconds: float) -> dict[str, float]:
    """kind of guard -> per cent of the time of iterations, at the start and later."""
    algorithm, env, changes = CASES[case]
    settings = make_settings(
        algorithm,
        env,
        **{"threads": 1, "eval_episodes": 0, "device": "cpu", **changes, "rollout": "steps"},
    )
    trainer = make_trainer(settings, choose_device("cpu"))
    trainer.start()
    while not trainer.engine.iteration or trainer.steps < 2 * trainer.algorithm.learning_starts:
        trainer.iterate()

    # wrap the guards
    guards = trainer.engine.guards
    watches = {kind: Watch() for kind in KINDS}
    watches["values"].wrap(guards.finite, "clean")
    watches["values"].wrap(guards.steps, "sees_any")
    watches["form"].wrap(guards.contract, "check")

    # measure with the checks of the first steps, and after them
    results = dict[str, float]()
    for phase, first in (("starting", 0), ("running", ALWAYS_COMPARED)):
        guards.contract.steps = first
        for watch in watches.values():
            watch.seconds = 0.0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds and (
            first or guards.contract.steps < ALWAYS_COMPARED
        ):
            trainer.iterate()
        total = time.perf_counter() - began
        results |= {
            f"{kind}, {phase}": 100.0 * watch.seconds / total for kind, watch in watches.items()
        }
    trainer.env.close()
    return results


def main() -> int:
    """Measure; 1 if the search for NaN and infinity takes more than its limit."""
    parser = out_parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time of each phase of a case; default 10"
    )
    options = parser.parse_args()
    rows, lines = list[Row](), []
    for case in CASES:
        results = percentages(case, options.seconds)
        rows += [
            machine("cpu") | {"case": case, "guard": name, "value": f"{value:.3f}", "unit": "%"}
            for name, value in results.items()
        ]
        lines.append([case, *map(number, results.values())])
    print(table(["per cent of an iteration", *results], lines))
    print(save("guards", rows, options.out))
    return int(
        any(float(row["value"]) > LIMIT for row in rows if row["guard"] == "values, running")
    )


if __name__ == "__main__":
    sys.exit(main())
