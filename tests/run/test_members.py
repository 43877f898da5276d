"""Runs of a population: its members' settings, evaluations, checkpoints and policies."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import gpurl
from gpurl.algorithms.ppo import PPOConfig
from gpurl.algorithms.sac import SACConfig
from gpurl.api import evaluate_run
from gpurl.checkpoints.folders import list_checkpoints, load_checkpoint
from gpurl.cli.config_template import config_template
from gpurl.cli.main import main
from gpurl.cli.settings import parse_train
from gpurl.errors import CheckpointError, UsageError
from gpurl.export.run import export_run
from gpurl.run.best_members import BestMembers, best_weights
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.config_file import read_config
from gpurl.run.evaluator import of_population
from gpurl.run.load import load_algorithm, load_members
from gpurl.run.members import choose_member, member_configs, member_settings, member_values
from gpurl.run.settings import make_settings
from tests.small_runs import ITERATION, assert_same, exit_code, small_run, state_of

SETTINGS: dict[str, Any] = {"population": 3, "threads": 1, "seed": 5}


class Threads(Callback):
    """Notes the threads of torch, and those that have stepped MuJoCo's worlds."""

    def after_iteration(self, run: RunView, metrics: object) -> None:
        self.of_torch = torch.get_num_threads()
        env: Any = run.env
        self.of_physics = len(getattr(env, "env", env)._worlds._data)


@pytest.mark.parametrize("name", ["hopper", "frame_stack:hopper"])
def test_physics_has_the_threads_of_all_members(tmp_path: Path, name: str) -> None:
    pytest.importorskip("mujoco")
    seen = Threads()
    settings = SETTINGS | {"threads": 4, "run_dir": str(tmp_path), "horizon": 4, "num_envs": 8}
    settings |= {"total_steps": 32, "eval_episodes": 0, "device": "cpu", "minibatches": 1}
    gpurl.train("ppo", name, callbacks=[seen], **settings)
    assert (seen.of_torch, seen.of_physics) == (1, 4)


def test_physics_has_all_threads_where_one_is_fastest_for_the_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.setattr("gpurl.run.setup._fastest_threads", lambda algorithm: 1)
    seen, before = Threads(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        settings = {"run_dir": str(tmp_path), "horizon": 4, "num_envs": 8, "minibatches": 1}
        run = {"total_steps": 32, "eval_episodes": 0, "device": "cpu", "quiet": True}
        gpurl.train("ppo", "hopper", callbacks=[seen], **settings, **run)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert (seen.of_torch, seen.of_physics) == (1, 3)


def members_of(folder: Path) -> list[dict[str, Any]]:
    """The weights and the training of each member."""
    parts, _ = load_checkpoint(folder)
    keys = sorted(parts["model"])
    return [{name: parts[name][key] for name in ("model", "training")} for key in keys]


@pytest.mark.parametrize("state", [{"returns": 1.0}, {"returns": torch.zeros(1)}], ids=str)
def test_best_weights_of_a_strangers_checkpoint(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="its part best does not fit"):
        BestMembers().load_state_dict(state)


def test_of_equal_evaluations_the_first_is_the_best() -> None:
    bests, policy = BestMembers(), Mock()
    for step, weight in ((10, 1.0), (20, 2.0)):
        policy.state_dict.return_value = {"weight": torch.tensor(weight)}
        values = {"members/0/eval_reward": 5.0}
        bests.note(values, step, [policy, None])
    weights, step = best_weights(bests.state_dict(), 0) or ({}, -1)
    assert (step, float(weights["weight"])) == (10, 1.0)
    assert best_weights(bests.state_dict(), 1) is None


def test_a_checkpoint_that_was_written_before_the_evaluation_gets_its_best(tmp_path: Path) -> None:
    small_run(tmp_path, 2, **(SETTINGS | {"eval_episodes": 0}))
    assert load_checkpoint(tmp_path)[0]["best"] == {}
    gpurl.resume(tmp_path, eval_episodes=4)  # no step is left
    parts, _ = load_checkpoint(tmp_path)
    assert parts["best"]["steps"].tolist() == [2 * ITERATION] * 3


def test_each_member_has_a_best_policy_of_its_own(tmp_path: Path) -> None:
    """That of a run of its seed, at whatever step; a killed run keeps them."""
    settings: dict[str, Any] = {"threads": 1, "eval_every": ITERATION, "eval_episodes": 4}
    settings |= {"learning_rate": 0.05, "keep_checkpoints": 1}
    small_run(tmp_path / "all", 4, population=4, seed=5, **settings)
    gpurl.resume(tmp_path / "all", total_steps=8 * ITERATION)
    steps = []
    for k in range(4):
        alone = small_run(tmp_path / str(k), 8, seed=5 + k, **settings)
        mine, other = load_algorithm(tmp_path / "all", member=k), load_algorithm(alone.folder)
        assert mine.step == other.step
        assert_same(dict(mine.algorithm.state_dict()), dict(other.algorithm.state_dict()))
        steps.append(mine.step)
    assert len({*steps}) > 1
    assert min(steps) < max(steps) <= 8 * ITERATION
    best = load_algorithm(tmp_path / "all")
    assert best.step == steps[best.member]
    # all as an ensemble, and a checkpoint by its name as it is
    ensemble = load_members(tmp_path / "all")
    assert sorted(each.step for each in ensemble) == sorted(steps)
    newest = load_algorithm(list_checkpoints(tmp_path / "all")[-1], member=0)
    assert newest.step == 8 * ITERATION


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_a_run_of_three_is_three_runs(tmp_path: Path, algorithm: str) -> None:
    run = small_run(tmp_path / "all", 3, algorithm, **SETTINGS)
    values = run.outcome.evaluation
    returns = []
    for k, member in enumerate(members_of(run.folder)):
        alone = small_run(tmp_path / str(k), 3, algorithm, seed=5 + k, threads=1)
        parts, _ = load_checkpoint(alone.folder)
        assert_same(member, {name: parts[name] for name in member})
        returns.append(alone.outcome.evaluation["eval/mean_reward"])
        assert values[f"members/{k}/eval_reward"] == returns[-1]
        # the policy of the member is that of the run
        policy, other = gpurl.load(run.folder, best=False, member=k), gpurl.load(alone.folder)
        obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
        assert np.array_equal(policy.act(obs), other.act(obs))
        assert evaluate_run(run.folder, 3, "cpu", best=False, member=k) == evaluate_run(
            alone.folder, 3, "cpu", best=False
        )
    # the run is worth what its best member is
    best = int(np.argmax(returns))
    assert (values["eval/best_member"], values["eval/mean_reward"]) == (best, returns[best])
    assert values["eval/population_mean"] == pytest.approx(sum(returns) / 3)
    assert evaluate_run(run.folder, 3, "cpu") == evaluate_run(run.folder, 3, "cpu", member=best)
    text = run.summary()
    assert f"by member {best}, the best; the mean of all members is {sum(returns) / 3:.2f}" in text
    # the log
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for entry in entries for name in entry}
    assert {f"members/{k}/eval_reward" for k in range(3)} <= names
    assert {"eval/best_member", "train/value_loss"} <= names
    assert run.outcome.steps == 3 * ITERATION


def test_a_population_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = SETTINGS | {"save_every": "1i", "keep_checkpoints": 9, "eval_every": ITERATION}
    plain = small_run(tmp_path / "plain", 5, **settings)
    killed = small_run(tmp_path / "killed", 5, **settings)
    # what a kill after the second iteration leaves
    for path in list_checkpoints(killed.folder)[2:]:
        shutil.rmtree(path)
    second = list_checkpoints(killed.folder)[-1].name
    (killed.folder / "checkpoints" / "LATEST").write_text(second + "\n")
    (killed.folder / "checkpoints" / "BEST").unlink()
    resumed = gpurl.resume(killed.folder, quiet=True)
    assert resumed.outcome.new_steps == 3 * ITERATION
    assert_same(state_of(killed.folder), state_of(plain.folder))
    assert resumed.outcome.evaluation == plain.outcome.evaluation


def test_a_resume_may_change_members_but_not_their_number(tmp_path: Path) -> None:
    small_run(tmp_path / "run", 1, **SETTINGS, member={"learning_rate": [1e-3, 1e-4, 1e-5]})
    with pytest.raises(UsageError, match="the checkpoint has population 3, this run 2"):
        gpurl.resume(tmp_path / "run", population=2, member={"learning_rate": [1.0, 2.0]})
    with pytest.raises(UsageError, match="has num_envs 16, this run 32; a population keeps"):
        gpurl.resume(tmp_path / "run", num_envs=32)
    rates = [2e-3, 1e-4, 1e-5]
    changed = gpurl.resume(
        tmp_path / "run", total_steps=2 * ITERATION, member={"learning_rate": rates}, quiet=True
    )
    saved = load_checkpoint(changed.folder)[0]["training"]
    found = [saved[str(k)]["rate_settings"]["policy"]["learning_rate"] for k in range(3)]
    assert found == rates


class SpoilMember(Callback):
    """Gives member 1 weights that are NaN after an iteration."""

    def __init__(self, at: int) -> None:
        self.at = at

    def after_iteration(self, run: RunView, metrics: dict[str, torch.Tensor]) -> None:
        if run.iteration == self.at:
            for parameter in run.algorithms[1].parameters():
                parameter.data.fill_(float("nan"))


def test_a_member_that_diverges_is_lost_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS | {"run_dir": str(tmp_path / "run"), "quiet": False}
    run = small_run(tmp_path / "run", 6, callbacks=[SpoilMember(2)], **settings)
    assert run.outcome.steps == 6 * ITERATION
    assert run.outcome.unsaved == ""
    assert "warning: member 1 is lost, the others go on" in capsys.readouterr().out
    assert "members/1/eval_reward" not in run.outcome.evaluation
    with pytest.raises(CheckpointError, match="member 1 was lost in training: "):
        gpurl.load(run.folder, member=1)
    plain = small_run(tmp_path / "plain", 6, **SETTINGS)
    for k in (0, 2):
        assert_same(members_of(run.folder)[k], members_of(plain.folder)[k])
    # and it stays lost
    resumed = gpurl.resume(run.folder, total_steps=7 * ITERATION, quiet=True)
    assert list(load_checkpoint(resumed.folder)[0]["trainer"]["lost"]) == ["1"]


# ---- settings ----


def test_members_may_differ_in_numbers_that_shape_no_weight() -> None:
    known = member_settings(PPOConfig)
    assert {"learning_rate", "gamma", "gae_lambda", "clip_range", "entropy_coef"} <= {*known}
    assert not {"horizon", "initial_std", "epochs", "network", "schedule"} & {*known}
    assert {"tau", "reward_scale", "target_entropy"} <= {*member_settings(SACConfig)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gama": [1.0]}, "members cannot differ in 'gama'; did you mean gamma"),
        ({"horizon": [1, 2]}, "members cannot differ in 'horizon'"),
        ({"gamma": 0.9}, "member.gamma is 0.9; it must be a list of numbers"),
        ({"gamma": ["a"]}, "it must be a list of numbers"),
        ({"gamma": [True]}, "it must be a list of numbers"),
        ({"gamma": [float("nan")]}, "it must be a list of numbers"),
        ([1.0], r"member is \[1.0\]; it must be `setting: list of numbers` pairs"),
    ],
    ids=str,
)
def test_wrong_settings_of_members(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        member_values(PPOConfig, values)


def test_each_member_gets_its_own_number() -> None:
    base = PPOConfig(gamma=0.5)
    configs = member_configs(base, 2, {"gamma": (0.9, 0.8), "learning_rate": (1e-3, 1e-2)})
    assert [(each.gamma, each.learning_rate) for each in configs] == [(0.9, 1e-3), (0.8, 1e-2)]
    assert member_configs(base, 2, {}) == [base, base]
    with pytest.raises(UsageError, match=r"needs one value for each of 3 members, got 2: 0.9 0.8;"):
        member_configs(base, 3, {"gamma": (0.9, 0.8)})
    with pytest.raises(UsageError, match=r"member 1: gamma must be from 0 to 1, got 1.5"):
        member_configs(base, 2, {"gamma": (0.9, 1.5)})


def test_selection_takes_critics_of_the_same_rewards() -> None:
    settings: dict[str, Any] = {"population": 2, "pbt": True}
    for scales in ([0.1, 0.1], [0.1, 1.0]):
        values = settings | {"member": {"reward_scale": scales}}
        if scales[0] == scales[1]:
            make_settings("sac", "pendulum", **values)
        else:
            with pytest.raises(UsageError, match=r"member\.reward_scale has 2 values: pbt copies"):
                make_settings("sac", "pendulum", **values)
            make_settings("sac", "pendulum", **(values | {"pbt": False}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 0}, "population must be at least 1, got 0"),
        ({"population": 5000}, "population must be at most 4096, got 5000"),
        ({"asynchronous": True}, "population 3 learns after collecting: leave out asynchronous"),
        ({"graph": "full"}, "population 3 takes graph auto or off, got full"),
        ({"rollout": "persistent"}, "population 3 takes rollout auto or steps, got persistent"),
        ({"nan": "reset-envs"}, "population 3 takes nan raise or skip, got reset-envs"),
        ({"env": "CartPole-v1"}, "tasks do, CartPole-v1 does not: train its seeds one after"),
        ({"member": {"gamma": [0.9]}}, "needs one value for each of 3 members, got 1: 0.9"),
        ({"num_envs": 7, "minibatches": 5}, "splits num_envs"),
    ],
    ids=str,
)
def test_what_a_population_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = SETTINGS | {"env": "cart_pole"} | changes
    with pytest.raises(UsageError, match=message):
        small_run(tmp_path / "run", 1, **settings)
    assert not (tmp_path / "run").exists()


def test_existing_environments_and_teachers_are_refused(tmp_path: Path) -> None:
    env = gpurl.make_env("cart_pole", 16)
    with pytest.raises(UsageError, match="needs 3 x 16 environments, got 16 existing ones"):
        gpurl.train("ppo", env, population=3, run_dir=str(tmp_path / "run"), num_envs=16)
    run = small_run(tmp_path / "teacher", 1)
    with pytest.raises(UsageError, match="learn from rewards, not for bc: train its seeds"):
        gpurl.train(
            "bc", "pendulum", population=2, teacher=str(run.folder), run_dir=str(tmp_path / "b"),
            num_envs=16, device="cpu",
        )  # fmt: skip


def test_the_command_line_takes_lists_for_members(tmp_path: Path) -> None:
    words = ["ppo", "cart_pole", "--population", "2"]
    settings, _ = parse_train([*words, "--member.learning-rate", "1e-3", "1e-4"])
    assert settings.member == {"learning_rate": (1e-3, 1e-4)}
    settings, _ = parse_train([*words, "member.gae_lambda=0.9,1.0"])
    assert [each.gae_lambda for each in settings.member_configs()] == [0.9, 1.0]
    # a file, and flags over it
    file = tmp_path / "settings.yaml"
    file.write_text(config_template(settings))
    assert read_config(file)["member"] == {"gae_lambda": [0.9, 1.0]}
    again, _ = parse_train(["--config", str(file), "--member.gamma", "0.5", "0.6"])
    assert again.member == {"gae_lambda": (0.9, 1.0), "gamma": (0.5, 0.6)}
    assert make_settings(**again.to_dict()).member == again.member  # type: ignore[arg-type]
    # what is wrong is said before anything is made
    with pytest.raises(UsageError, match=r"one value for each of 2 members, got 1: 0.001"):
        parse_train([*words, "--member.learning-rate", "1e-3"])


# ---- which member ----


def test_the_best_member_is_chosen_among_those_that_are_not_lost() -> None:
    trainer = {"evaluation": {"eval/best_member": 2.0}, "lost": {}}
    assert choose_member(None, 3, trainer) == 2
    assert choose_member(1, 3, trainer) == 1
    assert choose_member(None, 3, {"evaluation": {}, "lost": {"0": "NaN"}}) == 1
    assert choose_member(None, 3, trainer | {"lost": {"2": "NaN"}}) == 0
    assert choose_member(None, 1, {"evaluation": {}}) == 0
    with pytest.raises(UsageError, match="there is no member 3: the run has members 0 to 2"):
        choose_member(3, 3, trainer)
    with pytest.raises(UsageError, match="there is no member -1"):
        choose_member(-1, 3, trainer)
    with pytest.raises(UsageError, match="the run has one agent, member 0"):
        choose_member(1, 1, {"evaluation": {}})
    with pytest.raises(CheckpointError, match="member 2 was lost in training: NaN"):
        choose_member(2, 3, trainer | {"lost": {"2": "NaN"}})


def test_the_evaluation_of_a_population_is_that_of_its_best_member() -> None:
    nan = float("nan")
    values = [
        {"eval/mean_reward": mean, "eval/episodes": count, "eval/non_finite_episodes": bad}
        for mean, count, bad in ((1.0, 4, 0.0), (9.0, 4, 0.0), (5.0, 3, 1.0), (nan, 0, 4.0))
    ]
    found = of_population(values, [False, True, False, False])
    assert found == {
        "eval/mean_reward": 5.0,
        "eval/episodes": 3,
        "eval/best_member": 2,
        "eval/population_mean": 3.0,
        "members/0/eval_reward": 1.0,
        "members/2/eval_reward": 5.0,
        "eval/non_finite_episodes": 5.0,
    }
    none = of_population([values[1], values[3]], [True, False])
    assert none["eval/best_member"] == 1
    assert np.isnan(none["eval/population_mean"])


def test_commands_take_a_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run", 2, env="cart_pole", **SETTINGS)
    shown = []
    for words in (["--member", "0"], ["--member", "2"], []):
        assert main(["eval", str(run.folder), "--episodes", "4", *words, "--device", "cpu"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[2] in shown[:2] or run.outcome.evaluation["eval/best_member"] == 1
    assert exit_code(["eval", str(run.folder), "--member", "3"]) == 2
    assert "there is no member 3: the run has members 0 to 2" in capsys.readouterr().err
    # exports
    files = [export_run(run.folder, "torchscript", tmp_path / f"{k}.pt", member=k) for k in (0, 2)]
    obs = torch.randn(16, 4)
    for exported, k in zip(files, (0, 2)):
        action = torch.jit.load(exported.file)(obs)
        policy = gpurl.load(run.folder, member=k)
        assert np.array_equal(action.numpy(), policy.act(obs.numpy()))


def test_a_run_may_begin_with_the_best_member_of_a_population(tmp_path: Path) -> None:
    source = small_run(tmp_path / "source", 2, **SETTINGS)
    best = int(source.outcome.evaluation["eval/best_member"])
    run = small_run(tmp_path / "run", 1, init_from=str(source.folder), learning_rate=1e-12)
    weights = gpurl.load(source.folder, member=best).algorithm.network.actor.weight
    begun = gpurl.load(run.folder).algorithm.network.actor.weight
    torch.testing.assert_close(begun, weights, rtol=0, atol=1e-6)
