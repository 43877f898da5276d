"""A run goes on where it did not begin: with another number of environments, and on a machine
without the device it had.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import gpurl
from gpurl.api import evaluate_run, resume
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.run.settings import make_settings
from gpurl.run.trainer import Trainer
from tests.engine.test_no_sync import fake_trainer
from tests.small_runs import (
    assert_same,
    exit_code,
    small_run,
    small_settings,
    some_demonstrations,
    takes,
)

# ---- another number of environments ----


def first_run(folder: Path, name: str, **changes: Any) -> Path:
    shape = {
        "num_envs": 16,
        "horizon": 8,
        "total_steps": 256,
        "eval_episodes": 0,
        "device": "cpu",
        "quiet": True,
        "run_dir": folder,
    }
    return gpurl.train(name, "pendulum", **(small_settings(name) | shape | changes)).folder


@pytest.mark.parametrize(
    ("name", "changes", "now"),
    [
        ("ppo", {}, 8),
        ("ppo", {"network": {"memory": "gru", "hidden": [8]}}, 32),
        ("sac", {"save_replay": True, "prioritized": True}, 8),
    ],
    ids=str,
)
def test_weights_and_optimiser_go_on_and_episodes_begin_anew(
    name: str,
    changes: dict[str, Any],
    now: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = first_run(tmp_path / "run", name, **changes)
    before, seen = load_checkpoint(folder)[0], list[Any]()

    def look(self: Trainer) -> dict[str, torch.Tensor]:
        if not seen:
            state = {
                "model": dict(self.algorithm.state_dict()),
                "training": self.algorithm.extra_state(),
                "stored": self.engine.stored,
            }
            seen.append(
                tree_map(
                    lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state
                )
            )
        return iterate(self)

    iterate = Trainer.iterate
    monkeypatch.setattr(Trainer, "iterate", look)
    assert resume(folder, num_envs=now, total_steps=257, quiet=False).outcome.steps == 256 + now * 8
    (found,) = seen
    assert_same(found["model"], before["model"])
    assert found["stored"] == 0
    random = found["training"]["random"].pop("action")
    saved_random = before["training"]["random"].pop("action")
    assert torch.equal(random["step"], saved_random["step"])  # no number is drawn twice
    assert random["key"].shape == (now,)
    assert_same(found["training"], before["training"])
    message = " ".join(capsys.readouterr().out.split())
    assert (
        f"{now} environments instead of 16: their episodes start anew; weights, optimiser and "
        f"normalisation continue" in message
    )
    assert ("the saved replay buffer is dropped" in message) == (name == "sac")
    after = load_checkpoint(folder)[0]
    assert after["meta"]["settings"]["num_envs"] == now
    assert after["trainer"]["obs"].shape[0] == now
    assert after["trainer"]["iteration"] > before["trainer"]["iteration"]


def test_the_same_number_is_no_other_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    resume(folder, num_envs=16, total_steps=256, quiet=False)
    assert "begin anew" not in capsys.readouterr().out


def test_a_dataset_is_of_no_number_of_environments(tmp_path: Path) -> None:
    shape = small_settings("bc") | {
        "dataset": some_demonstrations(tmp_path, make_env("pendulum", 1, "cpu", 0)),
        "run_dir": tmp_path / "run",
    }
    folder = gpurl.train(
        "bc",
        "pendulum",
        num_envs=16,
        horizon=8,
        total_steps=128,
        eval_episodes=0,
        quiet=True,
        device="cpu",
        **shape,
    ).folder
    before = load_checkpoint(folder)[0]["replay"]["random"]["step"]
    resume(folder, num_envs=4, total_steps=257)
    assert load_checkpoint(folder)[0]["replay"]["random"]["step"] > before


def test_a_number_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = small_run(tmp_path / "run", 1, minibatches=8).folder
    assert (
        exit_code(
            [
                "train",
                "--resume",
                str(folder),
                "--num-envs",
                "3",
                "--horizon",
                "3",
                "--total-steps",
                "999",
            ]
        )
        == 2
    )
    assert (
        "splits num_envs * horizon = 9 rows into minibatches = 8, which leaves 1 over"
        in capsys.readouterr().err
    )


# ---- another device ----


def test_a_run_of_a_gpu_goes_on_and_plays_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("is about machines without a GPU")
    folder = small_run(tmp_path / "run", 1).folder
    parts, manifest = load_checkpoint(folder)
    parts["meta"]["settings"] |= {
        "device": "cuda:1",
        "precision": "tf32",
        "graph": "full",
        "rollout": "auto",
    }
    path = save_checkpoint(tmp_path / "gpu" / "checkpoints", manifest["step"], parts).parents[1]
    assert gpurl.load(path).act(torch.zeros(3)).shape == (1,)
    assert evaluate_run(path, 2)["eval/episodes"] == 2.0
    words = ["train", "--resume", str(path), "--total-steps", "256", "--quiet"]
    for more, message in (
        ([], "--device auto continues it here"),
        (["--device", "auto"], "use --precision float32 or --device cuda"),
    ):
        assert exit_code([*words, *more]) == 2
        assert message in capsys.readouterr().err
    assert exit_code([*words, "--device", "auto", "--precision", "float32"]) == 0
    with pytest.raises(UsageError, match="device cuda:1 does not exist") as raised:
        gpurl.train("ppo", "pendulum", device="cuda:1")
    assert "continues it here" not in str(raised.value)


def form_of(trainer: Trainer) -> Any:
    """Names, shapes and kinds of what a checkpoint holds, but for the replay, whose length is
    read.
    """
    state = {
        "model": trainer.algorithm.state_dict(),
        "training": trainer.algorithm.extra_state(),
        "env": trainer.env.state_dict(),
    }
    state |= {
        "statistics": trainer.engine.statistics.state_dict(),
        "obs": trainer.engine.obs,
        "policy_state": list(trainer.engine.policy_state),
    }
    return tree_map(
        lambda leaf: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf,
        state,
    )


@pytest.mark.parametrize(
    "name", ["ppo", "pqn", "rainbow", "vdn", "ddpg", "fast_td3", "mod_sac", "flash_sac", "bc"]
)  # all of them do
def test_a_gpus_checkpoint_has_the_form_of_a_cpus(name: str, tmp_path: Path) -> None:
    """The GPU's paths, played with fake tensors, leave what a CPU can go on from, and the other way
    round.
    """
    one = {each: make_env(each, 1, "cpu", 0) for each in ("two_step_game", "pendulum", "cart_pole")}
    env = next(
        each for each, task in one.items() if takes(name, task.single_action_space, task.num_agents)
    )
    shape = small_settings(name) | (
        {"dataset": some_demonstrations(tmp_path, one[env])} if name == "bc" else {}
    )
    settings = make_settings(name, env, num_envs=4, horizon=2, normalize_obs=True, **shape)
    real = fake_trainer(settings)
    real.start()
    real.iterate()
    expected = form_of(real)
    with FakeTensorMode(), no_host_syncs():
        fake = fake_trainer(settings)
        fake.start()
        fake.iterate()
        assert form_of(fake) == expected
