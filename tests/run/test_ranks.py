"""One agent on several processes (gloo): the run of G processes is the run of one, any number of
processes continues their checkpoints, and a rank that is missing is named.
"""

import atexit
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from gpurl.envs.pendulum import Pendulum
from gpurl.errors import RankError
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run import setup
from gpurl.run.ranks import Ranks
from tests.fake_graphs import FakeGraphs
from tests.forked_runs import Forks

State = dict[str, Tensor]
NUM_ENVS, HORIZON = 8, 8
ITERATION = NUM_ENVS * HORIZON
PPO: dict[str, Any] = {
    "algorithm": "ppo",
    "env": "pendulum",
    "num_envs": NUM_ENVS,
    "horizon": HORIZON,
    "epochs": 2,
    "minibatches": 1,
    "network": {"hidden": [8]},
    "eval_episodes": 0,
    "device": "cpu",
    "threads": 1,
    "quiet": True,
    "log_every": 0.0,
    "total_steps": 6 * ITERATION,
}
SAC = {name: PPO[name] for name in PPO if name not in ("epochs", "minibatches", "network")} | {
    "algorithm": "sac",
    "horizon": 4,
    "batch_size": 16,
    "learning_starts": 64,
    "updates": 2,
    "replay_size": 256,
    "actor_network": {"hidden": [8]},
    "critic_network": {"hidden": [8]},
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_ranks(
    forks: Forks,
    folder: Path,
    count: int,
    of_rank: dict[int, dict[str, Any]] | None = None,
    port: str = "",
    **arguments: Any,
) -> list[int]:
    """The numbers of `count` processes that run together; what rank k says is in folder/k. of_rank:
    arguments of `play` of some ranks only.
    """
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    processes = []
    for rank in range(count):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        own = (of_rank or {}).get(rank, {})
        environment |= own.get("environment", {})
        together = arguments | own | {"environment": environment if count > 1 else {}}
        processes.append(forks.start(folder / str(rank), **together))
    return processes


def run_ranks(forks: Forks, folder: Path, count: int, **arguments: Any) -> list[int]:
    """Exit codes."""
    return [forks.wait(each) for each in start_ranks(forks, folder, count, **arguments)]


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("[0-9]")))


def state_of(run: Path) -> dict[str, Any]:
    parts, _ = load_checkpoint(run)
    return parts


def differences(one: Any, other: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """(place, the largest difference of a tensor in parts of its size) of two checkpoints."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for name in one:
            yield from differences(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), at
        for a, b in zip(one, other):
            yield from differences(a, b, at)
    elif isinstance(one, torch.Tensor) and one.numel():
        assert one.shape == other.shape, at
        one, other = one.double(), other.double()
        assert torch.equal(one.isnan(), other.isnan()), at
        one, other = one.nan_to_num(), other.nan_to_num()
        yield at, float((one - other).abs().max()) / max(1.0, float(one.abs().max()))


def assert_close(run: Path, other: Path, tolerance: float = 2e-5) -> None:
    """Weights, optimiser, normalisers, environments and their statistics."""
    one, two = state_of(run), state_of(other)
    for part in ("model", "env"):
        for place, size in differences(one[part], two[part], part):
            assert size < tolerance, (place, size)
    for name in ("obs", "policy_state", "statistics"):
        for place, size in differences(one["trainer"][name], two["trainer"][name], name):
            assert size < tolerance, (place, size)
    optimizers = (each["training"]["optimizers"] for each in (one, two))
    for place, size in differences(*optimizers, "optimizers"):
        assert size < tolerance, (place, size)
    assert one["trainer"]["steps"] == two["trainer"]["steps"]


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- parity ----

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"eval_episodes": 4},
    "normalised": {
        "normalize_obs": True,
        "normalize_value": True,
        "normalize_advantage": "minibatch",
        "schedule": "kl",
    },
    "kl of minibatches": {"schedule": "kl_minibatch", "epochs": 20, "target_kl": 1e-3},
    **{
        f"memory {each}": {"network": {"hidden": [8], "memory": each, "memory_size": 4}}
        for each in MEMORIES
    },
    "images": {"env": "catch"},
    "gymnasium": {"env": "gymnasium_cpu:CartPole-v1"},
    "nan": {"env": "tests.run.test_ranks:Spoiling", "nan": "skip", "normalize_obs": True},
    # the training environments play the evaluation
    "single": {"env": "tests.run.test_ranks:Single", "eval_episodes": 5},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_ppo_on_ranks_is_ppo_in_one_process(variant: str, forks: Forks, tmp_path: Path) -> None:
    """With one minibatch, to the rounding of sums: weights, rollouts, optimiser, log."""
    counts = (1, 2, 4) if variant == "normalised" else (1, 2)
    for count in counts:
        settings = PPO | VARIANTS[variant] | {"run_dir": str(tmp_path / f"run{count}")}
        codes = run_ranks(forks, tmp_path / f"said{count}", count, **settings)
        assert codes == [0] * count, said(tmp_path / f"said{count}")
    whole = logged(tmp_path / "run1")
    for count in counts[1:]:
        assert_close(tmp_path / "run1", tmp_path / f"run{count}")
        for line, other in zip(whole, logged(tmp_path / f"run{count}"), strict=True):
            assert line.keys() == other.keys()
            for name in ("step", "rollout/episodes", "train/value_loss", "train/learning_rate"):
                if name in line:  # an evaluation has a line of its own
                    assert other[name] == pytest.approx(line[name], rel=1e-4), name
        # the other ranks have written nothing, and nothing is said
        assert said(tmp_path / f"said{count}").strip() == ""
    assert {each.name for each in tmp_path.iterdir()} == {
        f"{name}{count}" for name in ("run", "said") for count in counts
    }
    if episodes := VARIANTS[variant].get("eval_episodes"):
        evaluations = [state_of(tmp_path / f"run{n}")["trainer"]["evaluation"] for n in (1, 2)]
        assert evaluations[1]["eval/episodes"] == episodes
        assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)


def test_minibatches_of_ranks_learn_what_those_of_one_process_learn(
    forks: Forks, tmp_path: Path
) -> None:
    """Several minibatches are other ones: another order of the same rows, and the same targets. So
    the weights are near each other, not equal.
    """
    settings = PPO | {"minibatches": 4, "total_steps": ITERATION}
    for count in (1, 2):
        run_ranks(
            forks, tmp_path / f"said{count}", count, run_dir=str(tmp_path / str(count)), **settings
        )
    one, two = state_of(tmp_path / "1")["model"], state_of(tmp_path / "2")["model"]
    sizes = [size for _, size in differences(one, two)]
    assert 1e-6 < max(sizes) < 0.02


def test_sac_on_ranks_samples_and_learns_on_each(forks: Forks, tmp_path: Path) -> None:
    """Random actions come first: those of one process. Then each rank samples its own transitions;
    that all have the same weights is checked when the checkpoint is written.
    """
    codes = run_ranks(forks, tmp_path / "said", 2, run_dir=str(tmp_path / "run"), **SAC)
    assert codes == [0, 0], said(tmp_path / "said")
    state = state_of(tmp_path / "run")
    assert int(state["training"]["num_updates"]) > 0
    assert state["trainer"]["obs"].shape[0] == NUM_ENVS
    # before learning starts the run is that of one process, bit for bit
    early = SAC | {"total_steps": 32}
    for count in (1, 2):
        run_ranks(forks, tmp_path / "said", count, run_dir=str(tmp_path / f"early{count}"), **early)
    one, two = (state_of(tmp_path / f"early{count}") for count in (1, 2))
    assert torch.equal(one["trainer"]["obs"], two["trainer"]["obs"])


# ---- graphs ----


AS_ON_A_GPU = ExitStack()


def in_fake_graphs() -> None:
    """This process takes the paths of a GPU, with graphs that record operations on the CPU."""
    AS_ON_A_GPU.enter_context(no_host_syncs())
    made = setup.make_engine
    setup.make_engine = lambda *given: made(*given[:3], FakeGraphs())  # type: ignore[assignment]


GRAPHS: dict[str, dict[str, Any]] = {
    "ppo": PPO | {"minibatches": 2, "normalize_obs": True, "normalize_value": True},
    "ppo kl": PPO | {"schedule": "kl", "normalize_advantage": "minibatch"},
    "sac": SAC | {"prioritized": True},
    "flash_sac": SAC | {"algorithm": "flash_sac"},
}


@pytest.mark.parametrize("level", ["full", "policy"])
@pytest.mark.parametrize("kind", list(GRAPHS))
def test_graphs_hold_what_ranks_exchange(
    kind: str, level: str, forks: Forks, tmp_path: Path
) -> None:
    """A replay exchanges again, bit for bit what the loop exchanges."""
    settings = GRAPHS[kind] | {"total_steps": 8 * ITERATION, "quiet": False}
    before = "tests.run.test_ranks:in_fake_graphs"
    for graph in ("off", level):
        run = settings | {"graph": graph, "run_dir": str(tmp_path / graph)}
        codes = run_ranks(forks, tmp_path / f"said {graph}", 2, before=before, **run)
        assert codes == [0, 0], said(tmp_path / f"said {graph}")
    assert f"CUDA graphs {level}" in said(tmp_path / f"said {level}")
    one, two = (state_of(tmp_path / graph) for graph in ("off", level))
    for part in ("model", "training", "env"):
        for place, size in differences(one[part], two[part], part):
            assert size == 0.0, place
    assert len(logged(tmp_path / level)) > 1


def test_an_exchange_that_no_graph_holds_is_no_missing_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error is that of the capture, and the loop goes on without graphs."""
    store = torch.distributed.HashStore()
    refuse = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(torch.distributed, "all_reduce", refuse)
    for is_capturing, kind in ((True, RuntimeError), (False, RankError)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        answer = Mock(return_value=is_capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)
        with pytest.raises(kind) as raised:
            Ranks(0, 1, store).average(torch.zeros(1))
        assert raised.type is kind


# ---- checkpoints ----


def test_a_run_continues_on_any_number_of_ranks(forks: Forks, tmp_path: Path) -> None:
    """2 -> 1 -> 4 ranks give what one process gives."""
    settings = PPO | {"normalize_obs": True}
    run_ranks(forks, tmp_path / "said", 1, run_dir=str(tmp_path / "whole"), **settings)
    first = settings | {"total_steps": 2 * ITERATION, "run_dir": str(tmp_path / "run")}
    assert run_ranks(forks, tmp_path / "said2", 2, **first) == [0, 0], said(tmp_path / "said2")
    for count, iterations in ((1, 4), (4, 6)):
        place = tmp_path / f"said{count}"
        codes = run_ranks(
            forks, place, count, path=str(tmp_path / "run"), total_steps=iterations * ITERATION
        )
        assert codes == [0] * count, said(place)
    assert_close(tmp_path / "whole", tmp_path / "run")
    # with other environments the episodes begin anew
    changes = {"num_envs": 4, "total_steps": 7 * ITERATION}
    codes = run_ranks(forks, tmp_path / "said5", 2, path=str(tmp_path / "run"), **changes)
    assert codes == [0, 0], said(tmp_path / "said5")
    assert state_of(tmp_path / "run")["trainer"]["obs"].shape[0] == 4


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_replay_buffer_is_saved_of_all_ranks_and_shared_out(
    prioritized: bool, forks: Forks, tmp_path: Path
) -> None:
    """Filled by random actions it is that of one process; learning goes on from it at once."""
    early = SAC | {"save_replay": True, "total_steps": 32, "prioritized": prioritized}
    for count in (1, 2):
        place = tmp_path / f"said{count}"
        codes = run_ranks(forks, place, count, run_dir=str(tmp_path / f"run{count}"), **early)
        assert codes == [0] * count, said(place)
    one, two = (state_of(tmp_path / f"run{count}")["replay"] for count in (1, 2))
    for name in ("obs", "numbers", "flags", "final_obs", "owner", "counts"):
        assert torch.equal(one[name], two[name]), name
    # 2 ranks -> 1 -> 2, 32 steps of all environments in an iteration
    for count, total in ((1, 96), (2, 128)):
        place = tmp_path / f"later{count}"
        codes = run_ranks(forks, place, count, path=str(tmp_path / "run2"), total_steps=total)
        assert codes == [0] * count, said(place)
    state = state_of(tmp_path / "run2")
    # of the iterations that end at 64, 96 and 128 steps
    assert int(state["training"]["num_updates"]) == 3 * SAC["updates"]
    assert int(state["replay"]["counts"][0]) == 128 // NUM_ENVS
    if prioritized:  # transitions that were drawn have others than the new ones
        assert state["replay"]["priority"].shape == (128 // NUM_ENVS, NUM_ENVS)
        assert len(state["replay"]["priority"].unique()) > 5


# ---- failures ----


def test_a_killed_rank_is_named_and_the_run_goes_on(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = PPO | {"run_dir": str(run), "save_every": "1i", "total_steps": 10**6}
    processes = start_ranks(forks, tmp_path / "said", 2, **settings)
    deadline = time.monotonic() + 60
    while latest_checkpoint(run) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(processes[1], signal.SIGKILL)
    codes = [forks.wait(each) for each in processes]
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL)
    text = (tmp_path / "said" / "0").read_text()
    assert "rank 0 of 2: rank 1 does not answer: it has ended or hangs" in text
    # as torchrun starts them again
    saved = state_of(run)["trainer"]["steps"]
    again = settings | {"total_steps": saved + ITERATION}
    of_rank = {rank: {"environment": {"TORCHELASTIC_RESTART_COUNT": "1"}} for rank in (0, 1)}
    codes = run_ranks(forks, tmp_path / "again", 2, of_rank=of_rank, **again)
    assert codes == [0, 0], said(tmp_path / "again")
    assert state_of(run)["trainer"]["steps"] == saved + ITERATION


def test_a_rank_that_hangs_is_named_after_the_timeout(forks: Forks, tmp_path: Path) -> None:
    of_rank = {1: {"stop_after": 2, "stop_signal": int(signal.SIGSTOP)}}
    settings = PPO | {"run_dir": str(tmp_path / "run"), "rank_timeout": 1.0}
    processes = start_ranks(forks, tmp_path / "said", 2, of_rank=of_rank, **settings)
    code = forks.wait(processes[0])
    os.kill(processes[1], signal.SIGKILL)
    forks.wait(processes[1])
    assert code != 0
    assert "rank 1 does not answer: it has ended or hangs" in (tmp_path / "said/0").read_text()


def said_of_failing(forks: Forks, tmp_path: Path, env: str) -> tuple[str, str]:
    """What ranks 0 and 1 say of a run in this file's environment `env`, in which both fail."""
    settings = PPO | {"env": f"tests.run.test_ranks:{env}", "run_dir": str(tmp_path / "run")}
    codes = run_ranks(forks, tmp_path / "said", 2, **settings)
    assert 0 not in codes
    return (tmp_path / "said/0").read_text(), (tmp_path / "said/1").read_text()


def test_an_error_of_a_rank_is_told_to_the_others(forks: Forks, tmp_path: Path) -> None:
    other, broken = said_of_failing(forks, tmp_path, "Breaking")
    assert "rank 1 of 2: environment" in broken
    assert "the third environment breaks" in broken
    assert "rank 0 of 2: rank 1 failed: EnvError" in other


def test_nan_of_an_environment_ends_all_and_names_its_rank(forks: Forks, tmp_path: Path) -> None:
    other, spoiled = said_of_failing(forks, tmp_path, "Spoiling")
    assert "NonFiniteError: rank 1 of 2: " in spoiled
    assert "rank 0 of 2: rank 1 failed: NonFiniteError" in other
    assert list((tmp_path / "run" / "non_finite").iterdir())


def test_an_error_in_one_ranks_part_of_an_evaluation_ends_all(forks: Forks, tmp_path: Path) -> None:
    settings = PPO | {"env": "tests.run.test_ranks:BreakingInEvaluation", "eval_episodes": 4}
    settings |= {"run_dir": str(tmp_path / "run"), "eval_every": ITERATION}
    codes = run_ranks(forks, tmp_path / "said", 2, **settings)
    assert 0 not in codes
    broken = (tmp_path / "said/1").read_text()
    assert "rank 1 of 2: " in broken
    assert "BreakingInEvaluation.step raised ValueError: the third environment breaks" in broken
    assert "rank 0 of 2: rank 1 failed: EnvCrashError" in (tmp_path / "said/0").read_text()


def test_a_signal_to_one_rank_ends_and_saves_all(forks: Forks, tmp_path: Path) -> None:
    of_rank = {1: {"stop_after": 3}}
    settings = PPO | {"run_dir": str(tmp_path / "run"), "total_steps": 10**6}
    codes = run_ranks(forks, tmp_path / "said", 2, of_rank=of_rank, **settings)
    assert codes[0] == 0, said(tmp_path / "said")
    assert state_of(tmp_path / "run")["trainer"]["iteration"] == 3


@pytest.mark.parametrize(
    ("count", "changes", "of_rank", "text"),
    [
        (2, {"num_envs": 7}, {}, "num_envs 7 does not divide into 2 processes: take 6 or 8"),
        (
            2,
            {},
            {1: {"learning_rate": 0.5}},
            "rank 1 has other settings than rank 0: learning_rate 0.5, not 0.001",
        ),
        (2, {"asynchronous": True}, {}, "asynchronous is for one process, this run has 2"),
    ],
    ids=["indivisible", "settings", "asynchronous"],
)
def test_what_does_not_fit_is_refused(
    count: int,
    changes: dict[str, Any],
    of_rank: dict[int, dict[str, Any]],
    text: str,
    forks: Forks,
    tmp_path: Path,
) -> None:
    settings = PPO | {"run_dir": str(tmp_path / "run")} | changes
    codes = run_ranks(forks, tmp_path / "said", count, of_rank=of_rank, **settings)
    assert 0 not in codes
    assert text in said(tmp_path / "said")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_other_source_files_are_refused(forks: Forks, tmp_path: Path) -> None:
    """Each rank has a module of this name, with other content."""
    for rank in (0, 1):
        folder = tmp_path / f"code{rank}"
        folder.mkdir()
        (folder / "their_task.py").write_text(
            f"from gpurl.envs.pendulum import Pendulum\n\n\nclass Task(Pendulum):\n    x = {rank}\n"
        )
    of_rank = {rank: {"python_path": str(tmp_path / f"code{rank}")} for rank in (0, 1)}
    settings = PPO | {"env": "their_task:Task", "run_dir": str(tmp_path / "run")}
    codes = run_ranks(forks, tmp_path / "said", 2, of_rank=of_rank, **settings)
    assert 0 not in codes
    assert "rank 1 has other source files than rank 0: their_task.py" in said(tmp_path / "said")


def test_a_port_in_use_is_named(forks: Forks, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (process, other) = start_ranks(
            forks, tmp_path / "said", 2, port=port, run_dir=str(tmp_path / "run"), **PPO
        )
        code = forks.wait(process)
        os.kill(other, signal.SIGKILL)
        forks.wait(other)
    assert code != 0
    text = (tmp_path / "said/0").read_text()
    assert f"cannot meet at 127.0.0.1:{port}: the port is in use, choose another" in text


# ---- tasks that go wrong ----


class Breaking(Pendulum):
    """The second rank's environments raise an error in their 20th step."""

    steps = 0

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        self.steps += 1
        if self.steps == 20 and self.first_env:
            raise ValueError("the third environment breaks")
        return super().transition(state, action, rng)


class BreakingInEvaluation(Breaking):
    """Only there, where ranks have two environments each."""

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        if self.num_envs == 2:
            return super().transition(state, action, rng)
        return Pendulum.transition(self, state, action, rng)


class LeavingSlowly(Breaking):
    """Its process takes longer to end than that of a rank that only hears of the error."""

    def begin_at(self, first: int) -> None:
        super().begin_at(first)
        if first:
            atexit.register(time.sleep, 1.0)


class Single(Pendulum):
    """Exists once in a process."""

    single_instance = True


class Spoiling(Breaking):
    """Environment 5 of all gives NaN in its 12th step."""

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        self.steps += 1
        state, reward, terminated = Pendulum.transition(self, state, action, rng)
        index = 5 - self.first_env
        if self.steps == 12 and 0 <= index < self.num_envs:
            reward[index] = torch.nan
        return state, reward, terminated
