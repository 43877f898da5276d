"""Tunings from end to end, their trainings in threads: each trial is the run of its settings, the
best becomes a file, what fails costs itself only, and a population is its members.
"""

import json
import os
import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="gpurl tune needs Optuna: pip install -e '.[tune]'")

import gpurl
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.errors import EnvError, GpurlError, NonFiniteError, UsageError
from gpurl.run.config_file import read_config
from gpurl.run.listing import find_runs
from gpurl.run.run_folder import lock_run
from gpurl.tuning import trial as trial_module
from gpurl.tuning import tuner as module
from gpurl.tuning.space import Dimension, with_values
from gpurl.tuning.trial import GO_ON, STOP, Reporter, train
from gpurl.tuning.tuner import Plan, Tuner, tune
from tests.small_runs import ITERATION, assert_same, small_run, state_of
from tests.tuning.near_processes import ThreadProcess
from tests.tuning.small_tunings import RATE, SHORT, WIDE, small_plan, small_settings

# settings that no run takes, that diverge, and good ones
BAD_BATCHES = {"minibatches": Dimension("minibatches", choices=(3,))}


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.run.child.Popen", ThreadProcess)
    # the versions of all packages take longer to read than these runs
    monkeypatch.setattr("gpurl.run.records.versions", dict)


class Log:
    """What a tuning says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        self.lines.append(text)


def run_settings(folder: Path) -> dict[str, Any]:
    return read_config(folder / "config.yaml")


# ---- trials are runs ----


def test_each_trial_is_the_run_of_its_settings(tmp_path: Path) -> None:
    log = Log()
    tuning, number = tune(small_plan(tmp_path), log)
    assert number is None
    rows = sorted(tuning.rows(), key=lambda row: row.number)
    assert [row.state for row in rows] == ["finished"] * 3
    assert [row.run for row in rows] == ["trial_0000", "trial_0001", "trial_0002"]
    assert len({row.params["gamma"] for row in rows}) == 3
    assert "0 of 3 trials have begun" in log.lines[0]
    assert [line.split(":")[0] for line in log.lines[1:]] == ["trial 0", "trial 1", "trial 2"]
    # the objective is the last evaluation, as the run has logged it
    for row in rows:
        folder = tuning.folder / row.run
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        returns = [each["eval/mean_reward"] for each in logged if "eval/mean_reward" in each]
        assert (len(returns), row.value, row.best) == (2, returns[-1], max(returns))
        assert run_settings(folder)["gamma"] == row.params["gamma"]
        assert run_settings(folder)["threads"] == 1
    # a run by itself, with these settings
    values = {"threads": 1, "eval_every": ITERATION, "env_options": SHORT, **rows[1].params}
    alone = small_run(tmp_path / "alone", 2, **values)
    assert_same(state_of(alone.folder), state_of(tuning.folder / "trial_0001"))
    # ordinary runs for everything else
    entries = find_runs(tmp_path)
    assert {each.name for each in entries} == {"alone", *(f"own/{row.run}" for row in rows)}
    assert {each.state for each in entries} == {"finished"}


def test_the_best_settings_are_a_file_that_trains_the_same(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, network={"hidden": [8]})
    tuning, _ = tune(plan, Log())
    best = tuning.rows()[0]
    assert best.value == max(row.value for row in tuning.rows() if row.value is not None)
    text = (tuning.folder / "best.yaml").read_text()
    assert text.startswith(f"# trial {best.number}: return {best.value}, the last evaluation\n")
    values = read_config(tuning.folder / "best.yaml")
    again = gpurl.train(**values | {"run_dir": str(tmp_path / "again")})  # type: ignore[arg-type]
    assert_same(state_of(again.folder), state_of(tuning.folder / best.run))
    assert again.outcome.evaluation["eval/mean_reward"] == best.value


def test_more_trials_continue_the_tuning(tmp_path: Path) -> None:
    whole, _ = tune(small_plan(tmp_path / "whole", 3), Log())
    plan = small_plan(tmp_path / "parts", 2)
    tune(plan, Log())
    tune(plan, Log())  # nothing to do
    parts, _ = tune(replace(plan, trials=3), Log())

    def of(tuning: Any) -> list[Any]:
        return [(row.number, row.value, row.params) for row in tuning.rows()]

    assert of(parts) == of(whole)


def test_several_at_a_time(tmp_path: Path) -> None:
    tuning, _ = tune(small_plan(tmp_path, 4, jobs=3), Log())
    assert sorted(row.number for row in tuning.rows()) == [0, 1, 2, 3]
    assert {row.state for row in tuning.rows()} == {"finished"}


def test_a_population_is_trials_side_by_side(tmp_path: Path) -> None:
    """Four members at once, then what is left of six trials; each is the run of its settings."""
    plan = small_plan(tmp_path, 6, population=4)
    tuning, _ = tune(plan, Log())
    rows = sorted(tuning.rows(), key=lambda row: row.number)
    assert [row.run for row in rows] == ["trials_0000_0003"] * 4 + ["trials_0004_0005"] * 2
    assert [row.member for row in rows] == [0, 1, 2, 3, 0, 1]
    saved = run_settings(tuning.folder / "trials_0000_0003")
    assert saved["population"] == 4
    assert saved["member"]["gamma"] == [row.params["gamma"] for row in rows[:4]]
    # member k has the seed of its place
    values = rows[2].params | {"threads": 1, "eval_every": ITERATION, "seed": 2}
    values["env_options"] = SHORT
    alone = small_run(tmp_path / "alone", 2, **values)
    assert alone.outcome.evaluation["eval/mean_reward"] == rows[2].value
    assert read_config(tuning.folder / "best.yaml")["population"] == 1
    best = next(row for row in tuning.rows() if row.state == "finished")
    assert read_config(tuning.folder / "best.yaml")["seed"] == (best.member or 0)
    assert not read_config(tuning.folder / "best.yaml")["member"]


# ---- trials that fail ----


def test_settings_that_exclude_each_other_cost_one_trial(tmp_path: Path) -> None:
    space = {"minibatches": Dimension("minibatches", choices=(2, 3))}
    log = Log()
    tuning, _ = tune(small_plan(tmp_path, 4, space, sampler="random"), log)
    for row in tuning.rows():
        is_bad = row.params["minibatches"] == 3
        assert row.state == ("pruned" if is_bad else "finished")
        assert ("into minibatches = 3" in row.reason) == is_bad
    assert {row.state for row in tuning.rows()} == {"pruned", "finished"}
    assert any("failed: PPO splits" in line for line in log.lines)


def test_a_training_that_diverges_costs_itself_and_warns_the_sampler(tmp_path: Path) -> None:
    space = {"learning_rate": Dimension("learning_rate", choices=(1e-3, 1e38))}
    plan = small_plan(tmp_path, 4, space, schedule="constant", max_grad_norm=None, sampler="random")
    tuning, _ = tune(plan, Log())
    states = {row.params["learning_rate"]: row.state for row in tuning.rows()}
    assert states == {1e-3: "finished", 1e38: "pruned"}
    assert "not finite" in next(row.reason for row in tuning.rows() if row.state == "pruned")


def test_if_all_fail_it_says_why_and_ends(tmp_path: Path) -> None:
    with pytest.raises(
        GpurlError, match=r"none of 2 trials had a return, .*minibatches = 3"
    ) as one:
        tune(small_plan(tmp_path, 2, BAD_BATCHES), Log())
    assert one.value.exit_code == UsageError.exit_code
    assert "\n" not in str(one.value)
    with pytest.raises(GpurlError, match="none of 5 trials"):
        tune(small_plan(tmp_path, 99, BAD_BATCHES, "other.journal"), Log())


def test_an_environment_that_fails_gives_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise EnvError("step 3 of my_env: no such joint\nand more")

    monkeypatch.setattr(trial_module, "run", broken)
    with pytest.raises(GpurlError, match="no such joint; their output is in") as caught:
        tune(small_plan(tmp_path, 3), Log())
    assert caught.value.exit_code == EnvError.exit_code


def test_a_process_that_dies_fails_its_trial_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(ThreadProcess):
        count = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            type(self).count += 1
            self.dies = type(self).count == 2
            super().__init__(*arguments, **options)

        def _train(self, answers: Any, reports: Any) -> None:
            if not self.dies:
                return super()._train(answers, reports)
            self._code = -9
            with answers, reports:
                reports.write("no JSON\n")

    monkeypatch.setattr("gpurl.run.child.Popen", Dying)
    tuning, _ = tune(small_plan(tmp_path, 3), Log())
    states = {row.number: (row.state, row.reason) for row in tuning.rows()}
    killed = ("failed", "its process was ended by signal 9 (SIGKILL)")
    assert states == {0: ("finished", ""), 1: killed, 2: ("finished", "")}


def test_a_lost_member_is_no_return(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 2, population=2)
    begun = module.begin_or_continue(plan.storage, plan.settings, WIDE, True, 2)
    tuner = Tuner(plan, begun, Log())
    trials = [begun.ask(WIDE, "tpe", 0) for _ in range(2)]

    class Ended:
        outcome = {"returns": [None, -5.0]}
        is_pruned = False

    ended: Any = Ended()
    ended.trials = trials
    tuner._conclude(ended, 0, is_stopping=False)
    rows = {row.number: row for row in begun.rows()}
    assert (rows[0].state, rows[0].reason) == ("pruned", module.NO_RETURN)
    assert (rows[1].state, rows[1].value) == ("finished", -5.0)


@pytest.mark.parametrize("population", [1, 2])
def test_the_return_of_an_earlier_evaluation_is_none(
    population: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where episodes no longer end there are no more evaluations."""
    monkeypatch.setattr("gpurl.run.evaluator.MAX_STEPS", 64)
    changes = {"env": "tests.tiny_envs:Lingering", "env_options": {}, "population": population}
    outcome, reports = listening(tmp_path, [GO_ON], iterations=2, **changes)
    assert [each["steps"] for each in reports] == [ITERATION]
    assert None not in reports[0]["returns"]
    assert outcome == {"returns": [None] * population}


def test_nan_is_no_return(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 2)
    begun = module.begin_or_continue(plan.storage, plan.settings, WIDE, True, 2)
    tuner = Tuner(plan, begun, Log())
    tuner._end(begun.ask(WIDE, "tpe", 0), float("nan"), "")
    (row,) = begun.rows()
    assert (row.state, row.reason) == ("pruned", "its return is nan")


# ---- what a trial's process hears ----


def listening(folder: Path, answers: list[str], **changes: Any) -> tuple[dict[str, Any], list[Any]]:
    """(what a trial that hears these answers ends with, what it has reported); after the last
    answer nobody is there.
    """
    settings = small_settings(folder, **({"iterations": 3} | changes)).to_dict()
    job = {"settings": settings, "run_dir": str(folder / "run"), "command": ["gpurl", "tune"]}
    read, write = os.pipe()
    os.write(write, "".join(f"{each}\n" for each in answers).encode())
    os.close(write)
    out_read, out_write = os.pipe()
    with os.fdopen(read) as own, os.fdopen(out_write, "w") as reports, os.fdopen(out_read) as said:
        with pytest.MonkeyPatch.context() as patch:
            # all answers are there at once: a reporter that looks would take them for the end
            if answers:
                patch.setattr(Reporter, "after_iteration", lambda *_: None)
            outcome = train(job, own, reports)
        reports.close()
        return outcome, [json.loads(line) for line in said]


def test_a_trial_reports_each_evaluation_and_asks_before_the_last(tmp_path: Path) -> None:
    outcome, reports = listening(tmp_path, [GO_ON, GO_ON])
    assert [each["steps"] for each in reports] == [ITERATION, 2 * ITERATION, 3 * ITERATION]
    assert [each["asks"] for each in reports] == [True, True, False]
    assert outcome == {"returns": reports[-1]["returns"]}


def test_a_trial_that_is_told_to_stop_is_a_run_that_was_pruned(tmp_path: Path) -> None:
    outcome, reports = listening(tmp_path, [GO_ON, STOP])
    assert len(reports) == 2
    assert outcome == {"returns": reports[-1]["returns"]}
    (entry,) = find_runs(tmp_path)
    assert (entry.reason, entry.steps) == ("pruned", 2 * ITERATION)


@pytest.mark.parametrize("answers", [[], [GO_ON]])
def test_a_trial_whose_tuning_is_gone_saves_and_goes_on_later(
    answers: list[str], tmp_path: Path
) -> None:
    outcome, reports = listening(tmp_path, answers)
    assert outcome == {"stopped": True}
    # without any answer it looks after its first iteration, else it asks in vain
    assert len(reports) == 2 * len(answers)
    saved = load_checkpoint(tmp_path / "run")[1]["step"]
    assert saved == max(len(reports), 1) * ITERATION
    # the next process continues it, and ends as one that was not interrupted
    outcome, _ = listening(tmp_path, [GO_ON, GO_ON])
    whole, _ = listening(tmp_path / "whole", [GO_ON, GO_ON])
    assert outcome == whole
    assert_same(state_of(tmp_path / "run"), state_of(tmp_path / "whole" / "run"))
    # and one that has ended says what it had
    assert listening(tmp_path, [])[0] == whole


def test_an_error_is_what_the_trial_ends_with(tmp_path: Path) -> None:
    outcome, _ = listening(tmp_path, [], learning_rate=1e38, max_grad_norm=None)
    assert outcome["code"] == NonFiniteError.exit_code
    assert "not finite" in outcome["error"]


# ---- pruning ----


class Recorder:
    """A training that only hears."""

    def __init__(self, trials: list[Any]) -> None:
        self.trials = trials
        self.outcome: dict[str, Any] = {}
        self.is_pruned = False
        self.heard: list[str] = []
        self.child = self

    def send(self, text: str) -> None:
        self.heard.append(text)


def test_bad_trials_are_told_to_stop_and_a_population_if_all_are_bad(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 30, iterations=10)
    begun = module.begin_or_continue(plan.storage, plan.settings, WIDE, True, 10)
    tuner = Tuner(plan, begun, Log())
    for level in range(5):
        trial = begun.ask(WIDE, "random", 0)
        for step in range(1, 11):
            trial.report(float(level), step)
        begun.finish(trial, float(level))

    def heard(returns: list[float], steps: int, asks: bool = True) -> tuple[list[str], bool]:
        training: Any = Recorder([begun.ask(WIDE, "random", 0) for _ in returns])
        # a few more steps than the evaluation was due at
        tuner._report(training, {"steps": steps, "returns": returns, "asks": asks})
        return training.heard, training.is_pruned

    assert heard([3.0], 4 * ITERATION + 5) == ([GO_ON], False)
    assert heard([1.0], 4 * ITERATION + 5) == ([STOP], True)
    assert heard([1.0], 2 * ITERATION + 5) == ([GO_ON], False)  # it has just begun
    assert heard([1.0, 3.0], 4 * ITERATION) == ([GO_ON], False)
    assert heard([1.0, 0.0], 4 * ITERATION) == ([STOP], True)
    assert heard([1.0], 10 * ITERATION, asks=False) == ([], False)


# ---- places and plans ----


def test_two_tunings_at_once_are_told(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    (tmp_path / "own").mkdir()
    message = "own is in use by process .*start another tuning"
    with lock_run(tmp_path / "own", "tuning"), pytest.raises(UsageError, match=message):
        tune(plan, Log())
    assert not plan.storage.exists()


def test_wrong_plans(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)

    def refusal(changed: Plan) -> str:
        with pytest.raises(UsageError) as caught:
            tune(changed, Log())
        return str(caught.value)

    def having(**changes: Any) -> Plan:
        return replace(plan, settings=small_settings(tmp_path, **changes))

    assert refusal(replace(plan, trials=0)) == "--trials must be at least 1, got 0"
    assert refusal(replace(plan, jobs=0)) == "--jobs must be at least 1, got 0"
    assert "nothing of ppo is in the default space" in refusal(replace(plan, space={}))
    assert "eval_episodes is 0" in refusal(having(eval_episodes=0))
    assert "leave out run_dir x" in refusal(having(run_dir="x"))
    assert "leave out pbt" in refusal(having(population=2, pbt=True, total_steps=100_000))
    member = {"gamma": [0.9, 0.8]}
    assert "leave out member.gamma" in refusal(having(population=2, member=member))
    (tmp_path / "file").write_text("")
    no_folder = replace(plan, storage=tmp_path / "file" / "own.journal")
    assert "choose another --storage" in refusal(no_folder)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_storage_that_cannot_be_written_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Tuning, "finish", full)
    with pytest.raises(GpurlError, match=r"own\.journal cannot be written: .*No space left"):
        tune(small_plan(tmp_path), Log())


def test_values_of_a_storage_outside_the_space_train_nothing(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 1, RATE)
    begun = module.begin_or_continue(plan.storage, plan.settings, RATE, True, 2)
    begun.study.ask({"learning_rate": Dimension("learning_rate", 1.0, 2.0).distribution()})
    with pytest.raises(GpurlError, match="is not in learning_rate"):
        tune(plan, Log())
    assert not find_runs(tmp_path)


def test_trials_of_a_population_that_was_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 3, population=2)
    begun = module.begin_or_continue(plan.storage, plan.settings, WIDE, True, 2)
    trials = [begun.ask(WIDE, "tpe", 0) for _ in range(3)]
    trials[0].set_user_attr("run", "../../elsewhere")
    trials[1].set_user_attr("run", "trials_0001_0002")
    tuner = Tuner(plan, begun, Log())
    names = [(run, [each.number for each in group]) for group, run in tuner.waiting]
    assert names == [("trial_0000", [0]), ("trial_0001", [1]), ("trial_0002", [2])]
    assert isinstance(tuner.messages, queue.Queue)


def test_settings_of_the_task_reach_the_trials(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, 1, env_options={"max_episode_steps": 7})
    tuning, _ = tune(plan, Log())
    assert run_settings(tuning.folder / "trial_0000")["env_options"] == {"max_episode_steps": 7}
    (row,) = tuning.rows()
    assert with_values(plan.settings, row.params).env_options == {"max_episode_steps": 7}
