"""Whole runs through the Python API and the command line: files, stopping, killing, and every kind
of bad input.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpurl
from gpurl.api import evaluate_run, resume, train
from gpurl.checkpoints.folders import (
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from gpurl.cli.main import main
from gpurl.cli.settings import parse_train
from gpurl.engine.statistics import EpisodeStatistics
from gpurl.errors import CheckpointError, EnvError, UsageError
from gpurl.run.evaluator import Player
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.small_runs import (
    ITERATION,
    ROOT,
    SMALL,
    assert_same,
    exit_code,
    small_run,
    start,
    state_of,
)
from tests.tiny_envs import RandomWalk

# ---- what a run leaves behind ----


@pytest.mark.curve
def test_a_run_leaves_its_files_and_a_policy(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 4)
    assert run.outcome.reason == "total_steps"
    assert run.outcome.steps == 4 * ITERATION
    names = {path.name for path in run.folder.iterdir()}
    assert {
        "config.yaml",
        "command.txt",
        "metrics.jsonl",
        "learning_curve.png",
        "checkpoints",
        "records",
    } <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    logged = set().union(*rows)
    assert {
        "time/fps",
        "train/value_loss",
        "train/approx_kl",
        "train/learning_rate",
        "eval/mean_reward",
        "time/total_timesteps",
    } <= logged
    policy = gpurl.load(run.folder)
    one, many = policy.act(np.zeros(3, np.float32)), policy.act(torch.zeros(5, 3))
    assert one.shape == (1,)
    assert isinstance(one, np.ndarray)
    assert many.shape == (5, 1)
    assert torch.is_tensor(many)
    assert isinstance(policy.value(np.zeros(3, np.float32)), float)
    with pytest.raises(UsageError, match=r"observations of shape \(3,\)"):
        policy.act(np.zeros(4))


def test_the_written_configuration_repeats_the_run(tmp_path: Path) -> None:
    first = small_run(tmp_path / "one", 2, gae_lambda=0.9)
    from gpurl.run.config_file import read_config

    values = read_config(first.folder / "config.yaml")
    again = train(
        values.pop("algorithm"), values.pop("env"), **{**values, "run_dir": str(tmp_path / "two")}
    )
    assert_same(state_of(first.folder), state_of(again.folder))


def test_a_resumed_run_writes_down_how_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_run(tmp_path / "run", 2).folder
    resume(folder, total_steps=3 * ITERATION)
    from gpurl.run.config_file import read_config

    assert read_config(folder / "config.yaml")["total_steps"] == 3 * ITERATION
    assert len((folder / "command.txt").read_text().splitlines()) == 2
    assert (
        main(["train", "--config", str(folder / "config.yaml"), f"root={tmp_path / 'again'}"]) == 0
    )
    (folder / "config.yaml").chmod(0o400)
    (folder / ".config.yaml.new").mkdir()  # what is to become config.yaml cannot be written
    resume(folder, total_steps=4 * ITERATION)
    assert f"config.yaml of {folder} is not updated: " in caplog.text
    assert read_config(folder / "config.yaml")["total_steps"] == 3 * ITERATION
    with pytest.raises(
        UsageError, match=r"continues in its folder, .*run: omit run_dir .*elsewhere"
    ):
        resume(folder, run_dir=str(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()


class WalkWithLists(RandomWalk):
    """Options of many values, also those whose default can change in place."""

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        sizes: tuple[int, ...] | None = None,
        names: list[str] = [],  # noqa: B006
        weights: dict[str, float] = {"step": 1.0},  # noqa: B006
        limits: tuple[float, ...] = (0.0, 1.0),
    ) -> None:
        super().__init__(num_envs, device, seed)


def test_options_of_many_values(capsys: pytest.CaptureFixture[str]) -> None:
    env = f"{__name__}:WalkWithLists"
    options = {"sizes": [1, 2], "names": ("a",), "weights": {"step": 2.0}, "limits": [1.0]}
    made = make_settings("ppo", env, env_options=options).env_options
    assert made == {"sizes": (1, 2), "names": ["a"], "weights": {"step": 2.0}, "limits": (1.0,)}
    with pytest.raises(UsageError, match=r"names is \[1\]; it must be a list of str$"):
        make_settings("ppo", env, env_options={"names": [1]})
    # a tuple is a flag, others are set in a file
    settings, _ = parse_train(["ppo", env, "--env.limits", "0.5", "2"])
    assert settings.env_options == {"limits": (0.5, 2.0)}
    for name in ("sizes", "names", "weights"):
        assert main(["train", "ppo", env, f"--env.{name}", "1"]) == 2
        assert f"under env_options: {name}\n" in capsys.readouterr().err


def test_objects_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"env option env holds a function; .* goes into a module of your own"
    ):
        train(
            "ppo", "gymnasium_cpu", env_options={"env": lambda: None}, run_dir=str(tmp_path / "run")
        )
    with pytest.raises(UsageError, match=r"env option task_options holds a Generator"):
        make_settings(
            "ppo",
            "gymnasium_cpu:Pendulum-v1",
            env_options={"task_options": {"g": [1.0, np.random.default_rng()]}},
        )
    assert make_settings(
        "ppo", "chasing", env_options={"dim": np.int64(3)}, num_envs=np.int64(4)
    ).to_dict()["env_options"] == {"dim": 3}
    assert not (tmp_path / "run").exists()


def test_a_simulator_that_cannot_be_saved_goes_on_with_other_episodes(tmp_path: Path) -> None:
    settings = make_settings(
        "ppo",
        "gymnasium_cpu:Pendulum-v1",
        **{**SMALL, "eval_episodes": 0, "total_steps": 4 * ITERATION},
    )
    first, again = (make_trainer(settings, torch.device("cpu")) for _ in range(2))
    first.start()
    beginning = first.engine.obs.clone()
    first.iterate()
    again.restore(first.state())
    assert not torch.equal(again.engine.obs, beginning)
    again.env.close()
    first.env.close()


@pytest.mark.curve
def test_endless_episodes_end_the_evaluation_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impatient = functools.partialmethod(Player.play_each, max_steps=2000)
    monkeypatch.setattr(Player, "play_each", impatient)
    run = small_run(tmp_path / "run", 2, env="tests.tiny_envs:Endless", eval_every=ITERATION)
    assert run.outcome.steps == 2 * ITERATION
    assert run.outcome.evaluation == {}
    assert (run.folder / "learning_curve.png").exists()
    message = capsys.readouterr().err
    assert (
        message.count(
            "no more evaluations: Endless: episodes of 4 of 4 environments did not end in 2,000 "
            "steps"
        )
        == 1
    )


def test_means_of_an_environments_own_terms_survive_a_resume() -> None:
    env = RandomWalk(4)
    env.reset(seed=0)
    whole, first, second = (EpisodeStatistics(4, env.device) for _ in range(3))
    for number, value in enumerate((1.0, 2.0, 6.0)):
        timestep = env.step(torch.zeros(4, 2))
        timestep.info["log"] = {"height": torch.tensor(value)}
        whole.add(timestep)
        (first if number < 1 else second).add(timestep)
        if number == 0:
            second.load_state_dict(first.state_dict(), steps=4)
    for statistics in (second, whole):
        entries = statistics.read(
            {name: float(value) for name, value in statistics.metrics().items()}, 12
        )
        assert entries["env/height"] == 3.0
    assert "env/height" not in whole.read(
        {name: float(value) for name, value in whole.metrics().items()}, 12
    )  # nothing since


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    states = [
        state_of(small_run(tmp_path / str(number), 3, seed=seed).folder)
        for number, seed in enumerate((1, 1, 2))
    ]
    assert_same(states[0], states[1])
    with pytest.raises(AssertionError):
        assert_same(states[0], states[2])


def test_stopping_by_return_and_by_time(tmp_path: Path) -> None:
    by_return = small_run(tmp_path / "r", 1000, stop_return=-1e9, eval_every=2 * ITERATION)
    assert (by_return.outcome.reason, by_return.outcome.steps) == ("stop_return", 2 * ITERATION)
    by_time = small_run(tmp_path / "t", 10**6, max_seconds=0.5)
    assert by_time.outcome.reason == "max_seconds"


def test_save_every_counts_iterations_and_old_checkpoints_go(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 7, save_every="2i", keep_checkpoints=2, eval_episodes=0)
    assert [path.name for path in list_checkpoints(run.folder / "checkpoints")][-2:] == [
        f"step_{n * ITERATION:012d}" for n in (6, 7)
    ]


# ---- bad input ----


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train", "ppo", "chasin"], 2, "did you mean chasing?"),
        (["train", "pp", "chasing"], 2, "did you mean ppo"),
        (["train", "ppo", "chasing", "--num-env", "8"], 2, "--num-envs"),
        (["train", "ppo", "chasing", "--env.dim", "9"], 2, "dim must be 1 to 8, got 9"),
        (
            ["train", "ppo", "pendulum", "num_envs=10", "horizon=3", "minibatches=4"],
            2,
            "num_envs * horizon = 30 rows into minibatches = 4",
        ),
        (["train", "ppo", "pendulum", "--device", "cuda:7"], 2, "device cuda:7 does not exist"),
        (["train", "ppo", "pendulum", "--device", "mps"], 2, "device mps is not supported"),
        (
            ["train", "ppo", "pendulum", "--initial-std", "0"],
            2,
            "initial_std must be above 0, got 0.0",
        ),
        (["train", "--num-envs", "8", "ppo", "pendulum"], 2, "neither in front of the settings"),
        (
            ["train", "ppo", "pendulum", "--nan", "ignore"],
            2,
            "it must be one of raise, skip, reset-envs",
        ),
        (
            ["train", "ppo", "pendulum", "--tag-style", "wandb"],
            2,
            "it must be one of sb3, cleanrl, rsl_rl, rl_games",
        ),
        (
            ["train", "ppo", "pendulum", "--epochs", "1", "--minibatches", "1"],
            2,
            "schedule kl needs a second step on each rollout",
        ),
        (
            ["train", "ppo", "pendulum", "--learning-rate", "inf"],
            2,
            "learning_rate must be a finite number, got inf",
        ),
        (
            ["train", "ppo", "pendulum", "--value-coef", "-1"],
            2,
            "value_coef must be at least 0, got -1.0",
        ),
        (
            ["train", "ppo", "pendulum", "--eval-episodes", "0", "--stop-return", "1"],
            2,
            "stop_return 1.0 needs evaluations",
        ),
        (["train", "ppo", "cart_pole", "--squash"], 2, "squash is for continuous actions"),
        (["train", "a2c", "cart_pole", "--clip-range", "0.1"], 2, "a2c clips nothing"),
        (
            ["train", "ppo", "pendulum", "--save-every", "soon"],
            2,
            "seconds as 60s or iterations as 100i",
        ),
        (
            ["train", "sac", "pendulum", "--critic-network.hidden", "0"],
            2,
            "critic-network: hidden must be at least 1",
        ),
        (
            ["train", "ppo", "pendulum", "--config", "missing.yaml"],
            2,
            "there is no config file missing.yaml",
        ),
        (["train", "--resume", "nowhere"], 2, "nowhere does not exist: give the folder of a run"),
        (["trian"], 2, "did you mean train?"),
        *(
            ([command, "nowhere"], 2, "gpurl: nowhere does not exist: give the folder of a run")
            for command in ("eval", "play", "export")
        ),
        (["train", "ppo", "pendulum", "--nan", "rise"], 2, "nan is 'rise'; did you mean raise?"),
    ],
)
def test_bad_words_are_named_with_what_would_do(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(words) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [(["train", "ppo", "pendulum", "--learning-rate", "inf"], 2), (["eval", "nowhere"], 2)],
)
def test_a_process_ends_with_the_code_and_without_a_traceback(words: list[str], code: int) -> None:
    process = start(words)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors.startswith("gpurl: ")
    assert "Traceback" not in errors


def test_more_environments_than_memory_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurl.run.memory_need.available_bytes", lambda device: 2**28)
    message = (
        r"1,000,000,000 environments of chasing and ppo take [\d,.]+ GiB on cpu, where 0.2 GiB "
        r"are free: num_envs must be below [\d,]+$"
    )
    with pytest.raises(UsageError, match=message):
        small_run(tmp_path / "run", 1, env="chasing", num_envs=10**9)
    assert not (tmp_path / "run").exists()
    assert small_run(tmp_path / "run", 1, env="chasing").outcome.steps == ITERATION


def test_unknown_settings_name_the_near_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'learning_rte'; did you mean learning_rate\? gpurl config .* prints all"
    ):
        small_run(tmp_path / "run", 1, learning_rte=1e-3)
    with pytest.raises(UsageError, match=r"horizon is 'long'; it must be int"):
        small_run(tmp_path / "run", 1, horizon="long")
    for values in (
        {"num_envs": True},
        {"seed": True},
        {"threads": False},
        {"learning_rate": True},
        {"env_options": {"dim": True}},
    ):
        with pytest.raises(UsageError, match=r" is (True|False); it must be (int|float)"):
            train("ppo", "chasing", **values)
    with pytest.raises(UsageError, match=r"hidden is \(True,\); it must be a list of int"):
        small_run(tmp_path / "run", 1, network={"hidden": [True]})
    with pytest.raises(UsageError, match=r"^network: hidden is 16; it must be a list of int"):
        small_run(tmp_path / "run", 1, network={"hidden": 16})
    for name in ("actor_network", "critic_network"):
        with pytest.raises(UsageError, match=rf"^{name}: body is 'mpl'; it must be one of"):
            train("sac", "pendulum", **{name: {"body": "mpl"}})
    with pytest.raises(UsageError, match=r"max_seconds is 'soon'; it must be float or None"):
        small_run(tmp_path / "run", 1, max_seconds="soon")
    with pytest.raises(UsageError, match=r"an environment is a name, .* got 7"):
        train("ppo", 7)  # type: ignore[arg-type]


def test_paths_and_devices_are_settings_too(tmp_path: Path) -> None:
    run = train(
        "ppo",
        "pendulum",
        **{
            **SMALL,
            "run_dir": tmp_path / "run",
            "device": torch.device("cpu"),
            "total_steps": ITERATION,
        },
    )
    assert run.folder == tmp_path / "run"


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RandomWalk, "observe", lambda self, state: state["x"].double())
        with pytest.raises(
            EnvError, match=r"RandomWalk.observe: wanted a tensor of shape .* got torch.float64"
        ):
            small_run(tmp_path / "run", 1, env="tests.tiny_envs:RandomWalk")
    assert (
        small_run(tmp_path / "run", 1, env="tests.tiny_envs:RandomWalk").outcome.steps == ITERATION
    )


def test_an_existing_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    small_run(tmp_path / "run", 1)
    with pytest.raises(UsageError, match="--resume"):
        small_run(tmp_path / "run", 1)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    small_run(tmp_path / "run", 1)
    from gpurl.api import run

    values = {**SMALL, "run_dir": str(tmp_path / "run"), "total_steps": 10**4}
    with pytest.raises(UsageError, match=r"algorithm ppo, this run a2c"):
        run(make_settings("a2c", "pendulum", **{**values, "minibatches": 1}), tmp_path / "run")
    with pytest.raises(UsageError, match=r"observation_space .*, this run"):
        run(make_settings("ppo", "chasing", **values), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"hidden": [8]}}, r"network.hidden \[16\], this run \[8\]"),
        ({"network": {"memory": "gru"}}, r"network.memory none, this run gru"),
        ({"normalize_obs": False}, r"normalize_obs True, this run False"),
        ({"squash": True}, r"squash False, this run True"),
        ({"initial_std": 0.3}, r"initial_std 1.0, this run 0.3"),
        ({"seed": 7}, r"seed 0, this run 7"),
    ],
)
def test_what_shapes_a_run_stays_when_it_is_resumed(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    with pytest.raises(UsageError, match=message):
        resume(folder, total_steps=10**4, **changes)


@pytest.mark.parametrize("schedule", ["constant", "kl"])
def test_a_resumed_run_takes_the_rate_and_the_evaluations_it_is_given(
    tmp_path: Path, schedule: str
) -> None:
    folder = small_run(tmp_path / "run", 2, schedule=schedule, eval_every=10**6).folder
    resume(
        folder,
        total_steps=5 * ITERATION,
        learning_rate=1e-5,
        schedule="constant",
        eval_every=2 * ITERATION,
    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = {
        record["step"]: record["train/learning_rate"]
        for record in records
        if "train/learning_rate" in record
    }
    assert [rates[step * ITERATION] for step in (3, 4, 5)] == pytest.approx([1e-5] * 3)
    evaluated = [record["step"] for record in records if "eval/mean_reward" in record]
    assert evaluated == [step * ITERATION for step in (2, 4, 5)]


def test_a_resume_from_an_older_checkpoint_keeps_its_own_later_one(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 3, save_every="1i", eval_episodes=0).folder
    before, checkpoints = load_checkpoint(folder)[0]["model"], folder / "checkpoints"
    (checkpoints / "LATEST").write_text(f"step_{2 * ITERATION:012d}\n")
    resume(folder, learning_rate=0.1)
    parts, manifest = load_checkpoint(folder)
    assert manifest["step"] == 3 * ITERATION
    assert parts["meta"]["settings"]["learning_rate"] == 0.1
    assert any(not torch.equal(value, before[name]) for name, value in parts["model"].items())
    written = (checkpoints / f"step_{3 * ITERATION:012d}").stat().st_ino
    resume(folder)  # has nothing to do, and nothing to replace
    assert (checkpoints / f"step_{3 * ITERATION:012d}").stat().st_ino == written


def test_a_cut_off_checkpoint_falls_back_to_the_older_one_and_tells_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_run(tmp_path / "run", 4, save_every="1i", eval_episodes=0).folder
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    model = newest / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    assert resume(folder, total_steps=5 * ITERATION).outcome.steps == 5 * ITERATION
    (message,) = caplog.messages
    assert f"{newest.name}: model.safetensors has" in message


def test_a_damaged_best_checkpoint_leaves_the_latest_to_evaluate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_run(tmp_path / "run", 4, eval_every=ITERATION).folder
    save_checkpoint(folder / "checkpoints", 10**6, load_checkpoint(folder)[0])
    expected = evaluate_run(folder, 4, "cpu", best=False)
    best = best_checkpoint(folder)
    assert best is not None
    (best / "manifest.json").write_text("{}")
    assert evaluate_run(folder, 4, "cpu") == expected
    (message,) = caplog.messages
    assert re.search(rf"loaded \S+step_000001000000 instead: .*{best.name}", message)


def test_a_full_disk_warns_trains_on_and_ends_with_its_own_code(tmp_path: Path) -> None:
    code = (
        "import resource, sys\nfrom gpurl.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "words = 'horizon=8 num_envs=16 total_steps=6e3 save_every=9i log_every=0 eval_episodes=0 "
        "device=cpu network.hidden=999'.split()\n"
        f"sys.exit(main(['train', 'ppo', 'pendulum', *words, r'run_dir={tmp_path / 'run'}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert "no checkpoint at step" in done.stdout + done.stderr
    assert ": total_steps reached" in done.stdout
    assert "its last state is in no checkpoint" in done.stdout
    for name in (
        "cannot write metrics.jsonl",
        "cannot write TensorBoard's event file",
        "no learning curve",
    ):
        assert done.stderr.count(name) == 1, done.stderr
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [ITERATION * number for number in range(1, len(steps) + 1)]
    assert 5 < len(steps) < 47


def test_a_checkpoint_folder_is_not_a_run_folder(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 2).folder
    step = list_checkpoints(folder / "checkpoints")[-1]
    before = sorted(path.name for path in step.iterdir())
    with pytest.raises(UsageError, match="is not a run folder"):
        resume(folder / "checkpoints", total_steps=10_000)
    with pytest.raises(UsageError, match="is a checkpoint, which a new run continues"):
        resume(step, total_steps=10_000)
    assert sorted(path.name for path in step.iterdir()) == before
    assert resume(folder, total_steps=3 * ITERATION).outcome.steps == 3 * ITERATION


def test_limits_of_time_count_anew_and_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    folder = small_run(tmp_path / "run", 10_000, max_seconds=0.5).folder
    again = resume(folder)
    assert again.outcome.reason == "max_seconds"
    assert torch.get_num_threads() == before
    times = [
        json.loads(line)["time/time_elapsed"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "time/fps" in line
    ]
    assert times[-1] >= 0.9


def test_a_compiled_task_is_the_same_task(tmp_path: Path) -> None:
    """Chasing draws inside `transition`; the same seed then gives the same rollout but for
    rounding.
    """
    from gpurl.envs.chasing import Chasing

    plain, compiled = Chasing(64, seed=3), Chasing(64, seed=3)
    compiled.compile()
    action = torch.linspace(-1.0, 1.0, 128).view(64, 2)
    for env in (plain, compiled):
        env.reset()
    for _ in range(3):
        steps = [env.step(action) for env in (plain, compiled)]
        torch.testing.assert_close(steps[1][:4], steps[0][:4], rtol=1e-5, atol=1e-5)
    with pytest.raises(
        UsageError,
        match=r"compile needs a TorchEnv; gymnasium_cpu:Pendulum-v1 is not one",
    ):
        train(
            "ppo",
            "gymnasium_cpu:Pendulum-v1",
            num_envs=1,
            compile=True,
            run_dir=str(tmp_path / "run"),
        )


def test_products_in_bf16_learn_about_the_same(tmp_path: Path) -> None:
    """bfloat16 has 8 bits: outputs are off by some percent of their spread, gradients too; weights
    stay float32.
    """
    from gpurl.nn.actor_critic import ActorCritic, NetworkConfig
    from gpurl.nn.mlp import set_dtype

    torch.manual_seed(0)
    network = ActorCritic(NetworkConfig(), 8, 2)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x, of_output, of_value = torch.randn(500, 8), torch.randn(500, 2), torch.randn(500)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        set_dtype(network, dtype)
        output, value = network(x)
        loss = (output * of_output).sum() + (value * of_value).sum()
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        results.append([output.detach(), value.detach(), *gradients])
        assert {tensor.dtype for tensor in results[-1]} == {torch.float32}
    for exact, rounded in zip(*results):
        error = float((exact - rounded).norm() / exact.norm())
        assert error < 0.02
    assert not torch.equal(results[0][0], results[1][0])
    run = small_run(tmp_path / "run", 3, precision="bf16")
    assert run.outcome.steps == 3 * ITERATION
    with pytest.raises(UsageError, match="precision tf32 needs a GPU, this run is on cpu"):
        small_run(tmp_path / "other", 1, precision="tf32")
