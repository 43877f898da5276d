"""Population based training: who takes over goes on, bit for bit, as the source would with other
settings, on its own environments and random numbers.
"""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms.a2c import A2CConfig
from gpurl.algorithms.dqn import DQNConfig
from gpurl.algorithms.ppo import PPOConfig
from gpurl.algorithms.sac import SACConfig
from gpurl.checkpoints.leaderboard import Leaderboard
from gpurl.engine.pbt import PopulationBasedTraining
from gpurl.engine.population import Population
from gpurl.errors import CheckpointError
from gpurl.run.resume import checkpoint_parts, restore_engine
from tests.engine.test_population import (
    ENVS,
    HORIZON,
    WALK,
    iterate,
    member_state,
    one_thread,
    population,
    settings_of,
    single,
)
from tests.engines import running_state
from tests.small_runs import assert_same

__all__ = ["one_thread"]  # a fixture

NAN = math.nan
EVERY = 2 * ENVS * HORIZON


def pbt_population(size: int = 4, algorithm: str = "ppo", **changes: Any) -> Population:
    """A population that selects after every second iteration."""
    values: dict[str, Any] = {"pbt": True, "pbt_every": EVERY, "total_steps": 100 * EVERY}
    return population(size, algorithm, **(values | changes))


def set_scores(engine: Population, scores: list[float]) -> None:
    """As if each environment of a member had just ended an episode of this return, which began
    after its last change.
    """
    for member, score in zip(engine.members, scores, strict=True):
        member.statistics.newest[0] = score
        member.statistics.newest[2] += 2


def pbt_of(engine: Population) -> PopulationBasedTraining:
    assert engine.pbt is not None
    return engine.pbt


# ---- a take-over ----


def test_the_worst_goes_on_from_the_best_with_other_settings() -> None:
    engine = pbt_population(4, member={"learning_rate": (1e-3, 2e-3, 3e-3, 4e-3)})
    iterate(engine, 1)
    set_scores(engine, [1.0, 2.0, 9.0, 3.0])
    streams = {
        name: {key: value.clone() for key, value in stream.state_dict().items()}
        for name, stream in engine.members[0].algorithm.random_streams.items()
    }
    obs = engine.members[0].obs.clone()
    (taken,) = pbt_of(engine).select(set())
    loser, winner = (engine.members[k].algorithm for k in (0, 2))
    assert (taken.member, taken.source.member) == (0, 2)
    assert (taken.score, taken.source.score) == (1.0, 9.0)
    # weights, optimiser and normalisers are the winner's, copied
    assert_same(dict(loser.state_dict()), dict(winner.state_dict()))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        own, other = (each.optimizers["policy"].state_dict()[name] for each in (loser, winner))
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()
    # settings are the winner's, changed, in all places that read them
    assert taken.source.settings == {"learning_rate": 3e-3, "entropy_coef": 0.0, "clip_range": 0.2}
    assert all(
        taken.settings[name] != taken.source.settings[name] for name in taken.source.settings
    )
    rate = loser.optimizers["policy"].learning_rate
    # the kl schedule has changed the winner's rate: its own changes in proportion
    now = winner.optimizers["policy"].learning_rate * taken.settings["learning_rate"] / 3e-3
    assert float(rate) == pytest.approx(float(now), rel=1e-6)
    assert float(loser.clip_range) == pytest.approx(taken.settings["clip_range"])  # type: ignore[arg-type]
    assert float(loser.entropy_coef) == pytest.approx(taken.settings["entropy_coef"])  # type: ignore[arg-type]
    assert winner.config.learning_rate == 3e-3
    # random streams and episodes are its own
    for name, stream in loser.random_streams.items():
        assert_same(
            {key: value.clone() for key, value in stream.state_dict().items()}, streams[name]
        )
    assert torch.equal(engine.members[0].obs, obs)
    after = taken.settings["learning_rate"]
    assert (
        f"member 0 took over member 2 (return 1 -> 9), learning_rate 0.003 -> {after:.3g}"
        in str(taken)
    )


def test_who_takes_over_forgets_what_another_network_remembered() -> None:
    engine = pbt_population(2, network={"memory": "gru", "memory_size": 4, "hidden": [8]})
    iterate(engine, 1)
    set_scores(engine, [1.0, 9.0])
    before = [member.policy_state[0].clone() for member in engine.members]
    assert all(memory.any() for memory in before)
    engine._select(pbt_of(engine))
    assert not engine.members[0].policy_state[0].any()
    assert torch.equal(engine.members[1].policy_state[0], before[1])


def test_an_episode_that_the_former_policy_began_does_not_count() -> None:
    engine = pbt_population(2)
    iterate(engine, 1)
    set_scores(engine, [1.0, 9.0])
    pbt = pbt_of(engine)
    assert [each.member for each in pbt.select(set())] == [0]
    for ended, is_ready in ((0, False), (1, False), (2, True)):
        assert (0 in pbt.scores(set())) is is_ready, ended
        engine.members[0].statistics.newest[2] += 1


def test_a_checkpoint_changes_only_what_may_change() -> None:
    algorithm = pbt_population(2).members[0].algorithm
    state = algorithm.extra_state() | {"changed_settings": {"horizon": 10**12}}
    with pytest.raises(CheckpointError, match="the checkpoint changes horizon, which may not"):
        algorithm.load_extra_state(state)


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [("a2c", WALK), ("dqn", "cart_pole"), ("sac", "pendulum"), ("flash_sac", "pendulum")],
)
def test_all_that_a_checkpoint_holds_is_taken_over_but_episodes(algorithm: str, env: str) -> None:
    one, two = (member.algorithm for member in begun(population(2, algorithm, env)).members)
    before = copy.deepcopy(two.extra_state())
    two.take_over(dict(one.state_dict()), one.extra_state())
    assert_same(dict(two.state_dict()), dict(one.state_dict()))
    source, after = one.extra_state(), two.extra_state()
    for name in after:
        assert_same(after[name], (before if name in two.of_episodes else source)[name], name)
    # and they are different things
    assert {"random"} <= two.of_episodes <= after.keys()
    for name in after["random"]:
        assert not torch.equal(*(each["random"][name]["key"] for each in (source, after)))


def begun(engine: Population) -> Population:
    iterate(engine, 3)
    return engine


CHANGES = [
    *(("ppo", name) for name in PPOConfig.changeable),
    *(("a2c", name) for name in A2CConfig.changeable),
    *(("sac", name) for name in SACConfig.changeable),
    *(("dqn", name) for name in DQNConfig.changeable),
]
OTHERS = {
    "learning_rate": 7e-3,
    "epochs": 5,
    "target_kl": 1e-6,
    "entropy_coef": 0.3,
    "clip_range": 1e-3,
}


@pytest.mark.parametrize(("algorithm", "name"), CHANGES)
def test_a_changed_setting_is_that_of_a_run_that_has_it(
    algorithm: str, name: str, one_thread: None
) -> None:
    """To the bit, in the engines that run here, where the rate is not adapted."""
    env = "cart_pole" if algorithm == "dqn" else "pendulum"
    schedule = {} if name == "target_kl" else {"schedule": "constant"}
    value = OTHERS.get(name, 0.5)
    given = single(algorithm, env, **schedule, **{name: value})
    changed = single(algorithm, env, **schedule)
    changed.algorithm.change_setting(name, value)
    untouched = single(algorithm, env, **schedule)
    states = []
    for engine in (given, changed, untouched):
        iterate(engine, 4)
        state = member_state(engine)
        del state["algorithm"]["training"]["changed_settings"]
        states.append(state)
    assert_same(states[0], states[1])
    weights = [state["algorithm"]["model"] for state in states[1:]]
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


# ---- when, and among whom ----


def test_it_is_due_at_multiples_of_the_interval() -> None:
    pbt = pbt_of(pbt_population(2, pbt_every=100))
    steps = range(0, 700, 90)
    due = [after for before, after in itertools.pairwise(steps) if pbt.is_due(before, after)]
    assert due == [180, 270, 360, 450, 540, 630]
    assert not pbt.is_due(100, 199)
    assert pbt.is_due(199, 200)


def test_a_member_is_ready_when_all_its_environments_ended_an_episode() -> None:
    engine = pbt_population(3)
    pbt = pbt_of(engine)
    assert pbt.scores(set()) == {}
    set_scores(engine, [1.0, 2.0, 3.0])
    engine.members[0].statistics.newest[2, -1] = 0
    assert pbt.scores({1})[2] == 3.0
    assert math.isnan(pbt.scores({1})[1])
    assert 0 not in pbt.scores({1})
    # who has none yet is not replaced, however bad, and who was replaced waits
    set_scores(engine, [1.0, 2.0, 3.0])
    assert [(each.member, each.source.member) for each in pbt.select(set())] == [(0, 2)]
    assert pbt.scores(set()) == {1: 2.0, 2: 3.0}
    set_scores(engine, [5.0, 2.0, 3.0])
    assert [(each.member, each.source.member) for each in pbt.select(set())] == [(1, 0)]


def test_waiting_is_said_once() -> None:
    engine = pbt_population(2, env="pendulum")
    iterate(engine, 4)
    notes = [note for note in engine.notes if "nothing was selected: 0 of 2 members" in note]
    assert len(notes) == 1
    assert f"a longer pbt_every than {EVERY} steps" in notes[0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("truncation", {0: 2}), ("tournament", {0: 2, 1: 2}), ("generation", {0: 1, 1: 2})],
)
def test_each_rule_drives_a_population(
    rule: str, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pbt_population(3, pbt_rule=rule, pbt_fraction=0.4)
    pbt = pbt_of(engine)
    # of each member one number for the rule, then two for each of three settings
    numbers = torch.tensor([[0.6], [0.0], [0.0]]).expand(3, 7).clone()
    numbers[0, 0] = {"truncation": 0.6, "tournament": 0.0, "generation": 0.8}[rule]
    monkeypatch.setattr(pbt.random, "uniform", lambda shape: numbers)
    set_scores(engine, [1.0, 2.0, 3.0])
    assert {each.member: each.source.member for each in pbt.select(set())} == expected


def test_a_source_that_is_replaced_itself_gives_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once, as a gather does it: 1 goes on from 0, 0 from 2."""
    engine = pbt_population(3, pbt_rule="tournament")
    pbt = pbt_of(engine)
    iterate(engine, 1)
    before = [copy.deepcopy(dict(each.algorithm.state_dict())) for each in engine.members]
    monkeypatch.setattr("gpurl.engine.pbt.parents_of", lambda *scores: [2, 0, 2])
    set_scores(engine, [1.0, 2.0, 3.0])
    pbt.select(set())
    for k, parent in enumerate((2, 0, 2)):
        assert_same(dict(engine.members[k].algorithm.state_dict()), before[parent])


# ---- lost members ----


@pytest.mark.parametrize("workers", [1, 2])
def test_a_member_that_diverged_takes_over_another(workers: int, one_thread: None) -> None:
    engine = pbt_population(3, workers=workers, pbt_every=10 * EVERY // 2)
    iterate(engine, 1)
    for parameter in engine.members[1].algorithm.parameters():
        parameter.data.fill_(float("nan"))
    iterate(engine, 8)
    assert list(engine.guards.lost) == [1]
    set_scores(engine, [5.0, 9.0, 4.0])
    # the next selection: the member is back, with finite weights, and learns
    for member in engine.members:
        member.statistics.add = lambda timestep: None  # type: ignore[method-assign]
    iterate(engine, 1)
    assert not engine.guards.lost
    assert any("member 1 took over member 0 (return nan -> 5)" in note for note in engine.notes)
    assert engine.guards.bad_weights() == ""
    before = engine.members[1].algorithm.optimizers["policy"].flat.clone()
    obs = engine.obs.split(ENVS)[1]
    assert torch.equal(engine.members[1].obs, obs)
    iterate(engine, 1)
    assert not engine.guards.lost
    assert not torch.equal(before, engine.members[1].algorithm.optimizers["policy"].flat)
    assert engine.guards.bad_weights() == ""


# ---- states ----


@pytest.mark.parametrize("schedule", ["kl", "constant"])
def test_selection_continues_bit_for_bit(schedule: str, one_thread: None) -> None:
    plain, broken, resumed = (pbt_population(3, schedule=schedule) for _ in range(3))

    def play(engine: Population, iterations: range) -> int:
        """How many took over others; before a selection all have scores."""
        before = len(engine.notes)
        for number in iterations:
            if number % 2:
                set_scores(engine, [1.0 + number % 4, 2.0, 3.0])
            engine.iterate(number / 9)
        return sum("took over" in note for note in engine.notes[before:])

    play(plain, range(9))
    assert play(broken, range(5)) >= 2
    settings = settings_of("ppo", WALK, 3, pbt=True, pbt_every=EVERY, schedule=schedule)
    run = {"elapsed": 0.0, "threads": 1, "best_return": 0.0, "evaluation": {}}
    parts = copy.deepcopy(checkpoint_parts(broken, settings.to_dict(), run, {}))
    restore_engine(resumed, parts, settings)
    assert play(resumed, range(5, 9)) >= 2
    states = [
        [running_state(engine), *map(member_state, engine.members)] for engine in (resumed, plain)
    ]
    for state in (*states[0], *states[1]):
        state.pop("guards")  # which count what a process has seen
    assert_same(*states)
    assert [each.algorithm.config for each in resumed.members] == [
        each.algorithm.config for each in plain.members
    ]


def test_members_that_are_not_selected_keep_every_bit(one_thread: None) -> None:
    plain, selected = population(3, env="cart_pole"), pbt_population(3, env="cart_pole")
    for engine in (plain, selected):
        iterate(engine, 2)
        set_scores(engine, [9.0, 1.0, 9.0])
    for engine in (plain, selected):
        iterate(engine, 2)
    taken = [note for note in selected.notes if "took over" in note]
    assert [note[:22] for note in taken] == ["member 1 took over mem"]
    for k in (0, 2):
        assert_same(member_state(selected.members[k]), member_state(plain.members[k]))


# ---- with a leaderboard ----


def board_population(folder: Path, algorithm: str = "ppo", **changes: Any) -> Population:
    return pbt_population(3, algorithm, pbt_leaderboard=str(folder), **changes)


def test_members_take_over_entries_of_other_runs(tmp_path: Path) -> None:
    """Another run, of other weights, draws what the first one has entered."""
    first = board_population(tmp_path, member={"gamma": (0.9, 0.8, 0.7)})
    iterate(first, 1)
    set_scores(first, [NAN, 2.0, 50.0])
    assert {each.member for each in pbt_of(first).select({0})} >= {0}
    entries = Leaderboard(tmp_path, 6).entries()
    assert [each.score for each in entries] == [50.0, 2.0]
    assert [each.name[-2:] for each in entries] == ["-2", "-1"]
    # who is better stays, who diverged goes on from an entry
    second = board_population(tmp_path)
    iterate(second, 1)
    set_scores(second, [NAN, 40.0, 30.0])
    entered = Leaderboard(tmp_path, 6).load(entries[0], torch.device("cpu"))
    pbt = pbt_of(second)
    numbers = torch.full((3, 7), 0.75)
    numbers[:, 0] = torch.tensor([0.0, 0.9, 0.9])  # the best entry, and bad ones
    pbt.random.uniform = lambda shape: numbers  # type: ignore[method-assign,assignment]
    (taken,) = pbt.select({0})
    assert pbt.notes == []
    assert (taken.member, taken.source.member, taken.source.score) == (0, -1, 50.0)
    assert f"member 0 took over entry {entries[0].name} (return nan -> 50), " in str(taken)
    found = Leaderboard(tmp_path, 6).entries()
    assert [each.score for each in found] == [50.0, 40.0, 30.0, 2.0]
    assert_same(dict(second.members[0].algorithm.state_dict()), entered["weights"])
    # a listed setting that no range has, as another program may write it, is moved into its range
    board = tmp_path / "leaderboard.json"
    board.write_text(board.read_text().replace('"clip_range": 0.2', '"clip_range": -5.0'))
    set_scores(second, [1.0, 40.0, 30.0])
    (again,) = pbt.select(set())
    assert again.source.settings["clip_range"] == 0.05
    # settings that are no part of the search stay
    assert second.members[0].algorithm.config.gamma == 0.99
    assert taken.settings["clip_range"] == pytest.approx(0.24)


def test_what_stands_on_a_leaderboard_must_fit(tmp_path: Path) -> None:
    """Entries of other agents, damaged ones and a damaged list are named; the run goes on."""
    other = board_population(tmp_path, network={"hidden": [4]})
    set_scores(other, [7.0, 8.0, 9.0])
    pbt_of(other).select(set())
    engine = board_population(tmp_path)
    weights = [copy.deepcopy(dict(each.algorithm.state_dict())) for each in engine.members]
    set_scores(engine, [1.0, NAN, 1.0])
    pbt = pbt_of(engine)
    pbt.random.uniform = lambda shape: torch.zeros(3, *shape)  # type: ignore[method-assign,assignment]
    assert pbt.select({1}) == []
    assert [note.split(" entry ")[0] for note in pbt.notes] == [
        f"member {k} did not take over" for k in range(3)
    ]
    assert all(
        "it is an agent of another algorithm, other spaces or networks" in note
        for note in pbt.notes
    )
    # cut off
    files = [*tmp_path.glob("entries/*/step_*/weights.safetensors")]
    assert len(files) == 5
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    pbt.notes.clear()
    assert pbt.select({1}) == []
    assert len(pbt.notes) == 3
    assert all("did not take over entry" in note for note in pbt.notes)
    (tmp_path / "leaderboard.json").write_text("{}")
    pbt.notes.clear()
    set_scores(engine, [1.0, NAN, 1.0])
    assert pbt.select({1}) == []
    (note,) = pbt.notes
    assert "no member took over an entry: " in note
    assert "leaderboard.json is no leaderboard" in note
    for member, before in zip(engine.members, weights):
        assert_same(dict(member.algorithm.state_dict()), before)
