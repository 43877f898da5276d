"""Environments that misbehave in a run: what is wrong is named with its place, and nothing of it is
trained on.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor

import gpurl
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cli.check_env import check_env
from gpurl.cli.main import main
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EnvError, NonFiniteError, UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.small_runs import ITERATION, SMALL, small_run
from tests.tiny_envs import RandomWalk


class BrokenWalk(RandomWalk):
    """A RandomWalk whose fault comes at its 5th step."""

    fault = ""

    def step(self, actions: torch.Tensor) -> Any:
        timestep = super().step(actions)
        self.count = getattr(self, "count", 0) + 1
        if self.count < 5 or self.count > 6:
            return timestep
        if self.fault == "nan reward":
            timestep.reward[3] = float("nan")
        if self.fault in ("nan obs", "inf obs"):
            timestep.obs[3] = float(self.fault[:3])
        changes = {
            "shape": {"obs": timestep.obs[:, :2]},
            "dtype": {"reward": timestep.reward.double()},
            "device": {"terminated": timestep.terminated.to("meta")},
        }
        return timestep._replace(**changes.get(self.fault, {}))  # type: ignore[arg-type]


def train_broken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, **changes: Any
) -> gpurl.Run:
    monkeypatch.setattr(BrokenWalk, "fault", fault)
    return small_run(folder, 3, "ppo", "tests.guards.test_misbehaving_envs:BrokenWalk", **changes)


class WrongWalk(RandomWalk):
    """A RandomWalk whose transition returns what `wrong` makes of it."""

    wrong: Any = None

    def transition(
        self, state: State, action: torch.Tensor, rng: CounterRandom
    ) -> tuple[State, torch.Tensor, torch.Tensor]:
        return self.wrong(*super().transition(state, action, rng))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda self, state, reward, ended: (state, reward.unsqueeze(1), ended),
            r"reward: wanted .* \(16,\), .* shape \(16, 1\)",
        ),
        (
            lambda self, state, reward, ended: (state, reward.double(), ended),
            r"reward: wanted .* got torch.float64",
        ),
        (
            lambda self, state, reward, ended: (state, reward, ended.float()),
            r"terminated: wanted .* torch.bool, .* got torch.float32",
        ),
    ],
)
def test_a_wrong_transition_is_named_with_its_env_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, message: str
) -> None:
    monkeypatch.setattr(WrongWalk, "wrong", wrong)
    name = "tests.guards.test_misbehaving_envs:WrongWalk"
    with pytest.raises(
        EnvError, match=rf"environment '{name}' at env step 0: WrongWalk.transition: {message}"
    ):
        small_run(tmp_path / "run", 3, env=name)


def test_a_reset_for_nan_that_fails_is_named_with_env_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = BrokenWalk.reset
    monkeypatch.setattr(
        BrokenWalk,
        "reset",
        lambda env, seed=None, options=None: 1 // 0 if options else begin(env, seed=seed),
    )
    with pytest.raises(
        EnvError,
        match=r"^environment '.*:BrokenWalk' at env step 128: BrokenWalk.reset raised "
        r"ZeroDivisionError",
    ):
        train_broken(tmp_path / "run", monkeypatch, "nan obs", nan="reset-envs")


@pytest.mark.parametrize("fault", ["nan reward", "nan obs", "inf obs"])
def test_nan_stops_with_env_step_and_index_and_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with pytest.raises(
        NonFiniteError,
        match=r"BrokenWalk' gave NaN or infinity .* step [45] of the rollout, environments 3\)",
    ) as caught:
        train_broken(tmp_path / "run", monkeypatch, fault)
    found = str(caught.value).partition("first in ")[2].partition(" (")[0]
    assert found == "reward" if fault == "nan reward" else "obs" in found
    parts, _ = load_checkpoint(
        tmp_path / "run"
    )  # nothing is lost: the state was saved before stopping
    assert all(torch.isfinite(value).all() for value in parts["model"].values())
    run = train_broken(tmp_path / "skip", monkeypatch, fault, nan="reset-envs")
    assert run.outcome.reason == "total_steps"
    assert all(
        torch.isfinite(value).all() for value in load_checkpoint(run.folder)[0]["model"].values()
    )
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    norms = [record["train/grad_norm"] for record in records if "train/grad_norm" in record]
    assert len(norms) == 3
    assert None not in norms  # each update did learn from the other rows


def test_what_led_to_nan_is_dumped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        NonFiniteError, match="For the steps that led there: gpurl doctor "
    ) as caught:
        train_broken(tmp_path / "run", monkeypatch, "nan reward")
    dump = Path(str(caught.value).rpartition("gpurl doctor ")[2])
    assert f"gpurl train --resume {tmp_path / 'run'} --nan reset-envs" in str(caught.value)
    columns = load_checkpoint(dump)[0]["dump"]["columns"]
    assert columns["reward"].isnan().tolist() == [False] * 4 + [True, True, False, False]
    assert columns["obs"].shape == (8, 3)
    assert main(["doctor", str(dump)]) == 0
    text = capsys.readouterr().out
    assert (
        "BrokenWalk', number 3: NaN or infinity at step 4 of 8 of the rollout of iteration 1"
        in text
    )
    assert "first in: reward" in text
    here = text.partition("step 4 <- here\n")[2].partition("step 5")[0]
    assert "reward      nan" in here
    assert "step 3\n" in text
    assert main(["doctor", str(tmp_path / "run")]) == 5
    assert "is a checkpoint of a run, not a dump of NaN" in capsys.readouterr().err


@pytest.mark.parametrize(("nan", "resets"), [("skip", 0), ("reset-envs", 1)])
def test_skip_leaves_environments_alone_and_reset_envs_restarts_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nan: str,
    resets: int,
) -> None:
    masks, real = [], BrokenWalk.reset

    def reset(self: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        masks.append((options or {}).get("reset_mask"))
        return real(self, seed=seed, options=options)

    monkeypatch.setattr(BrokenWalk, "reset", reset)
    run = train_broken(tmp_path / "run", monkeypatch, "nan obs", nan=nan, eval_episodes=0)
    assert run.outcome.reason == "total_steps"
    given = [mask.nonzero().flatten().tolist() for mask in masks if mask is not None]
    assert given == [[3]] * resets
    assert caplog.text.count(f"gave NaN or infinity; --nan {nan} skips those steps") == 1
    counts = [
        json.loads(line)["rollout/non_finite_rows"]
        for line in (run.folder / "metrics.jsonl").read_text().splitlines()[1:]
    ]
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("fault", ["shape", "dtype", "device"])
def test_a_wrong_shape_dtype_or_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with pytest.raises(EnvError, match=rf"BrokenWalk' at env step {4 * 16}: BrokenWalk.step: "):
        train_broken(tmp_path / "run", monkeypatch, fault)


# ---- the zoo: what each mutant does from its 3rd step on, and what stands in the error at that
# step ----


class OwnEnv(VecEnv):
    """A user's own environment, without TorchEnv: a counter that ends every 5th step. `mutate`
    changes what a step returns.
    """

    single_observation_space = Box(-10.0, 10.0, (3,), np.float32)
    single_action_space = Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 5
    mutate: Any = staticmethod(lambda env, timestep: timestep)
    first = 3

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device)
        self.count, self.buffer = 0, torch.zeros(num_envs, 3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).get("reset_mask", torch.ones(self.num_envs, dtype=torch.bool))
        self.episode_length_buf = self.episode_length_buf.masked_fill(mask, 0)
        return self._observed(), {}

    def _observed(self) -> Tensor:
        return torch.stack(
            (
                self.episode_length_buf.float(),
                self.episode_length_buf.float() * 0.5,
                torch.ones(self.num_envs),
            ),
            1,
        )

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        self.count += 1
        self.episode_length_buf = self.episode_length_buf + 1
        length, final_obs = self.episode_length_buf, self._observed()
        truncated = length >= 5
        self.episode_length_buf = length.masked_fill(truncated, 0)
        reward, nobody = final_obs[:, 0].clone(), torch.zeros_like(truncated)
        info: dict[str, Any] = {
            "final_obs": final_obs,
            "_final_obs": truncated,
            "time_outs": truncated,
            "_episode": truncated,
        }
        info["episode"] = {"r": length.float(), "l": length}
        timestep = Timestep(self._observed(), reward, nobody, truncated, info)
        return self.mutate(self, timestep) if self.count >= self.first else timestep


class OwnWalk(RandomWalk):
    """The same of a TorchEnv."""

    mutate: Any = staticmethod(OwnEnv.mutate)
    first = OwnEnv.first

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        timestep = super().step(actions)
        return self.mutate(self, timestep) if self.count >= self.first else timestep


def changed(**fields: Callable[[Any], Any]) -> Callable[[Any, Timestep], Timestep]:
    return lambda env, t: t._replace(
        **{name: change(getattr(t, name)) for name, change in fields.items()}
    )


def informed(**entries: Any) -> Callable[[Any, Timestep], Timestep]:
    """With these entries of info; a function is given info."""
    return lambda env, t: t._replace(
        info=t.info
        | {key: value(t.info) if callable(value) else value for key, value in entries.items()}
    )


def without(key: str) -> Callable[[Any, Timestep], Timestep]:
    return lambda env, t: t._replace(
        info={name: value for name, value in t.info.items() if name != key}
    )


def into_one_buffer(env: Any, timestep: Timestep) -> Timestep:
    env.one = getattr(env, "one", torch.zeros(env.num_envs, 3)).copy_(timestep.obs)
    return timestep._replace(obs=env.one)


def of_obs_itself(env: Any, timestep: Timestep) -> Timestep:
    return timestep._replace(info=timestep.info | {"final_obs": timestep.obs})


def divides(env: Any, timestep: Timestep) -> Timestep:
    return 1 // 0  # type: ignore[return-value]


OBS, ROW = (
    r"wanted a tensor of shape \(16, 3\), torch.float32, on cpu, got ",
    r"wanted a tensor of shape \(16,\), ",
)
ZOO: dict[str, tuple[Any, str]] = {
    "half a batch": (changed(obs=lambda x: x[:8]), rf"obs: {OBS}shape \(8, 3\)"),
    "another shape later": (changed(obs=lambda x: x[:, :2]), rf"obs: {OBS}shape \(16, 2\)"),
    "float16": (changed(obs=lambda x: x.half()), f"obs: {OBS}torch.float16"),
    "numpy": (changed(obs=lambda x: x.numpy()), f"obs: {OBS}an ndarray"),
    "another device": (changed(obs=lambda x: x.to("meta")), f"obs: {OBS}a tensor on meta"),
    "requires grad": (
        changed(obs=lambda x: x.requires_grad_()),
        "obs: wanted a tensor without gradient",
    ),
    "reward requires grad": (
        changed(reward=lambda x: x.clone().requires_grad_()),
        "reward: wanted a tensor without gradient",
    ),
    "float64 reward": (
        changed(reward=lambda x: x.double()),
        f"reward: {ROW}torch.float32, on cpu, got torch.float64",
    ),
    "integer flags": (
        changed(terminated=lambda x: x.int()),
        f"terminated: {ROW}torch.bool, on cpu, got torch.int32",
    ),
    "float flags": (
        changed(truncated=lambda x: x.float()),
        f"truncated: {ROW}torch.bool, on cpu, got torch.float32",
    ),
    "no final_obs": (without("final_obs"), rf"info\['final_obs'\]: {OBS}nothing"),
    "no episode": (
        without("episode"),
        rf"info\['episode'\]\['r'\]: {ROW}torch.float32 or .*, on cpu, got nothing",
    ),
    "short lengths": (
        informed(episode=lambda i: i["episode"] | {"l": torch.ones(3)}),
        rf"info\['episode'\]\['l'\]: {ROW}torch.int64 or .*, on cpu, got shape \(3,\)",
    ),
    "short _episode": (
        informed(_episode=torch.ones(3)),
        rf"info\['_episode'\]: {ROW}torch.bool, on cpu, got shape \(3,\)",
    ),
    "integer _episode": (
        informed(_episode=lambda i: i["_episode"].long()),
        rf"info\['_episode'\]: {ROW}torch.bool, on cpu, got torch.int64",
    ),
    "float _episode": (
        informed(_episode=lambda i: i["_episode"].float()),
        rf"info\['_episode'\]: {ROW}torch.bool, on cpu, got torch.float32",
    ),
    "_episode on another device": (
        informed(_episode=lambda i: i["_episode"].to("meta")),
        rf"info\['_episode'\]: {ROW}torch.bool, on cpu, got a tensor on meta",
    ),
    "integer returns": (
        informed(episode=lambda i: i["episode"] | {"r": i["episode"]["r"].int()}),
        rf"info\['episode'\]\['r'\]: {ROW}torch.float32 or .*, on cpu, got torch.int32",
    ),
    "returns on another device": (
        informed(episode=lambda i: i["episode"] | {"r": i["episode"]["r"].to("meta")}),
        rf"info\['episode'\]\['r'\]: {ROW}torch.float32 or .*, on cpu, got a tensor on meta",
    ),
    "flags as lengths": (
        informed(episode=lambda i: i["episode"] | {"l": i["episode"]["l"].bool()}),
        rf"info\['episode'\]\['l'\]: {ROW}torch.int64 or .*, on cpu, got torch.bool",
    ),
    "valid late": (
        informed(valid=lambda i: torch.ones(16, dtype=torch.bool)),
        r"info\['valid'\]: wanted it in every step or in none, got",
    ),
    "short valid": (
        informed(valid=torch.ones(3, dtype=torch.bool)),
        rf"info\['valid'\]: {ROW}torch.bool, on cpu, got shape \(3,\)",
    ),
    "a key that is no name": (
        lambda env, t: t._replace(info=t.info | {7: 1}),
        "info: wanted names as keys, got 7, a int",
    ),
    "log no dict": (informed(log=3.0), r"info\['log'\]: wanted a dict of numbers, got a float"),
    "log of words": (
        informed(log=lambda i: {"speed": "fast"}),
        r"info\['log'\]\['speed'\]: wanted a name with a number or a tensor",
    ),
    "info no dict": (changed(info=lambda x: list(x)), "info: wanted a dict, got a list"),
    "a plain tuple": (lambda env, t: tuple(t), "wanted a gpurl.envs.vec_env.Timestep, got a tuple"),
    "nothing": (lambda env, t: None, "wanted a gpurl.envs.vec_env.Timestep, got nothing"),
    "an exception": (
        divides,
        r"raised ZeroDivisionError: .* by zero \(.*test_misbehaving_envs.py:\d+: return 1 // 0",
    ),
}


def zoo_trainer(kind: type, algorithm: str = "ppo", **changes: Any) -> Any:
    small: dict[str, Any] = {
        "num_envs": 16,
        "horizon": 8,
        "device": "cpu",
        "threads": 1,
        "total_steps": 10**5,
        "eval_episodes": 0,
    }
    small |= (
        {"minibatches": 2}
        if algorithm == "ppo"
        else {"learning_starts": 128, "updates": 2, "batch_size": 16}
    )
    settings = make_settings(
        algorithm, f"tests.guards.test_misbehaving_envs:{kind.__name__}", **(small | changes)
    )
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    return trainer


def test_a_mask_that_nobody_reads_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OwnEnv, "mutate", staticmethod(informed(action_mask=torch.ones(16, 2))))
    trainer = zoo_trainer(OwnEnv)
    trainer.iterate()
    trainer.iterate()
    assert [record.message[:23] for record in caplog.records] == ["info['action_mask'] is "]


@pytest.mark.parametrize("kind", [OwnEnv, OwnWalk])
@pytest.mark.parametrize("name", ZOO)
def test_a_mutant_is_named_at_its_first_step(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the training loop, at the env step where it begins, and by the checker."""
    mutate, message = ZOO[name]
    monkeypatch.setattr(kind, "mutate", staticmethod(mutate))
    with pytest.raises(
        EnvError,
        match=rf"^environment '.*:{kind.__name__}' at env step {2 * 16}: {kind.__name__}.step:? "
        rf"{message}",
    ) as caught:
        zoo_trainer(kind).iterate()
    assert caught.value.exit_code == 3
    if name == "an exception":
        assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)  # type: ignore[union-attr]
    elif kind is OwnEnv:
        found = check_env(kind(16), steps=8)
        words = message.split(":")[0].replace("\\", "")  # of the key
        assert any(words in problem for problem in found), found


def test_the_zoo_s_ancestors_are_healthy() -> None:
    for kind in (OwnEnv, OwnWalk):
        trainer = zoo_trainer(kind)
        for _ in range(2):
            trainer.iterate()
    assert check_env(OwnWalk(16), steps=8) == []


@pytest.mark.parametrize("kind", [OwnEnv, OwnWalk])
def test_shared_memory_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """obs in one buffer for all steps, from the second such step on; final_obs in that of obs, at
    the first end.
    """
    monkeypatch.setattr(kind, "mutate", staticmethod(into_one_buffer))
    with pytest.raises(
        EnvError,
        match=rf"env step {3 * 16}: .*obs: wanted new memory in each step, got that of the "
        rf"observations before",
    ):
        zoo_trainer(kind, stagger=False).iterate()
    monkeypatch.setattr(kind, "mutate", staticmethod(of_obs_itself))
    with pytest.raises(
        EnvError,
        match=r"env step \d+: .*info\['final_obs'\]: wanted the true last observation where an "
        r"episode ended",
    ):
        zoo_trainer(kind, stagger=False).iterate()
    assert any("final_obs" in problem for problem in check_env(kind(16), steps=8))


@pytest.mark.parametrize("length", [torch.int32, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("returns", [torch.float64, torch.float16, torch.bfloat16])
def test_statistics_of_episodes_may_have_other_number_types(
    returns: torch.dtype, length: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []
    for kinds in ((torch.float32, torch.int64), (returns, length)):

        def converted(info: dict[str, Any], kinds: Any = kinds) -> dict[str, Any]:
            return {key: info["episode"][key].to(kind) for key, kind in zip("rl", kinds)}

        monkeypatch.setattr(OwnEnv, "mutate", staticmethod(informed(episode=converted)))
        trainer = zoo_trainer(OwnEnv)
        for _ in range(3):
            trainer.iterate()
        logs.append(trainer.engine.statistics.newest.tolist())
    assert logs[0] == logs[1]
    assert sum(logs[0][2]) > 0


def strided(env: Any, timestep: Timestep) -> Timestep:
    wide = (
        torch.cat((timestep.obs, timestep.obs), 1)[:, :3],
        torch.stack((timestep.reward, timestep.reward), 1)[:, 0],
    )
    return timestep._replace(
        obs=wide[0],
        reward=wide[1],
        info=timestep.info | {"final_obs": timestep.info["final_obs"].t().contiguous().t()},
    )


def both_flags(env: Any, timestep: Timestep) -> Timestep:
    return timestep._replace(truncated=timestep.truncated | timestep.terminated)


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
@pytest.mark.parametrize("mutate", [strided, both_flags])
def test_strides_change_no_bit_and_of_both_ends_the_termination_counts(
    mutate: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for function in (OwnEnv.mutate, mutate):
        monkeypatch.setattr(OwnWalk, "mutate", staticmethod(function))
        trainer = zoo_trainer(OwnWalk, algorithm)
        for _ in range(3):
            trainer.iterate()
        results.append(
            {name: value.clone() for name, value in trainer.algorithm.state_dict().items()}
        )
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


class NoReset(OwnWalk):
    fault: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed, options=options)
        return self.fault(result) if self.fault is not None else result


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda self, result: 1 // 0,
            r"NoReset.reset raised ZeroDivisionError: .*test_misbehaving_envs.py",
        ),
        (
            lambda self, result: result[0],
            r"NoReset.reset: wanted a tuple \(obs, info\), got a tensor of shape",
        ),
        (lambda self, result: (result[0].numpy(), {}), r"NoReset.reset: obs: .* got an ndarray"),
    ],
)
def test_a_reset_that_fails_is_named(
    fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoReset, "fault", fault)
    with pytest.raises(EnvError, match=message):
        zoo_trainer(NoReset)


class Unmade(OwnWalk):
    fault: Any = None

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device, seed)
        self.fault()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda self: 1 // 0,
            r"Unmade.__init__ raised ZeroDivisionError: .*test_misbehaving_envs.py",
        ),
        (
            lambda self: setattr(self, "num_envs", 3),
            r"Unmade.num_envs: wanted 16, as in its argument, got 3",
        ),
        (
            lambda self: delattr(self, "num_envs"),
            r"Unmade: wanted num_envs, device .*, got none; call super\(\).__init__",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(
    fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unmade, "fault", fault)
    with pytest.raises(EnvError, match=message) as caught:
        make_env("tests.guards.test_misbehaving_envs:Unmade", 16)
    assert (caught.value.__cause__ is not None) == ("raised" in message)


@pytest.mark.parametrize("count", [0, -3, 2.5])
def test_a_number_of_environments_that_cannot_be(count: Any) -> None:
    with pytest.raises(
        UsageError, match=f"num_envs must be a whole number of at least 1, got {count}"
    ):
        OwnEnv(count)


def test_one_environment_is_enough() -> None:
    zoo_trainer(OwnEnv, num_envs=1).iterate()


def test_episodes_of_no_length_are_found() -> None:
    env: Any = OwnEnv(16)
    env.mutate = lambda env, t: informed(episode={"r": t.reward, "l": torch.zeros(16)})(env, t)
    assert any(
        "wanted at least 1 step in an episode that ended, got 0 in environments [0" in problem
        for problem in check_env(env, steps=8)
    )


def test_spaces_that_cannot_be_learnt_from_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnEnv, "single_action_space", Box(-np.inf, np.inf, (2,), np.float32))
    with pytest.raises(UsageError, match="SAC"):
        zoo_trainer(OwnEnv, "sac")
    monkeypatch.setattr(OwnEnv, "single_observation_space", Dict({"a": Box(0.0, 1.0, (3,))}))
    with pytest.raises(
        EnvError, match=r"OwnEnv.single_observation_space: wanted a Box, got Dict.*join its parts"
    ):
        zoo_trainer(OwnEnv)
    monkeypatch.setattr(OwnEnv, "single_observation_space", None)
    with pytest.raises(
        EnvError, match=r"OwnEnv.single_observation_space: wanted a gymnasium.Space, got nothing"
    ):
        zoo_trainer(OwnEnv)


class NaNEnv(gymnasium.Env[np.ndarray, int]):
    """Whose fifth reward is NaN."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        reward = math.nan if self.steps == 5 else 1.0
        return np.zeros(2, np.float32), reward, False, self.steps == 20, {}


@pytest.mark.parametrize("is_instance", [False, True])
def test_where_no_command_can_resume_the_advice_is_a_call(
    tmp_path: Path, is_instance: bool
) -> None:
    """Of a class that another process does not find, and of an environment that exists."""

    class Hidden(NaNEnv):
        pass

    def env() -> Any:
        return gymnasium.vector.SyncVectorEnv([NaNEnv] * 16) if is_instance else Hidden

    folder = tmp_path / "run"
    small = SMALL | {"total_steps": ITERATION, "eval_episodes": 0}
    with pytest.raises(NonFiniteError) as caught:
        gpurl.train("ppo", env(), run_dir=str(folder), **small)
    call = f"gpurl.resume({str(folder)!r}, env=..., nan='reset-envs')"
    assert f"To skip such steps and continue: {call}. For the steps" in str(caught.value)
    skips = {"env": env(), "nan": "reset-envs", "total_steps": 3 * ITERATION}
    assert gpurl.resume(folder, **skips).outcome.steps == 3 * ITERATION
