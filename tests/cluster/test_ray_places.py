"""The places of Ray with a stand-in for Ray: how an actor's death is told apart from a slice's."""

import time
from pathlib import Path
from typing import Any

from gpurl.cluster.driver import Event
from gpurl.cluster.ray_places import RayPlaces
from gpurl.cluster.schedule import Job
from tests.cluster.here import EVERY, plan_of, result


class Call:
    """A method of an actor: its answer is there at once, or an error."""

    def __init__(self, ray: "FakeRay", actor: "Actor", name: str) -> None:
        self.ray, self.actor, self.name = ray, actor, name

    def remote(self, *words: Any) -> int:
        self.ray.calls.append((self.actor.number, self.name))
        ref = len(self.ray.calls)
        answers: dict[str, Any] = {"where": "process 7 on here", "train": result(EVERY, 1.0)}
        is_dead = self.actor.number in self.ray.dead or self.name in self.ray.deadly
        self.ray.answers[ref] = RuntimeError("The actor died") if is_dead else answers[self.name]
        return ref


class Actor:
    def __init__(self, ray: "FakeRay") -> None:
        self.ray = ray
        self.number = ray.count
        ray.count += 1

    def __getattr__(self, name: str) -> Call:
        return Call(self.ray, self, name)


class FakeRay:
    """What `RayPlaces` calls of Ray."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[tuple[int, str]] = []
        self.answers: dict[int, Any] = {}
        self.dead: set[int] = set()  # actors
        self.deadly: set[str] = set()  # methods

    def remote(self, **options: Any) -> Any:
        ray = self

        class Made:
            @staticmethod
            def remote(*words: Any) -> Actor:
                return Actor(ray)

        return lambda kind: Made

    def wait(self, refs: list[int], **options: Any) -> tuple[list[int], list[int]]:
        return refs, []

    def get(self, ref: int) -> Any:
        answer = self.answers[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Actor) -> None:
        self.dead.add(actor.number)


def places_of(folder: Path) -> tuple[Any, RayPlaces]:
    ray: Any = FakeRay()
    places = RayPlaces(ray, plan_of(folder, population=2), 1.0, 0.0, print)
    assert places.wait(1.0) == [Event(0), Event(1)]
    return ray, places


JOB = Job(0, 0, "member_000", 0, 0, EVERY, EVERY, "x")


def test_a_place_that_died_while_it_was_idle_has_begun_nothing(tmp_path: Path) -> None:
    ray, places = places_of(tmp_path)
    ray.dead.add(ray.calls[0][0])
    places.train(0, JOB, {})
    (event,) = places.wait(1.0)
    assert event == Event(0, died="process 7 on here has ended: The actor died", had_begun=False)
    # another one is asked for
    assert places.wait(1.0) == [Event(2)]
    # one that dies in its slice has begun it
    ray.deadly.add("train")
    places.train(1, JOB, {})
    assert places.wait(1.0) == []
    (event,) = places.wait(1.0)
    assert (event.place, event.had_begun) == (1, True)
    assert event.died
    # and one that lives answers
    ray.deadly.clear()
    places.train(2, JOB, {})
    assert [*places.wait(1.0), *places.wait(1.0)] == [Event(3), Event(2, result(EVERY, 1.0))]


def test_it_does_not_spin_where_nothing_is_outstanding(tmp_path: Path) -> None:
    _, places = places_of(tmp_path)
    began = time.monotonic()
    assert places.wait(0.2) == []
    assert time.monotonic() - began >= 0.2
