"""A stacked population computes what its members compute in turn, in as many operations as one of
them; through the fake backend of graphs too.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ppo import PPO
from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.population import Population
from gpurl.engine.stack import Stack
from gpurl.engine.stacked import StackedPopulation, stacked_obstacle
from gpurl.engine.vmap_rules import RULES, VmapRules
from gpurl.envs.registry import make_env
from gpurl.errors import NonFiniteError, UsageError
from gpurl.kernels import backend
from gpurl.kernels.backend import no_host_syncs
from gpurl.run.setup import make_population
from tests.engine.test_population import (
    ENVS,
    PIXELS,
    SEED,
    WALK,
    algorithms_of,
    iterate,
    member_state,
    settings_of,
)
from tests.engines import graph_level
from tests.fake_graphs import FakeGraphs
from tests.small_runs import assert_same

MEMBERS = 3


class OwnLoss(PPO):
    """Of somebody's own."""

    def loss(self, batch: Minibatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(batch)
        return loss + 0.1 * batch.obs.mean() * self.network.trunk.layers[0].weight.sum(), metrics


class OldStyle(PPO):
    """Hands its optimiser a loss that it has not asked it for."""

    def _minibatch_step(self, batch: Minibatch) -> tuple[tuple[str, ...], Tensor, Tensor]:
        with torch.enable_grad():
            loss, metrics = self.loss(batch)
        norm = self.optimizer.step(loss)
        return tuple(metrics), torch.stack(tuple(metrics.values())), norm


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    """And an operation that vmap would compute for one member after the other is an error."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    with no_host_syncs():
        yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def make(
    stack: str,
    algorithm: str = "ppo",
    env: str = WALK,
    size: int = MEMBERS,
    graph: str = "off",
    backend: FakeGraphs | None = None,
    **changes: Any,
) -> Population:
    settings = settings_of(algorithm, env, size, stack=stack, graph=graph, **changes)
    made = make_env(env, size * ENVS, "cpu", SEED, **settings.env_options)
    engine = make_population(settings, algorithms_of(settings, made, SEED), made, backend=backend)
    assert isinstance(engine, Population)
    engine.begin(SEED, staggered=True)
    return engine


def assert_close(got: Any, expected: Any, where: str = "", tolerance: float = 2e-5) -> None:
    """Equal but for rounding."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(
            got,
            expected,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{where}: {text}",
        )
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for name in expected:
            assert_close(got[name], expected[name], f"{where}.{name}", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for k, (one, other) in enumerate(zip(got, expected)):
            assert_close(one, other, f"{where}.{k}", tolerance)
    else:
        assert got == expected, where


def states(engine: Population) -> list[dict[str, Any]]:
    engine.state_dict()  # the members of a stack get their observations for it
    return [member_state(member) for member in engine.members]


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("ppo", WALK, {}),
    ("ppo", "cart_pole", {"normalize_advantage": "minibatch", "schedule": "linear"}),
    ("ppo", "pendulum", {"schedule": "kl_minibatch", "distribution": "beta"}),
    ("ppo", "pendulum", {"network": {"memory": "gru", "memory_size": 8}}),
    ("ppo", "pendulum", {"network": {"memory": "lstm", "memory_size": 8}}),
    ("ppo", WALK, {"network": {"hidden": [8, 8], "layer_norm": True}}),
    ("ppo", WALK, {"network": {"hidden": [8, 8], "activation": "silu"}}),
    ("ppo", WALK, {"network": {"hidden": [8, 8], "activation": "gelu"}}),
    ("ppo", PIXELS, {"network": {"hidden": [8], "body": "bro", "encoder": "impala"}}),
    ("ppo", "tests.tiny_envs:HiddenAlternating", {}),
    ("tests.engine.test_stacked:OwnLoss", WALK, {}),
    ("ppo", WALK, {"critic_warmup": 2, "storage": "bfloat16"}),
    ("a2c", "pendulum", {}),
    ("dqn", "cart_pole", {}),
    ("dqn", "cart_pole", {"prioritized": True, "n_step": 3}),
    ("dqn", "cart_pole", {"atoms": 11, "network": {"hidden": [8], "noisy": True}}),
    ("dqn", "cart_pole", {"quantiles": 8, "target_interval": 3, "tau": 1.0}),
    ("sac", "pendulum", {}),
    ("sac", "pendulum", {"critic_network": {"hidden": [8, 8], "body": "simba"}}),
    ("td3", "pendulum", {}),
    ("pqn", "cart_pole", {}),
    ("vdn", "two_step_game", {}),
]


@pytest.mark.parametrize(("algorithm", "env", "changes"), CASES, ids=str)
def test_members_side_by_side_are_members_in_turn(
    algorithm: str, env: str, changes: dict[str, Any]
) -> None:
    stacked, in_turn = (make(stack, algorithm, env, **changes) for stack in ("on", "off"))
    assert isinstance(stacked, StackedPopulation)
    logs = [iterate(engine, 4) for engine in (stacked, in_turn)]
    assert logs[0][-1].keys() == logs[1][-1].keys()
    if env == PIXELS:  # convolutions sum in another order, and Adam's first steps know signs only
        assert_close(logs[0][:2], logs[1][:2], "metrics", 1e-4)
        return
    assert_close(states(stacked), states(in_turn))
    assert_close(stacked.obs, in_turn.obs)
    assert_close(logs[0], logs[1], "metrics")
    assert (stacked.steps, stacked.stored) == (in_turn.steps, in_turn.stored)


def test_members_have_settings_of_their_own() -> None:
    own = {"learning_rate": (1e-2, 1e-3, 1e-4), "gamma": (0.9, 0.5, 0.99)}
    own |= {"entropy_coef": (0.0, 0.1, 0.2), "clip_range": (0.1, 0.3, 0.2)}
    own |= {"gae_lambda": (0.9, 1.0, 0.5), "target_kl": (0.001, 0.1, 0.01)}
    stacked, in_turn = (make(stack, member=own) for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        iterate(engine, 5)
    assert_close(states(stacked), states(in_turn))
    # off-policy
    own = {"learning_rate": (1e-2, 1e-3, 1e-4), "gamma": (0.9, 0.5, 0.99)}
    own |= {"temperature": (0.1, 1.0, 0.5)}
    stacked, in_turn = (make(stack, "sac", "pendulum", member=own) for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        iterate(engine, 5)
    assert_close(states(stacked), states(in_turn))


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_eight_members_take_as_many_operations_as_two(algorithm: str) -> None:
    def operations(size: int) -> int:
        engine = make("on", algorithm, "pendulum", size)
        iterate(engine, 3)
        with Counted() as counted:
            engine.collect()
            engine.prepare()
            engine.learn({})
        return counted.number

    assert operations(8) == operations(2)


class Counted(TorchDispatchMode):
    """Counts operations, each of which is a launch on a GPU; views are none."""

    number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


def test_members_do_not_interact() -> None:
    changed, plain = make("on"), make("on")
    for engine in (changed, plain):
        iterate(engine, 2)
    # the weights of a member are still its own
    with torch.no_grad():
        next(changed.members[1].algorithm.parameters()).add_(0.1)
    for engine in (changed, plain):
        iterate(engine, 3)
    for k in (0, 2):
        assert_same(member_state(changed.members[k]), member_state(plain.members[k]))
    weights = [each.members[1].algorithm.state_dict() for each in (changed, plain)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(("algorithm", "env"), [("ppo", WALK), ("sac", "pendulum")])
def test_a_member_with_nan_is_lost_and_the_others_are_untouched(algorithm: str, env: str) -> None:
    spoiled, plain = (make("on", algorithm, env) for _ in range(2))
    for engine in (spoiled, plain):
        iterate(engine, 3)
    for parameter in spoiled.members[1].algorithm.parameters():
        parameter.data.fill_(float("nan"))
    for engine in (spoiled, plain):
        iterate(engine, 2)
        values = {name: float(value) for name, value in engine.guards.metrics().items()}
        engine.guards.report(values, engine.iteration)
        iterate(engine, 2)
    assert list(spoiled.guards.lost) == [1]
    for k in (0, 2):
        assert_same(member_state(spoiled.members[k]), member_state(plain.members[k]))
    # its environments idle, and the means are those of the others
    metrics = iterate(spoiled, 1)[-1]
    assert all(bool(value.isfinite()) for value in metrics.values()), metrics
    action = spoiled.act().action.unflatten(0, (MEMBERS, ENVS))
    assert_same(action[1], spoiled.idle_action)
    # the last one ends the run
    for member in spoiled.members:
        for parameter in member.algorithm.parameters():
            parameter.data.fill_(float("nan"))
    iterate(spoiled, 2)
    values = {name: float(value) for name, value in spoiled.guards.metrics().items()}
    with pytest.raises(NonFiniteError):
        spoiled.guards.report(values, spoiled.iteration)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(("algorithm", "env"), [("ppo", WALK), ("dqn", "cart_pole")])
def test_a_run_with_a_lost_member_is_resumed(algorithm: str, env: str, lost: int) -> None:
    """In turn, as nothing of a lost member is allocated. The lost one's state is that of before."""
    stacked, in_turn = (make(stack, algorithm, env) for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        engine.guards.lost[lost] = "as the checkpoint says"
        iterate(engine, 5)
    got, expected = (
        [s for k, s in enumerate(states(each)) if k != lost] for each in (stacked, in_turn)
    )
    assert_close(got, expected)
    assert [note for note in stacked.notes if f"member {lost} is lost" in note]


def test_the_others_follow_their_schedule_when_the_first_member_is_lost() -> None:
    """Random actions end when learning begins, whoever is lost."""
    stacked, in_turn = (make(stack, "dqn", "cart_pole") for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        iterate(engine, 2)
        engine.guards.lost[0] = "its environment gave NaN"
        engine.members[0].algorithm.is_random = True
        iterate(engine, 3)
    assert_close(states(stacked)[1:], states(in_turn)[1:])


def test_a_hidden_state_that_has_read_nan_begins_anew() -> None:
    network = {"memory": "gru", "memory_size": 8}
    options = {"network": network, "nan": "skip"}
    stacked, in_turn = (make(stack, "ppo", "pendulum", **options) for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        iterate(engine, 2)
        engine.state_dict()
        obs, (memory,) = engine.obs.clone(), engine.members[1].policy_state
        obs[ENVS + 2] = float("nan")
        memory = torch.cat([member.policy_state[0] for member in engine.members])
        memory[ENVS + 2] = float("nan")
        engine.policy_state = (memory,)
        engine._set_episodes(obs, (memory,))
        iterate(engine, 3)
    assert bool(stacked.policy_state[0].isfinite().all())
    assert_close(states(stacked), states(in_turn))


def test_what_a_step_says_of_no_environment_is_ignored() -> None:
    engine = make("on")
    step = engine.env.step

    def with_clock(actions: Tensor) -> Any:
        timestep = step(actions)
        return timestep._replace(info=timestep.info | {"clock": torch.tensor(1.0)})

    engine.env.step = with_clock  # type: ignore[method-assign]
    assert iterate(engine, 3)[-1]


PBT = {
    "pbt": True,
    "pbt_every": 3 * ENVS * 6,
    "pbt_fraction": 0.34,
    "explore": {"learning_rate": [1e-4, 1e-2], "gamma": [0.8, 0.999], "clip_range": [0.1, 0.4]},
}


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_selection_is_that_of_members_in_turn(memory: str) -> None:
    network = {"hidden": [8], "memory": memory, "memory_size": 8}
    stacked, in_turn = (make(stack, network=network, **PBT) for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        iterate(engine, 12)
    notes = [[note for note in each.notes if "took over" in note] for each in (stacked, in_turn)]
    assert notes[0] == notes[1] != []
    configs = [[member.algorithm.config for member in each.members] for each in (stacked, in_turn)]
    assert configs[0] == configs[1]
    assert len({config.gamma for config in configs[0]}) > 1
    assert_close(states(stacked), states(in_turn))


def test_selection_leaves_replay_buffers() -> None:
    explored = {"learning_rate": [1e-4, 1e-2], "gamma": [0.8, 0.999]}
    pbt = {"pbt": True, "pbt_every": 8 * ENVS, "pbt_fraction": 0.34, "explore": explored}
    stacked, in_turn = (make(stack, "sac", **pbt) for stack in ("on", "off"))
    for engine in (stacked, in_turn):
        iterate(engine, 24)
    notes = [[note for note in each.notes if "took over" in note] for each in (stacked, in_turn)]
    assert notes[0] == notes[1] != []
    assert_close(states(stacked), states(in_turn), tolerance=1e-3)


def test_a_cpu_that_reads_tensors_stacks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `no_host_syncs`, as `--stack on` runs on a CPU."""
    found = []
    for is_free in (False, True):
        # undone here: the fixtures that are may end in another order
        with monkeypatch.context() as patch:
            patch.setattr(backend._thread, "host_sync_is_free", is_free)
            engine = make("on", env="cart_pole")
            iterate(engine, 4)
            values = {name: float(value) for name, value in engine.guards.metrics().items()}
            assert engine.guards.report(values, engine.iteration)["train/skipped_steps"] == 0
        found.append([each["algorithm"] for each in states(engine)])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_checkpoint_goes_on(algorithm: str) -> None:
    """In turn for an iteration, then stacked again."""
    whole, first, second = (make("on", algorithm, "pendulum") for _ in range(3))
    iterate(whole, 6)
    iterate(first, 3)
    first.guards.members[1].steps.total = 3  # has skipped steps
    second.load_state_dict(first.state_dict())
    assert second.guards.members[1].state_dict() == {"steps": 3, "rows": 0}
    for one, other in zip(second.members, first.members):
        one.algorithm.load_state_dict(other.algorithm.state_dict())
        one.algorithm.load_extra_state(other.algorithm.extra_state())
        if algorithm == "sac":
            one.algorithm.replay.load_state_dict(other.algorithm.replay.state_dict())
    second.stored = first.stored
    second.load_episodes(first.env.state_dict(), first.state_dict(), SEED)
    for number in (3, 4, 5):
        second.iterate(number / 6)
    assert second._stack is not None
    assert whole.steps == second.steps
    parts = {"guards": {}, "skipped": {}}
    got, expected = ([each | parts for each in states(one)] for one in (second, whole))
    assert_close(got, expected)  # guards count the steps of a process


# ---- graphs ----


@pytest.mark.parametrize("level", ["full", "policy"])
@pytest.mark.parametrize(
    ("algorithm", "env", "changes"),
    [
        ("ppo", "chasing", {}),
        ("ppo", "pendulum", {"network": {"memory": "gru", "memory_size": 8}}),
        ("dqn", "cart_pole", {}),
        ("sac", "pendulum", {}),
    ],
    ids=str,
)
def test_graphs_of_a_stack_are_iterations_without(
    algorithm: str, env: str, changes: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = type(make_env(env, 1, "cpu", 0))
    if level == "policy":
        monkeypatch.setattr(made, "graph_safe", False)
    plain = make("on", algorithm, env, **changes)
    graphed = make("on", algorithm, env, graph="auto", backend=FakeGraphs(), **changes)
    logs = [iterate(engine, 6) for engine in (plain, graphed)]
    assert graph_level(graphed) == level
    assert_same(states(graphed), states(plain))
    assert_same(logs[1], logs[0])
    assert_same(graphed.obs, plain.obs)


def test_a_checkpoint_leaves_graphs_the_memory_that_they_hold() -> None:
    """Two of them, and the hidden states in the second are those of now."""
    changes = {"network": {"memory": "gru", "memory_size": 8}}
    plain = make("on", "ppo", "pendulum", **changes)
    graphed = make("on", "ppo", "pendulum", graph="auto", backend=FakeGraphs(), **changes)
    for _ in range(3):
        for engine in (plain, graphed):
            iterate(engine, 6)
        got, expected = (engine.state_dict()["policy_state"] for engine in (graphed, plain))
        assert_same(got, expected)
        assert_same(graphed.policy_state, plain.policy_state)
    assert graph_level(graphed) == "full"


def test_a_member_that_goes_on_is_not_blamed_for_what_it_found_before() -> None:
    engine = make("on", "ppo", "pendulum")
    iterate(engine, 6)
    finite = engine.guards.members[1].finite
    finite.findings.policy_diverged.fill_(True)
    finite.findings.count.fill_(3)
    engine.guards.lost[1] = "diverged"
    engine._revive(1)
    values = {name: float(value) for name, value in finite.metrics().items()}
    assert values["policy_diverged"] == values["non_finite_rows"] == 0.0
    assert values["first_non_finite"] == -1.0


def test_a_member_that_goes_on_learns_nothing_from_idling() -> None:
    engine = make("on", "sac", "pendulum")
    iterate(engine, 6)
    engine.guards.lost[1] = "diverged"
    iterate(engine, 1)
    engine._revive(1)
    stored = [int(member.algorithm.replay.ring.counts[0]) for member in engine.members]
    assert stored == [7, 0, 7]
    # and from each row of what its own actions did
    for count in (1, 2):
        iterate(engine, 1)
        algorithm = engine.members[1].algorithm
        assert int(algorithm.replay.ring.counts[0]) == count
        assert bool(algorithm.sample_batch()["weight"].all())


def test_graphs_read_what_selection_changes() -> None:
    plain = make("on", **PBT)
    graphed = make("on", graph="auto", backend=FakeGraphs(), **PBT)
    for engine in (plain, graphed):
        iterate(engine, 14)
    assert graph_level(graphed) in ("full", "policy")
    assert [note for note in graphed.notes if "took over" in note]
    assert_same(states(graphed), states(plain))


@pytest.mark.parametrize("graph", ["off", "auto"])
def test_an_interrupted_rollout_breaks_the_episodes_of_all_members(
    graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = FakeGraphs() if graph == "auto" else None
    engine = make("on", "sac", "pendulum", graph=graph, backend=graphs)
    iterate(engine, 6)
    broken = []
    for k, member in enumerate(engine.members):
        monkeypatch.setattr(member.algorithm, "mark_episode_break", lambda k=k: broken.append(k))
    engine.stages.collect()
    engine.abandon()
    assert broken == [0, 1, 2]
    assert [member.buffer.size for member in engine.members] == [0, 0, 0]


# ---- what cannot be stacked ----


@pytest.mark.parametrize(
    ("algorithm", "env", "changes", "why"),
    [
        (
            "ppo",
            WALK,
            {"member": {"weight_decay": (0.0, 0.1, 0.2)}},
            "members differ in weight_decay",
        ),
        ("sac", "pendulum", {"target_subset": 1}, "target_subset copies critics"),
        ("flash_sac", "pendulum", {}, "batch norms change their statistics"),
        ("ppo", "pendulum", {"network": {"memory": "mingru"}}, "memory mingru has no rule"),
    ],
    ids=str,
)
def test_what_cannot_be_stacked_is_named(
    algorithm: str, env: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=f"stack on is not possible: .*{why}"):
        make("on", algorithm, env, **changes)


@pytest.mark.parametrize(
    ("algorithm", "env", "changes", "obstacle"),
    [
        ("ppo", WALK, {}, ""),
        ("dqn", "cart_pole", {}, ""),
        ("sac", "pendulum", {}, ""),
        ("tests.engine.test_stacked:OwnLoss", WALK, {}, "OwnLoss is not an algorithm of gpurl"),
        (
            "ppo",
            WALK,
            {"network": {"trunk": "tests.nn.test_own_network:Centred"}},
            "Centred is not a module",
        ),
    ],
)
def test_auto_takes_what_is_known_to_work(
    algorithm: str, env: str, changes: dict[str, Any], obstacle: str
) -> None:
    settings = settings_of(algorithm, env, 2, **changes)
    algorithms = algorithms_of(settings, make_env(env, 2 * ENVS, "cpu", SEED), SEED)
    assert obstacle in stacked_obstacle(algorithms, (), knows_only=True)
    assert not stacked_obstacle(algorithms, (), knows_only=False)


def test_auto_is_off_on_a_cpu() -> None:
    assert type(make("auto")) is Population


def test_a_loss_that_vmap_cannot_differentiate_says_what_to_do() -> None:
    engine = make("on", "tests.engine.test_stacked:OldStyle")
    with pytest.raises(UsageError, match=r"wanted a loss that optimizer\.evaluate computed"):
        iterate(engine, 3)


def test_stack_on_is_for_populations() -> None:
    with pytest.raises(UsageError, match="stack on is for the members of a population"):
        settings_of("ppo", WALK, 1, stack="on")


def test_what_one_kind_of_kernels_excludes() -> None:
    with pytest.raises(UsageError, match="update fused has kernels of each member, stack on"):
        settings_of("ppo", WALK, 2, stack="on", update="fused")


# ---- the stack itself ----


class Cell:
    """A tensor, a view of it, numbers and a method that points back."""

    def __init__(self, value: float) -> None:
        self.memory = torch.arange(6.0) + value
        self.view = self.memory[2:4]
        self.count = 0
        self.notes = ["kept"]
        self.bound = self.total

    def total(self) -> Tensor:
        return self.memory.sum()

    def add(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self.count += 1
        self.view += x
        return self.bound(), {"none": None, "view": self.view.clone()}


def test_a_call_of_a_stack_is_a_call_of_each() -> None:
    cells, expected = ([Cell(float(k)) for k in range(3)] for _ in range(2))
    stack = Stack(cells)
    stack.join()
    assert not stack.differences
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        total, rest = stack.call(Cell.add, x)
        wanted = [cell.add(each) for cell, each in zip(expected, x)]
        assert_same(total, torch.stack([each[0] for each in wanted]))
        assert_same(rest["view"], torch.stack([each[1]["view"] for each in wanted]))
        assert rest["none"] is None
    for cell, other in zip(cells, expected):
        assert_same(cell.memory, other.memory)
        assert cell.count == other.count == 2
        # still views of one memory
        cell.view.zero_()
        assert_same(cell.memory[2:4], torch.zeros(2))
    # every one begins where an allocation could
    assert {cell.memory.data_ptr() % 16 for cell in cells} == {0}


@pytest.mark.parametrize(
    ("algorithm", "env", "changes"),
    [
        ("ppo", "pendulum", {"network": {"memory": "gru"}, "schedule": "kl_minibatch"}),
        ("dqn", "cart_pole", {"prioritized": True, "n_step": 3}),
        ("sac", "pendulum", {}),
    ],
    ids=str,
)
def test_a_call_loses_nothing_that_its_copy_has_changed(
    algorithm: str, env: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers go back to the originals and tensors are written in place; obs and the columns that a
    rollout's guard derives are handed on by the engine.
    """
    lost = set[str]()
    keep = Stack._keep_numbers

    def audit(self: Stack, memo: dict[int, Any]) -> None:
        keep(self, memo)
        for number, (original, *_) in self._equals.items():
            own = memo.get(number, original)
            if own is original or isinstance(own, Tensor | list | tuple | MethodType):
                continue
            now, before = (
                each if isinstance(each, dict) else vars(each) for each in (own, original)
            )
            for name in now.keys() | before.keys():
                is_same = outline(now.get(name, lost)) == outline(before.get(name, lost))
                if is_same and isinstance(now[name], Tensor):
                    is_same = now[name] is memo.get(id(before[name]))
                if not is_same:
                    lost.add(f"{type(original).__name__}.{name}")

    monkeypatch.setattr(Stack, "_keep_numbers", audit)
    iterate(make("on", algorithm, env, **changes), 4)
    assert lost <= {"Eager.obs", "RolloutBuffer.columns", "dict.valid"}, lost


def outline(value: Any) -> Any:
    """Numbers and words as they are, of all else the kind."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, dict):
        return {name: outline(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [outline(each) for each in value]
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


def test_a_stack_names_what_its_objects_do_not_share() -> None:
    cells = [Cell(0.0), Cell(0.0)]
    cells[1].count = 5
    cells[1].memory = torch.zeros(7)
    cells[1].more = 1  # type: ignore[attr-defined]
    found = {each.path: each.values for each in Stack(cells).differences}
    sizes = torch.Size([6]), torch.Size([7])
    assert found == {".count": (0, 5), ".memory": sizes, ".more": ()}
    assert not Stack(cells, {Cell: ("count", "memory", "more")}).differences
    assert len(Stack(cells, {Stack: ("count", "memory", "more")}).differences) == 3


def test_memory_that_only_some_share_is_a_difference() -> None:
    cells = [Cell(0.0), Cell(0.0)]
    cells[1].view = cells[1].memory[2:4].clone()
    assert [each.path for each in Stack(cells).differences] == [".view"]


# ---- the rules ----


def test_rules_of_cells_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x, hidden, cell = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)
    for name, gates, state in (("gru", 3, hidden), ("lstm", 4, (hidden, cell))):
        module = getattr(nn, name.upper())(3, 4)
        weights = [each.detach() for each in module.parameters()]
        function = getattr(torch, f"{name}_cell")
        assert weights[0].shape[0] == 4 * gates
        torch.testing.assert_close(
            RULES[function](x, state, *weights), function(x, state, *weights)
        )


def test_rules_write_where_they_should() -> None:
    def compute(x: Tensor, alpha: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        a = x.clone().clamp_(0.0, 1.0)
        b = x.clone().add_(x, alpha=alpha)
        c = torch.empty_like(x)
        torch.where(x > 0, x, -x, out=c)
        d = x.clone().index_copy_(0, index, a[:1])
        e = x.clone()
        e %= 2
        f, g = x.clone(), x.clone()
        torch._foreach_copy_([f, g], [a, b])
        return a, b, torch.add(x, x, alpha=alpha), c, d, e, f, g

    def with_rules(x: Tensor, alpha: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        with VmapRules():
            return compute(x, alpha, index)

    x, alpha = torch.linspace(-3, 3, 12).view(3, 4), torch.tensor([0.5, 1.0, 2.0])
    index = torch.tensor([[0], [3], [1]])
    got = torch.func.vmap(with_rules)(x, alpha, index)
    for k in range(3):
        expected = compute(x[k], float(alpha[k]), index[k])  # type: ignore[arg-type]
        assert_close([each[k] for each in got], list(expected), tolerance=1e-6)


@pytest.mark.parametrize(
    ("source", "dtype"), [("bool", "uint8"), ("int64", "int32"), ("float32", "uint8")]
)
def test_a_view_as_another_type_is_batched(source: str, dtype: str) -> None:
    """By our own rule: that of torch is missing in its version 2.11."""

    def compute(x: Tensor) -> Tensor:
        return x.view(getattr(torch, dtype)) + 0

    def with_rules(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with VmapRules():
            # inside a gradient too, as losses read packed rows
            loss = lambda weight: (compute(x).float().sum() * 0 + weight).sum()  # noqa: E731
            return compute(x), torch.func.grad(loss)(weight)

    words = torch.tensor([[-1, 0, 1], [2**40 + 5, -(2**63), 2**31], [2**32, -(2**31) - 7, 9]])
    x = words.to(getattr(torch, source)).t().contiguous().t()
    expected = torch.stack([compute(row.contiguous()) for row in x.unbind(1)])
    got, gradient = torch.func.vmap(with_rules, in_dims=(1, 0))(x, torch.zeros(3, 2))
    assert torch.equal(got, expected)
    assert torch.equal(gradient, torch.ones(3, 2))
