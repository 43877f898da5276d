"""Populations without Ray: slices are runs, members go on from each other's state, and what fails
is named and costs itself only.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from gpurl.api import train
from gpurl.checkpoints import state_files
from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from gpurl.checkpoints.leaderboard import Leaderboard
from gpurl.cluster import member as member_module
from gpurl.cluster.board import BoardOfRows, BoardRows, FolderBoard
from gpurl.cluster.driver import (
    FILE,
    Driver,
    Event,
    Plan,
    make_schedule,
    open_schedule,
    settings_of_members,
    train_population,
)
from gpurl.cluster.member import train_slice
from gpurl.cluster.schedule import Job, Result
from gpurl.errors import CheckpointError, GpurlError, NonFiniteError, UsageError
from gpurl.run.run_folder import lock_run
from tests.cluster.here import EVERY, HerePlaces, drive, result
from tests.cluster.here import plan_of as plan_of_six
from tests.hostile_files import HOSTILE
from tests.small_runs import ITERATION, assert_same, small_run, state_of


def plan_of(folder: Path, algorithm: str = "ppo", **changes: Any) -> Plan:
    """Three members are enough here."""
    return plan_of_six(folder, algorithm, **({"population": 3} | changes))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    # the versions of all packages take longer to read than these runs
    monkeypatch.setattr("gpurl.run.records.versions", dict)


# ---- slices are runs ----


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_member_that_nobody_replaces_is_the_run_of_its_seed(
    algorithm: str, tmp_path: Path
) -> None:
    """In three slices, each of which resumes: bit for bit, with the replay buffer."""
    plan = plan_of(tmp_path, algorithm, population=2, is_tournament=True)
    board = FolderBoard(str(plan.board), 4)
    values = settings_of_members(plan)[0]
    for number in range(3):
        job = Job(0, number, "member_000", 7, number * EVERY, (number + 1) * EVERY, 3 * EVERY, "x")
        done = train_slice(job, values, plan.folder, plan.board, board)
        assert (done["steps"], done["error"]) == ((number + 1) * EVERY, "")
        assert done["entered"] or number
    values = {name: value for name, value in values.items() if name != "command"}
    alone = train(**(values | {"seed": 7}), run_dir=str(tmp_path / "alone"))
    one, other = state_of(alone.folder), state_of(plan.folder / "member_000")
    assert_same(one, other)
    assert bool(one["replay"]) == (algorithm == "sac")


def test_the_board_reads_no_replay_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, "sac")
    board = FolderBoard(str(plan.board), 4)
    job = Job(0, 0, "member_000", 7, 0, EVERY, 3 * EVERY, "x")
    train_slice(job, settings_of_members(plan)[0], plan.folder, plan.board, board)
    newest = latest_checkpoint(plan.folder / "member_000")
    assert newest is not None
    assert (newest / "replay.safetensors").stat().st_size > 1024 * 10
    parts, read = load_checkpoint(newest)[0], []
    real = state_files.safe_open
    monkeypatch.setattr(
        state_files,
        "safe_open",
        lambda file, **words: read.append(file.name) or real(file, **words),
    )
    entry = {"name": "y", "score": 1e9, "step": 5, "settings": {}}
    assert board.submit(entry, str(newest))
    assert "model.safetensors" in read
    assert "replay.safetensors" not in read
    (first, *_) = board.entries()
    assert first.name == "y"
    kept = load_checkpoint(plan.board / "entries/y")[0]
    assert_same(kept["weights"], parts["model"])
    assert_same(kept["learning"], parts["training"])


def test_a_population_trains_to_its_end(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, explore={"learning_rate": (1e-5, 1e-2)})
    schedule, said, places = drive(plan)
    assert [len(member.slices) for member in schedule.members] == [3] * 3
    assert {member.slices[-1].steps for member in schedule.members} == {3 * EVERY}
    taken = [job for job in places.jobs if job.source]
    assert taken
    assert sum("goes on from" in line for line in said) == len(taken)
    # the settings of now are those of the run's checkpoint
    for k, member in enumerate(schedule.members):
        parts, manifest = load_checkpoint(plan.folder / f"member_{k:03d}")
        assert manifest["step"] == 3 * EVERY
        changed = parts["training"]["changed_settings"]
        took = any(each.source for each in member.slices)
        assert changed == (member.settings if took else {})
        (optimizer,) = parts["training"]["optimizers"].values()
        assert float(optimizer["learning_rate"]) == pytest.approx(member.settings["learning_rate"])
    # the board keeps what may still be needed
    assert len(FolderBoard(str(plan.board), 1).entries()) <= 6


def test_a_member_begins_with_the_state_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, population=2, explore={"gamma": (0.9, 0.999)})
    begun: dict[str, Any] = {}
    real = member_module.take_over

    def noted(algorithm: Any, source: Any, settings: Any) -> None:
        real(algorithm, source, settings)
        begun["weights"] = {name: x.clone() for name, x in algorithm.state_dict().items()}
        begun["gamma"] = algorithm.config.gamma
        begun["source"] = source.name

    monkeypatch.setattr(member_module, "take_over", noted)
    entries = {}
    keep = FolderBoard.submit

    def submit(self: FolderBoard, entry: Any, checkpoint: str) -> bool:
        entries[entry["name"]] = load_checkpoint(Path(checkpoint))[0]["model"]
        return keep(self, entry, checkpoint)

    monkeypatch.setattr(FolderBoard, "submit", submit)
    _, _, places = drive(plan)
    last = [job for job in places.jobs if job.source][-1]
    assert begun["source"] == last.source
    assert begun["gamma"] == last.settings["gamma"]
    assert_same(begun["weights"], dict(entries[last.source]))


def test_the_same_command_goes_on(tmp_path: Path) -> None:
    """Synchronous members come to the same end, whoever trains them and how often all is killed."""
    whole, _, _ = drive(plan_of(tmp_path / "a", waits=True), 1)
    plan = plan_of(tmp_path / "b", waits=True)
    count = 0

    def three(job: Job, settings: Any) -> Result:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise KeyboardInterrupt
        return train_slice(job, settings, plan.folder, plan.board, FolderBoard(str(plan.board), 99))

    for _ in range(20):
        try:
            schedule, _, _ = drive(plan, 3, three)
            break
        except KeyboardInterrupt:
            continue
    assert count > 10
    assert schedule.is_done
    for one, other in zip(whole.members, schedule.members):
        assert one.settings == other.settings
        assert [each.score for each in one.slices] == [each.score for each in other.slices]
    for k in range(3):
        name = f"member_{k:03d}"
        assert_same(state_of(plan.folder / name), state_of(tmp_path / "a" / "plan" / name))


# ---- what fails ----


def test_a_place_that_dies_in_a_slice_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its first checkpoint of a slice: it does not go on from the source twice."""
    plan = plan_of(tmp_path, save_every="1i", explore={"gamma": (0.9, 0.999)})
    killed: list[Job] = []
    sources: list[str] = []
    real = member_module.take_over

    def noted(algorithm: Any, source: Any, settings: Any) -> None:
        sources.append(source.name)
        real(algorithm, source, settings)

    monkeypatch.setattr(member_module, "take_over", noted)

    def train(job: Job, settings: Any) -> Result:
        board = FolderBoard(str(plan.board), 99)
        if job.source and not killed:
            killed.append(job)
            half = Job(**{**vars(job), "until": job.begin + ITERATION})
            assert train_slice(half, settings, plan.folder, plan.board, board)["took_over"]
            raise RuntimeError("process 7 on here has ended")
        done = train_slice(job, settings, plan.folder, plan.board, board)
        if killed and job == killed[0]:
            assert len(sources) == 1
            assert done["took_over"]
            assert done["settings"] == job.settings
        return done

    schedule, said, _ = drive(plan, 2, train)
    assert schedule.is_done
    assert len(schedule.live) == 3
    assert f"member {killed[0].member}: process 7 on here has ended; another process" in "\n".join(
        said
    )


def test_a_slice_that_ended_unheard_is_not_trained_further(tmp_path: Path) -> None:
    """The process or the driver was killed between the last checkpoint and the schedule."""
    plan = plan_of(tmp_path, explore={"gamma": (0.9, 0.999)})
    board = FolderBoard(str(plan.board), 9)
    values = settings_of_members(plan)[0]
    first = Job(0, 0, "member_000", 0, 0, EVERY, 3 * EVERY, "x-0", settings={"gamma": 0.95})
    other = Job(1, 0, "member_001", 1, 0, EVERY, 3 * EVERY, "x-1", settings={"gamma": 0.95})
    for job in (first, other):
        train_slice(job, values, plan.folder, plan.board, board)
    taken = {"source": "x-1", "source_settings": {"gamma": 0.95}, "settings": {"gamma": 0.92}}
    second = Job(0, 1, "member_000", 0, EVERY, 2 * EVERY, 3 * EVERY, "x-2", **taken)
    third = Job(
        0, 2, "member_000", 0, 2 * EVERY, 3 * EVERY, 3 * EVERY, "x-3", settings={"gamma": 0}
    )
    for job in (second, third):
        done = train_slice(job, values, plan.folder, plan.board, board)
        before = state_of(plan.folder / "member_000")
        again = train_slice(job, values, plan.folder, plan.board, board)
        assert again["steps"] == job.until
        assert again | {"entered": True} == done  # which it has been already
        assert again["settings"] == {"gamma": 0.92}
        assert_same(state_of(plan.folder / "member_000"), before)


class OneNode:
    """Six places, all of which leave once five members are finished, unnoticed until they are given
    a slice; each is replaced by another one.
    """

    def __init__(self) -> None:
        self._events = [Event(place) for place in range(6)]
        self._given: list[tuple[int, Job]] = []
        self.dead: set[int] = set()
        self.next_place = 6

    def train(self, place: int, job: Job, settings: Any) -> None:
        self._given.append((place, job))

    def wait(self, seconds: float) -> list[Event]:
        events, self._events = self._events, []
        if events:
            return events
        # member 5 is the last one
        self._given.sort(key=lambda each: each[1].member)
        place, job = self._given.pop(0)
        if (job.member, job.number) == (5, 1) and not self.dead:
            self.dead = {*range(6)}
            return [self._left(place)]
        if place in self.dead:
            return [self._left(place)._replace(had_begun=False)]
        return [Event(place, result(job.until, float(job.member)))]

    def _left(self, place: int) -> Event:
        self._events.append(Event(self.next_place))
        self.next_place += 1
        return Event(place, died=f"process {place} has ended")


def test_a_node_that_leaves_with_idle_places_costs_one_attempt(tmp_path: Path) -> None:
    plan = plan_of_six(tmp_path, total_steps=2 * EVERY)
    plan.folder.mkdir()
    schedule, places, said = make_schedule(plan), OneNode(), []
    driver = Driver(plan, schedule, FolderBoard(str(plan.board), 9), said.append)
    driver.run(places)
    assert places.dead
    assert schedule.is_done
    assert schedule.live == [*range(6)]
    assert sum("another process goes on with it" in line for line in said) == 6


def test_a_cut_off_checkpoint_is_named_and_its_member_goes_on(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    def train(job: Job, settings: Any) -> Result:
        board = FolderBoard(str(plan.board), 99)
        if (job.member, job.number) == (2, 1) and job.folder == "member_002":
            for folder in (plan.folder / "member_002/checkpoints").glob("step_*"):
                file = folder / "model.safetensors"
                file.write_bytes(file.read_bytes()[:100])
        return train_slice(job, settings, plan.folder, plan.board, board)

    schedule, said, places = drive(plan, 2, train)
    text = "\n".join(said)
    assert "member 2 failed: no checkpoint to load in" in text
    assert "model.safetensors has 100 bytes" in text
    assert schedule.is_done
    assert len(schedule.live) == 3
    (again,) = [job for job in places.jobs if job.folder == "member_002-2" and job.number == 1]
    assert again.source == places.jobs[2].entry
    assert schedule.members[2].slices[-1].steps >= 3 * EVERY


def test_of_two_checkpoints_the_one_before_is_taken(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    board = FolderBoard(str(plan.board), 9)
    (settings, *_) = settings_of_members(plan)
    for number in range(3):
        job = Job(
            0, number, "run", 0, number * EVERY, (number + 1) * EVERY, 3 * EVERY, f"x-{number}"
        )
        done = train_slice(job, settings, plan.folder, plan.board, board)
        assert (done["error"], done["steps"]) == ("", (number + 1) * EVERY)
        if number == 1:
            newest = latest_checkpoint(plan.folder / "run")
            assert newest is not None
            (newest / "state.json").write_text("{")
    (note,) = done["notes"]
    assert note.startswith(f"loaded {plan.folder}/run/checkpoints/step_000000000256 instead: ")
    assert "state.json has 1 bytes" in note


def test_a_board_in_another_process_refuses_as_here(tmp_path: Path) -> None:
    """Its errors come back as answers, and are the same errors."""
    run = small_run(tmp_path / "run", 1, eval_episodes=0).folder
    board = BoardOfRows(BoardRows(str(tmp_path / "board"), 2).ask)
    entry = {"score": 1.0, "step": 5, "settings": {"gamma": 0.9}}
    for name in ("a", "b"):
        assert board.submit({"name": name, **entry}, str(latest_checkpoint(run)))
    assert not board.submit({"name": "c", **entry}, str(latest_checkpoint(run)))
    assert [each.name for each in board.entries()] == ["a", "b"]
    assert board.entries()[0].settings == {"gamma": 0.9}
    board.remove({"a", "unknown"})
    assert [each.name for each in board.entries()] == ["b"]
    assert [folder.name for folder in (tmp_path / "board/entries").iterdir()] == ["b"]
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        board.submit({"name": "d", **entry}, str(tmp_path / "nothing"))
    for name in ("../../elsewhere", str(tmp_path / "elsewhere"), ""):
        with pytest.raises(CheckpointError, match="the name of an entry is"):
            board.submit({"name": name, **entry}, str(latest_checkpoint(run)))
    assert not [*tmp_path.glob("**/elsewhere")]
    (tmp_path / "board/leaderboard.json").write_text("[]")
    for call in (board.entries, lambda: board.remove({"b"})):
        with pytest.raises(CheckpointError, match="is no leaderboard"):
            call()


def test_members_go_on_without_a_board_that_does_not_answer(tmp_path: Path) -> None:
    """Its process has died for good: an error of Ray at each question."""
    plan = plan_of(tmp_path, is_tournament=True)
    plan.folder.mkdir()

    def ask(*words: Any) -> Any:
        raise RuntimeError("The actor died\nits node left")

    board, said = BoardOfRows(ask), []

    def train(job: Job, settings: Any) -> Result:
        return train_slice(job, settings, plan.folder, plan.board, board)

    schedule = make_schedule(plan)
    Driver(plan, schedule, board, said.append).run(HerePlaces(2, train))
    assert schedule.is_done
    assert len(schedule.live) == 3
    text = "\n".join(said)
    assert "is not on the board: the board does not answer: The actor died\n" in text
    assert "members go on by themselves: the board does not answer: The actor died" in text


def test_a_source_that_is_cut_off_is_named_and_the_member_goes_on(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    def train(job: Job, settings: Any) -> Result:
        for file in plan.board.glob(f"entries/{job.source or 'none'}/*/*.safetensors"):
            file.write_bytes(b"")
        return train_slice(job, settings, plan.folder, plan.board, FolderBoard(str(plan.board), 99))

    schedule, said, _ = drive(plan, 2, train)
    assert "did not take over entry" in "\n".join(said)
    assert schedule.is_done
    assert not any(each.source for member in schedule.members for each in member.slices)


def test_a_member_that_always_fails_is_lost_and_all_of_them_end_it(tmp_path: Path) -> None:
    def train(job: Job, settings: Any) -> Result:
        if job.member != 1:
            return result(job.until, float(job.member), entered=False)
        return result(0, None, code=3, error="the environment breaks", entered=False)

    schedule, said, _ = drive(plan_of(tmp_path / "a"), 2, train)
    assert schedule.live == [0, 2]
    assert schedule.is_done
    lost = "member 1 is lost, the others go on: the environment breaks (5 attempts in a row)"
    assert lost in said
    with pytest.raises(GpurlError, match="all 3 members are lost, the last because: broken"):
        drive(
            plan_of(tmp_path / "b"),
            2,
            lambda job, settings: result(0, None, code=3, error="broken", entered=False),
        )
    # the same command again, which begins nothing
    with pytest.raises(GpurlError, match="all 3 members are lost, the last because: broken"):
        train_population(plan_of(tmp_path / "b"), begin_nothing, said.append)


def test_a_member_that_diverges_goes_on_from_another(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    diverges = NonFiniteError.exit_code

    def train(job: Job, settings: Any) -> Result:
        if (job.member, job.number) == (1, 0):
            return result(0, None, code=diverges, error="NaN in the weights", entered=False)
        return train_slice(job, settings, plan.folder, plan.board, FolderBoard(str(plan.board), 99))

    schedule, said, places = drive(plan, 2, train)
    assert "member 1 failed: NaN in the weights" in said
    assert next(job for job in places.jobs if (job.member, job.number) == (1, 1)).source
    assert schedule.is_done


def test_an_error_of_a_slice_is_a_result(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    board = FolderBoard(str(plan.board), 99)
    job = Job(0, 0, "member_000", 0, 0, EVERY, 3 * EVERY, "x")
    values = plan.settings.to_dict() | {"population": 1, "pbt": False, "pbt_every": None}
    done = train_slice(job, values | {"env": "no_such_env"}, plan.folder, plan.board, board)
    assert (done["code"], done["steps"], done["unreadable"]) == (2, 0, False)
    assert "no_such_env" in done["error"]


def test_a_slice_without_an_evaluation_has_not_the_score_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes no longer end in the second slice."""
    monkeypatch.setattr("gpurl.run.evaluator.MAX_STEPS", 64)
    plan = plan_of(tmp_path, env_options={})
    board = FolderBoard(str(plan.board), 99)
    values = settings_of_members(plan)[0] | {"env": "tests.tiny_envs:Lingering"}
    results = []
    for number, begin in enumerate((0, EVERY)):
        job = Job(0, number, "member_000", 0, begin, begin + EVERY, 2 * EVERY, f"x-{number}")
        results.append(train_slice(job, values, plan.folder, plan.board, board))
    assert [done["score"] is not None for done in results] == [True, False]
    assert [done["entered"] for done in results] == [True, False]
    assert [each.name for each in board.entries()] == ["x-0"]


# ---- folders ----


def begin_nothing(cleanup: Any) -> Any:
    raise AssertionError("nothing should begin")


def test_folders_that_cannot_work_are_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    plan = plan_of(tmp_path, pbt_leaderboard=str(tmp_path / "file" / "board"), is_tournament=True)
    with pytest.raises(UsageError, match=r"the leaderboard .*file/board cannot be written"):
        train_population(plan, begin_nothing, said.append)
    plan = plan_of(tmp_path / "file")
    with pytest.raises(UsageError, match=r"no folder .*choose another --run-dir"):
        train_population(plan, begin_nothing, said.append)
    plan = plan_of(tmp_path)
    with lock_run(plan.folder, "schedule"), pytest.raises(UsageError, match="is in use by"):
        train_population(plan, begin_nothing, said.append)


def test_the_schedule_of_something_else_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    drive(plan, 2, lambda job, settings: result(job.until, 1.0, entered=False))
    with pytest.raises(UsageError, match=r"is of num_envs 16, now it is 32: leave it as it was"):
        open_schedule(plan_of(tmp_path, num_envs=32))
    with pytest.raises(UsageError, match="is of tournament False, now it is True"):
        open_schedule(plan_of(tmp_path, is_tournament=True))
    # settings that change no number may change
    assert open_schedule(plan_of(tmp_path, threads=2, save_every="5s")).is_done
    file = plan.folder / FILE
    hostile = [make(tmp_path / "canary") for make in HOSTILE.values()]
    for content in (b"", b"[1]", json.dumps({"about": 3}).encode(), b"{" * 5000, *hostile):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_schedule(plan)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_tournament_shares_its_leaderboard(scheme: str, tmp_path: Path) -> None:
    """Two of them, one after the other: members of the second draw entries of the first. Also on
    other storage, of which each has a copy in its folder.
    """
    shared = f"{scheme}{tmp_path / 'shared'}"
    first = plan_of(tmp_path / "a", is_tournament=True, pbt_leaderboard=shared)
    schedule, _, _ = drive(first)
    names = {each.name for each in Leaderboard(tmp_path / "shared", 6).entries()}
    assert names == {f"{schedule.run}-{k}" for k in range(3)}
    second = plan_of(tmp_path / "b", is_tournament=True, pbt_leaderboard=shared, seed=50)
    other, _, places = drive(second)
    assert {job.source for job in places.jobs} & names
    best = [each.score for each in Leaderboard(tmp_path / "shared", 6).entries()]
    assert len(best) <= 6
    assert best == sorted(best, reverse=True)
    assert latest_checkpoint(second.folder / "member_002") is not None
    assert other.is_done
    assert (second.folder / "board" / "leaderboard.json").exists() == bool(scheme)
