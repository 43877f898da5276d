"""The suite of learning runs: its cases are valid, its rows survive parallel writers, a stopped
training goes on, a failed one stops no other.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.learning import __main__ as learning
from benchmarks.learning import one_run, results, schedule
from benchmarks.learning.__main__ import main, missing, overview
from benchmarks.learning.case import Case
from benchmarks.learning.gpu_cases import GPU_CASES
from benchmarks.learning.peer_cases import PEER_CASES
from benchmarks.learning.results import Point
from benchmarks.learning.rsl_rl_cases import MJLAB_CASES, RSL_RL_CASES
from benchmarks.learning.schedule import Job, Places, Stop, in_order, run_all
from benchmarks.learning.suite import CASES, GROUPS, case_named, select
from benchmarks.results_table import ROOT
from gpurl.algorithms import algorithm_names
from gpurl.errors import CheckpointError, UsageError
from gpurl.run.settings import make_settings

TINY = Case(
    "tiny", "test", "ppo", "cart_pole", 2000, settings={"num_envs": 8, "horizon": 25, "epochs": 1}
)


# ---- cases ----


def test_every_case_has_a_name_of_its_own_and_settings_that_gpurl_takes() -> None:
    pytest.importorskip("mujoco")
    assert len(CASES) == sum(len(cases) for cases in GROUPS.values())
    for case in CASES.values():
        if case.trainer == "gpurl" and case.algorithm in algorithm_names():
            settings = make_settings(
                case.algorithm, case.env, total_steps=case.steps, **case.settings
            )
            assert settings.train.total_steps == case.steps
        assert not case.better_than or case.better_than in CASES


# gpurl's name of a setting, that of stable-baselines3
PEER_NAMES = {
    "num_envs": "num_envs",
    "normalize_obs": "normalize_obs",
    "horizon": "n_steps",
    "epochs": "n_epochs",
    "batch_size": "batch_size",
    "replay_size": "buffer_size",
    "updates": "gradient_steps",
    "learning_starts": "learning_starts",
    "learning_rate": "learning_rate",
    "gamma": "gamma",
    "gae_lambda": "gae_lambda",
    "clip_range": "clip_range",
    "value_coef": "vf_coef",
    "entropy_coef": "ent_coef",
    "max_grad_norm": "max_grad_norm",
    "tau": "tau",
    "target_interval": "target_update_interval",
    "epsilon_fraction": "exploration_fraction",
    "epsilon_end": "exploration_final_eps",
}


RSL_RL_NAMES = {
    "epochs": "num_learning_epochs",
    "minibatches": "num_mini_batches",
    "learning_rate": "learning_rate",
    "gamma": "gamma",
    "gae_lambda": "lam",
    "clip_range": "clip_param",
    "value_coef": "value_loss_coef",
    "entropy_coef": "entropy_coef",
    "max_grad_norm": "max_grad_norm",
}


def test_pairs_of_peers_have_the_same_hyper_parameters() -> None:
    """Every value of one side stands on the other side, under its name there."""
    for own, other in zip(PEER_CASES[::2], PEER_CASES[1::2]):
        assert (own.algorithm, own.env, own.steps, own.seeds) == (
            other.algorithm,
            other.env,
            other.steps,
            other.seeds,
        )
        assert own.name.removeprefix("gym-") == other.name.removeprefix("sb3-")
        mine, theirs = dict(own.settings), dict(other.settings)
        # what the two libraries count differently
        if own.algorithm == "ppo":
            rows = mine["num_envs"] * mine["horizon"]
            assert rows // mine.pop("minibatches") == theirs.pop("batch_size")
            assert math.log(mine.pop("initial_std")) == theirs["policy_kwargs"].get("log_std_init")
            # stable-baselines3 always does
            assert mine.pop("normalize_advantage") == "minibatch"
            assert mine.pop("normalize_value") is False
            assert mine.pop("schedule") == "constant"
        else:
            assert mine.pop("horizon") == theirs.pop("train_freq")
        hidden = {tuple(mine.pop(name)["hidden"]) for name in [*mine] if "network" in name}
        assert hidden == {tuple(theirs.pop("policy_kwargs")["net_arch"])}
        if own.algorithm == "sac":
            assert theirs.pop("ent_coef") == f"auto_{mine.pop('initial_temperature')}"
        if own.algorithm == "dqn":
            # stable-baselines3 has the original one, by default with these
            assert mine.pop("double") is False
            assert (mine.pop("schedule"), mine.pop("n_step")) == ("constant", 1)
        assert {PEER_NAMES[name]: value for name, value in mine.items()} == theirs


def test_pairs_with_rsl_rl_have_the_same_hyper_parameters() -> None:
    """Every value of one side stands on the other side, under its name there."""
    cases = [*RSL_RL_CASES, *MJLAB_CASES]
    for own, other in zip(cases[::2], cases[1::2]):
        assert (own.env, own.steps, own.seeds) == (other.env, other.steps, other.seeds)
        assert (own.trainer, other.trainer) == ("gpurl", "rsl_rl")
        mine, theirs = dict(own.settings), dict(other.settings)
        assert mine.pop("num_envs") == theirs["num_envs"]
        assert mine.pop("horizon") == theirs["num_steps_per_env"]
        # the networks
        network = mine.pop("network")
        normalizes = mine.pop("normalize_obs")
        for part in ("actor", "critic"):
            assert theirs[part]["hidden_dims"] == network["hidden"]
            assert theirs[part]["activation"] == network["activation"]
            assert theirs[part]["obs_normalization"] is normalizes
        distribution = theirs["actor"]["distribution_cfg"]
        assert mine.pop("std_type") == distribution["std_type"]
        assert mine.pop("initial_std") == distribution["init_std"]
        # the algorithm
        algorithm = dict(theirs["algorithm"])
        assert algorithm.pop("class_name") == "PPO"
        clips = algorithm.pop("use_clipped_value_loss")
        assert mine.pop("clip_range_value") == (algorithm["clip_param"] if clips else None)
        schedules = (mine.pop("schedule"), algorithm.pop("schedule"))
        assert schedules in {("constant", "fixed"), ("kl_minibatch", "adaptive")}
        assert mine.pop("target_kl", None) == algorithm.pop("desired_kl")
        assert mine.pop("normalize_advantage") == "batch"  # rsl_rl's default
        assert mine.pop("normalize_value") is False  # rsl_rl never does
        assert {RSL_RL_NAMES[name]: value for name, value in mine.items()} == algorithm


def test_goals_of_a_gpu_are_mjlabs_trainings() -> None:
    by_task = {case.task: case for case in GPU_CASES}
    assert len(by_task) == 11
    # in millions, as mjlab's table has them; Humanoid's stages differ in their sizes
    assert round(by_task["ant"].steps / 1e6, 3) == 147.554
    assert round(by_task["pusher"].steps / 1e6, 3) == 209.715
    assert round(by_task["swimmer"].steps / 1e6, 3) == 144.703
    assert by_task["humanoid"].steps == 627_900_000
    settings = json.loads(by_task["swimmer"].resolved_settings())
    assert (settings["horizon"], settings["device"], settings["target_kl"]) == (128, "cuda", 0.01)
    assert (settings["gamma"], settings["learning_rate"]) == (0.9999, 6e-4)
    hopper = json.loads(by_task["hopper"].resolved_settings())
    assert hopper["network"]["hidden"] == [256, 256]
    assert hopper["initial_std"] == pytest.approx(0.1353, abs=1e-4)
    assert by_task["swimmer"].device == "cuda"
    assert CASES["ppo-swimmer"].device == "cpu"


def test_patterns_choose_cases_and_groups() -> None:
    names = [case.name for case in select("short", ["sac-hop*", "chasing"])]
    assert names[0] == "sac-hopper"
    assert names[1:] == [case.name for case in GROUPS["chasing"]]
    # what needs a GPU or another Python is run by its name
    apart = [*GROUPS["mjlab"], *GROUPS["gpu"]]
    assert select("full") == [case for case in CASES.values() if case not in apart]
    assert select("full", ["mjlab", "gpu"]) == apart
    assert {case.group for case in select("short")} == {"classic", "discrete"}
    with pytest.raises(UsageError, match=r"no case and no group fits 'sac-hoper'.*sac-hopper"):
        select("full", ["sac-hoper"])
    with pytest.raises(UsageError, match="no case is called 'x'"):
        case_named("x")


def test_the_short_suite_takes_the_time_that_the_pages_say() -> None:
    minutes = 0.0  # of one core
    for case in select("short"):
        if found := results.read(case):
            training = statistics.median(each.end.seconds for each in found) / 60 * case.threads
            assert training <= 10, case.name
            minutes += training * case.seeds
    for page, pattern in (
        ("README.md", r"`make learn` .*? (\d+) minutes on two cores"),
        ("benchmarks/README.md", r"\| (\d+) minutes; days \|"),
        ("docs/features.md", r"`make learn` .*? (\d+) minutes on two cores"),
    ):
        said = re.search(pattern, (ROOT / page).read_text(), re.DOTALL)
        assert said is not None, page
        # starts and last evaluations take time besides
        assert minutes / 2 <= int(said[1]) <= 1.5 * minutes / 2, page


def test_a_case_scales_its_steps_and_its_time() -> None:
    case = Case("x", "test", "ppo", "pendulum", 1000, settings={"max_seconds": 60.0})
    scaled = case.scaled(0.1)
    assert (scaled.steps, scaled.settings["max_seconds"]) == (100, 6.0)
    assert case.settings["max_seconds"] == 60.0


def test_settings_have_the_preset_below_those_of_the_case() -> None:
    case = Case("x", "test", "sac", "pendulum", 1000, settings={"tau": 0.5})
    settings = json.loads(case.resolved_settings())
    assert settings["tau"] == 0.5
    assert settings["total_steps"] == 1000
    assert settings["actor_network"] == {"hidden": [128, 128]}  # of the preset


# ---- rows ----


def write(case: Case, seed: int, value: float, folder: Path) -> None:
    columns = {"settings": case.resolved_settings(), "commit": "abc"}
    curve = [Point(100, 1.0, value - 1)]
    results.add(case, seed, curve, Point(200, 2.5, value), columns, folder)


def test_rows_come_back_by_seed_and_replace_those_of_their_seed(tmp_path: Path) -> None:
    for seed, value in ((1, 5.0), (0, 3.0), (1, 7.0)):
        write(TINY, seed, value, tmp_path)
    found = results.read(TINY, tmp_path)
    assert [each.seed for each in found] == [0, 1]
    assert [each.end for each in found] == [Point(200, 2.5, 3.0), Point(200, 2.5, 7.0)]
    assert found[1].curve == (Point(100, 1.0, 6.0),)
    assert found[1].last["commit"] == "abc"
    assert results.read(TINY.scaled(0.5), tmp_path) == found  # stale, but there


def test_parallel_writers_lose_no_row(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: write(TINY, seed, float(seed), tmp_path), range(16)))
    assert [each.end.mean_return for each in results.read(TINY, tmp_path)] == list(range(16))
    assert not list(tmp_path.glob("*.new"))


def test_other_settings_make_a_result_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TINY, 0, 3.0, tmp_path)
    assert results.finished(TINY, tmp_path) == {0}
    assert missing([TINY], 2, tmp_path) == {"tiny": [1]}
    assert not capsys.readouterr().out
    changed = TINY.scaled(0.5)
    assert missing([changed], 2, tmp_path) == {"tiny": [0, 1]}
    wanted = f"again: total_steps {TINY.steps} then, {changed.steps} now\n"
    assert f"tiny seed 0 had other settings and runs {wanted}" in capsys.readouterr().out
    assert overview([TINY], 2, tmp_path).splitlines()[1].split()[-2:] == ["2", "1"]
    # seeds, finished, stale
    assert overview([changed], 2, tmp_path).splitlines()[1].split()[-3:] == ["2", "0", "0"]
    write(TINY, 1, 3.0, tmp_path)
    assert overview([changed], 3, tmp_path).splitlines()[1].split()[-3:] == ["3", "0", "0,1"]


# ---- one training ----


def test_a_training_gives_a_curve_and_an_end(tmp_path: Path) -> None:
    curve, end = one_run.train_seed(TINY, 0, tmp_path)
    assert end.steps == TINY.steps
    assert [point.steps for point in curve] == list(range(200, 2001, 200))  # one an iteration
    assert all(later.seconds >= sooner.seconds for sooner, later in itertools.pairwise(curve))
    assert end.seconds >= curve[-1].seconds
    assert 1 <= end.mean_return <= 500  # CartPole's returns


def test_a_stopped_training_goes_on_with_its_time_limit(tmp_path: Path) -> None:
    limited = Case(
        "x", "test", "ppo", "cart_pole", 10**9, settings=TINY.settings | {"max_seconds": 0.5}
    )
    _, first = one_run.train_seed(limited, 0, tmp_path)
    assert first.seconds >= 0.5
    _, again = one_run.train_seed(limited, 0, tmp_path)  # nothing is left of its time
    assert first.steps < again.steps <= first.steps + 400
    changed = Case("x", "test", "ppo", "cart_pole", 200, settings=TINY.settings)
    _, other = one_run.train_seed(changed, 0, tmp_path)  # of a changed case nothing is kept
    assert other.steps == 200


def test_all_commits_of_a_training_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one may go on with other code."""
    folder = tmp_path / "seed_0"
    for name in ("aaa", "aaa", "bbb"):
        monkeypatch.setattr(one_run, "commit", lambda name=name: name)
        one_run.note_commit(folder)
        folder.mkdir(exist_ok=True)
    assert folder.with_suffix(".commits").read_text() == "aaa bbb"
    folder.rmdir()  # begun anew
    one_run.note_commit(folder)
    assert folder.with_suffix(".commits").read_text() == "bbb"


def test_a_policy_that_was_not_saved_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(folder=tmp_path, outcome=SimpleNamespace(unsaved="the disk is full"))
    monkeypatch.setattr(one_run, "_run", lambda *_: run)
    with pytest.raises(CheckpointError, match="in no checkpoint: the disk is full"):
        one_run.train_seed(TINY, 0, tmp_path)


def test_a_scaled_suite_does_not_replace_published_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning", "--scale", "0.01"])
    assert main() == 2
    assert "--scale needs an --out of its own" in capsys.readouterr().err


def test_a_command_says_what_there_is_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "select", lambda *_: [TINY])
    monkeypatch.setattr(learning, "run_all", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["learning", "--seeds", "1", "--out", str(tmp_path)])
    page = "python -m benchmarks.learning.report makes docs/results.md from these CSV files\n"
    assert main() == 0
    assert capsys.readouterr().out == "1 trainings of 1 cases\n"
    # the page is made from the published results only
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert main() == 0
    assert capsys.readouterr().out == f"1 trainings of 1 cases\n{page}"
    write(TINY, 0, 3.0, tmp_path)
    assert main() == 0
    assert capsys.readouterr().out == (
        f"nothing to do: all seeds asked for are in {os.path.relpath(tmp_path)} already; "
        f"--out FOLDER repeats them elsewhere\n{page}"
    )


def test_a_curve_has_the_finite_evaluations_only(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "time": 1.0, "rollout/ep_rew_mean": 3.0},
        {"step": 10, "time": 1.5, "eval/mean_reward": 4.0},
        {"step": 20, "time": 2.0, "eval/mean_reward": None},
        {"step": 30, "time": 3.0, "train/loss": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert one_run.read_curve(tmp_path) == ([Point(10, 1.5, 4.0)], 3.0)


# ---- many trainings ----


class StopWhen(Stop):
    """Wants a stop once `path` has `lines` lines."""

    def __init__(self, path: Path, lines: int) -> None:
        super().__init__(None)
        self.path = path
        self.lines = lines

    @property
    def is_wanted(self) -> bool:
        text = self.path.read_text() if self.path.exists() else ""
        return text.count("\n") >= self.lines


def places(tmp_path: Path, scale: float = 1.0) -> Places:
    python = Path(sys.executable)
    return Places(tmp_path / "out", tmp_path / "work", python, python, scale)


def test_a_stop_saves_a_training_and_the_next_command_continues_it(tmp_path: Path) -> None:
    where = places(tmp_path, 0.3)
    case = case_named("sac-pendulum").scaled(where.scale)
    metrics = where.work / case.name / "seed_0" / "metrics.jsonl"
    told: list[str] = []
    failed = run_all([Job(case, 0), Job(case, 1)], where, 1, StopWhen(metrics, 5), told.append)
    assert not failed
    assert told[1:] == [
        "stopping: the same command continues later",
        f"{case.name} seed 0: stopped",
    ]
    assert not results.read(case, where.out)
    before = one_run.read_curve(metrics.parent)[0]
    assert 0 < before[-1].steps < case.steps
    # the second command
    failed = run_all([Job(case, 0)], where, 1, Stop(None), told.append)
    assert not failed
    assert "return" in told[-1]
    (seed,) = results.read(case, where.out)
    assert seed.end.steps >= case.steps
    assert [point.steps for point in seed.curve[: len(before)]] == [each.steps for each in before]
    assert [seed.last["threads"], seed.last["device"]] == ["1", "cpu"]
    assert not metrics.parent.exists()


def fake_training(folder: Path, text: str) -> Path:
    """A program that stands for Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_failed_training_is_named_and_stops_no_other(tmp_path: Path) -> None:
    python = fake_training(tmp_path, 'echo "$4"; if [ "$4" = 1 ]; then exit 3; fi')
    where = Places(tmp_path, tmp_path / "work", python, tmp_path / "none")
    told: list[str] = []
    jobs = [Job(TINY, seed) for seed in range(3)]
    failed = run_all(jobs, where, 2, Stop(None), told.append)
    assert failed == [jobs[1]]
    logs = os.path.relpath(where.log_of(jobs[0]).parent)
    assert sorted(told) == [
        "tiny seed 0: 0",
        f"tiny seed 0: begins, its output is in {logs}/seed_0.log",
        f"tiny seed 1: begins, its output is in {logs}/seed_1.log",
        "tiny seed 1: failed with code 3:\n1",
        "tiny seed 2: 2",
        f"tiny seed 2: begins, its output is in {logs}/seed_2.log",
    ]


def test_a_training_has_a_core_for_each_of_its_threads(tmp_path: Path) -> None:
    """One of three threads does not wait for ever."""
    log = tmp_path / "log"
    # those of one thread wait for each other
    python = fake_training(
        tmp_path,
        f"""echo begin $4 >> {log}
        for tenth in $(seq 300); do
            if [ $OMP_NUM_THREADS != 1 ] || [ $(wc -l < {log}) -ge 2 ]; then break; fi
            sleep 0.1
        done
        sleep 0.3
        echo end $4 >> {log}""",
    )
    where = Places(tmp_path, tmp_path / "work", python, tmp_path / "none")
    two, three = (dataclasses.replace(TINY, threads=count) for count in (2, 3))
    jobs = [Job(case, seed) for seed, case in enumerate((TINY, TINY, two, three))]
    assert not run_all(jobs, where, 2, Stop(None), lambda text: None)
    lines = log.read_text().splitlines()
    assert [sorted(lines[:2]), sorted(lines[2:4])] == [["begin 0", "begin 1"], ["end 0", "end 1"]]
    assert lines[4:] == ["begin 2", "end 2", "begin 3", "end 3"]


def test_a_training_is_told_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def train(*names: str, **settings: object) -> None:
        given.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(one_run, "train", train)
    with pytest.raises(KeyboardInterrupt):
        one_run.train_seed(dataclasses.replace(TINY, threads=2), 0, tmp_path)
    assert (given["threads"], given["total_steps"]) == (2, TINY.steps)


def test_a_stop_waits_for_what_cannot_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schedule.MODULES, "sb3", "-")
    mark = tmp_path / "mark"
    python = fake_training(tmp_path, f"echo begun > {mark}; sleep 1; echo done")
    where = Places(tmp_path, tmp_path / "work", tmp_path / "none", python)
    case = Case("peer", "test", "ppo", "pendulum", 1, trainer="sb3")
    told: list[str] = []
    assert not run_all([Job(case, 0), Job(case, 1)], where, 1, StopWhen(mark, 1), told.append)
    assert "waiting for peer seed 0, which cannot be resumed" in told[1]
    assert told[2:] == ["peer seed 0: done"]


def test_the_first_seed_of_every_case_comes_first() -> None:
    def seeds(case: Case) -> Iterable[int]:
        return range(case.seeds)

    jobs = in_order([TINY, CASES["redq-hopper"]], lambda case: list(seeds(case)))
    assert [(job.case.name, job.seed) for job in jobs] == [
        ("tiny", 0),
        ("redq-hopper", 0),
        ("tiny", 1),
        ("redq-hopper", 1),
        ("tiny", 2),
    ]


def test_a_time_limit_begins_no_training(tmp_path: Path) -> None:
    told: list[str] = []
    assert not run_all([Job(TINY, 0)], places(tmp_path), 1, Stop(0.0), told.append)
    assert not told
    assert not (tmp_path / "work").exists()
