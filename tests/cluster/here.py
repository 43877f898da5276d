"""Places in this process, for drivers without Ray: slices are trained one after another, and a
place can be told to die.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpurl.cluster.board import FolderBoard
from gpurl.cluster.driver import Driver, Event, Plan, make_schedule, open_schedule
from gpurl.cluster.member import train_slice
from gpurl.cluster.schedule import Job, Result, Schedule
from gpurl.run.settings import make_settings
from tests.small_runs import ITERATION, SMALL, small_settings

SHORT = {"max_episode_steps": 8}  # as evaluations take the most time
EVERY = 2 * ITERATION
COMMON = {"num_envs", "horizon", "eval_episodes", "quiet", "device", "log_every"}
SMALL_SAC = {name: value for name, value in SMALL.items() if name in COMMON}
SMALL_SAC |= small_settings("sac") | {"learning_starts": ITERATION // 2, "replay_size": 1024}

Train = Callable[[Job, Mapping[str, Any]], Result]


def result(steps: int, score: float | None, **changes: Any) -> Result:
    """Of a slice that went well, unless `changes` say otherwise."""
    values = {"entered": True, "took_over": False, "unreadable": False, "notes": [], "error": ""}
    return Result(**{"steps": steps, "score": score, "settings": {}, "code": 0} | values | changes)  # type: ignore[typeddict-item]


class HerePlaces:
    """`count` places; `train` may raise an error, of which the place dies."""

    def __init__(self, count: int, train: Train) -> None:
        self._train = train
        self._events = [Event(place) for place in range(count)]
        self._given: list[tuple[int, Job, Mapping[str, Any]]] = []
        self._count = count
        self.jobs: list[Job] = []  # in the order in which they began

    def train(self, place: int, job: Job, settings: Mapping[str, Any]) -> None:
        self.jobs.append(job)
        self._given.append((place, job, settings))

    def wait(self, seconds: float) -> list[Event]:
        events, self._events = self._events, []
        if events or not self._given:
            return events
        place, job, settings = self._given.pop(0)
        try:
            return [Event(place, self._train(job, settings))]
        except RuntimeError as error:
            self._count += 1
            self._events = [Event(self._count)]
            return [Event(place, died=str(error))]


def plan_of(folder: Path, algorithm: str = "ppo", **changes: Any) -> Plan:
    """Six members on short Pendulum; changes: of the plan and of its settings."""
    own = {key: changes.pop(key) for key in ("is_tournament", "waits") if key in changes}
    values = {"population": 6, "pbt": True, "pbt_every": EVERY, "total_steps": 3 * EVERY}
    values |= {"threads": 1, "env_options": SHORT, "root": str(folder)}
    values |= SMALL | {"schedule": "constant"} if algorithm == "ppo" else SMALL_SAC
    settings = make_settings(algorithm, "pendulum", **(values | changes))
    return Plan(settings, folder / "plan", **own)


def drive(
    plan: Plan, count: int = 2, train: Train | None = None
) -> tuple[Schedule, list[str], HerePlaces]:
    """(the schedule at the end, what the driver said, the places): the driver's loop with its
    board. train: in place of training.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    schedule = open_schedule(plan)
    board = FolderBoard(str(plan.board), plan.capacity, plan.url)
    said: list[str] = []

    def slice_of(job: Job, settings: Mapping[str, Any]) -> Result:
        return train_slice(job, settings, plan.folder, plan.board, board)

    places = HerePlaces(count, train or slice_of)
    Driver(plan, schedule, board, said.append).run(places)
    return schedule, said, places


def new_schedule(folder: Path, **changes: Any) -> Schedule:
    return make_schedule(plan_of(folder, **changes))
