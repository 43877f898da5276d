"""What share of an iteration's time the guards take on a CPU: seconds inside them over seconds of
whole iterations, of the same run.

    python -m tests.tools.guards

`values` looks for NaN and infinity (`gpurl.guards.finite` at each rollout, `gpurl.guards.steps`
after each update); its limit is 0.5 %. `form` is `gpurl.guards.contract`'s look at shapes, types
and keys of each step, `running` has its first thousand steps behind it. On a GPU the clock of the
host says nothing of work on the device: `tests.tools.counters` has what is launched there.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results_table import RESULTS, Row, machine, number, save, table
from gpurl.guards.contract import ALWAYS_COMPARED
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device, make_trainer
from tests.tools.against import CASES

LIMIT = 0.5  # per cent
KINDS = ("values", "form")


class Watch:
    """Seconds inside the functions that it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, holder: Any, name: str) -> None:
        """Put it around a method of `holder`."""
        method: Callable[..., Any] = getattr(holder, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(holder, name, timed)


def shares(case: str, seconds: float) -> dict[str, float]:
    """kind of guard -> per cent of the time of iterations, at the start and later on."""
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
    watches = {kind: Watch() for kind in KINDS}
    for holder, name in (
        (trainer.engine.guards.finite, "clean"),
        (trainer.engine.guards.steps, "sees_any"),
    ):
        watches["values"].around(holder, name)
    watches["form"].around(trainer.engine.guards.contract, "check")
    found = dict[str, float]()
    for phase, first in (("starting", 0), ("running", ALWAYS_COMPARED)):
        trainer.engine.guards.contract.steps = first
        for watch in watches.values():
            watch.seconds = 0.0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds and (
            first or trainer.engine.guards.contract.steps < ALWAYS_COMPARED
        ):
            trainer.iterate()
        whole = time.perf_counter() - began
        found |= {
            f"{kind}, {phase}": 100.0 * watch.seconds / whole for kind, watch in watches.items()
        }
    trainer.env.close()
    return found


def main() -> int:
    """Measure; 1 where the looks for NaN and infinity take more than their limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a case at its start, and as many later on"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV file goes"
    )
    options = parser.parse_args()
    rows, lines = list[Row](), []
    for case in CASES:
        found = shares(case, options.seconds)
        rows += [
            machine("cpu") | {"case": case, "guard": name, "value": f"{value:.3f}", "unit": "%"}
            for name, value in found.items()
        ]
        lines.append([case, *(number(value) for value in found.values())])
    print(table(["per cent of an iteration", *found], lines))
    print(save("guards", rows, options.out))
    return int(
        any(float(row["value"]) > LIMIT for row in rows if row["guard"] == "values, running")
    )


if __name__ == "__main__":
    sys.exit(main())
