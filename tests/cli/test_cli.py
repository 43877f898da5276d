"""The command line, called in this process: every command on a small run, every spelling of a
setting, exit codes of wrong words.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import yaml

from gpurl.cli import doctor
from gpurl.cli import main as cli
from gpurl.cli.main import main, print_json
from gpurl.cli.settings import parse_profile, parse_train
from gpurl.discovery import NOT_ENVS
from gpurl.envs.registry import env_names, env_options, option_help, resolve_env
from gpurl.errors import (
    CheckpointError,
    EnvError,
    GpurlError,
    NonFiniteError,
    UsageError,
    install_extra,
)
from gpurl.run.config_file import read_config
from tests.small_runs import exit_code, small_run

ROOT = Path(__file__).resolve().parent.parent.parent
ITERATION = 16 * 8
SMALL = [
    *(
        "num_envs=16",
        "--horizon",
        "8",
        "--minibatches=2",
        f"total_steps={3 * ITERATION}",
        "eval_episodes=4",
        "network.hidden=16",
    ),
    *("device=cpu", "log_every=0", "tag_style=cleanrl"),
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, trained by the command line."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "ppo", "pendulum", *SMALL, f"run_dir={folder}", "quiet=true"]) == 0
    return folder


def settings(*words: str) -> dict[str, Any]:
    parsed = parse_train(list(words))[0]
    return parsed.to_dict() | {"run_dir": parsed.train.run_dir}


# ---- what there is ----


def test_graphs_are_switched_off_by_a_word() -> None:
    for words in (["--graph", "off"], ["--graph=off"], ["graph=off"]):
        assert settings("ppo", "chasing", *words)["graph"] == "off"
    assert settings("ppo", "chasing")["graph"] == "auto"
    with pytest.raises(
        UsageError, match=r"graph is 'on'; it must be one of auto, full, policy, off"
    ):
        settings("ppo", "chasing", "--graph", "on")


def test_help_loads_no_torch() -> None:
    """Which takes seconds."""
    code = "import sys; from gpurl.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert "gpurl.cli.main" in loaded
    assert not {"torch", "triton", "matplotlib"} & set(loaded)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(
            f"gpurl {command} " in text or f"gpurl {command}\n" in text for command in cli.COMMANDS
        )
    assert main([]) == 2


def test_a_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's import ends the process there."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    with pytest.raises(SystemExit) as ended:
        cli.run()
    assert ended.value.code == 2
    assert "this folder does not exist any more" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import gpurl

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpurl {gpurl.__version__}\n"


def test_envs_lists_every_env_file_with_its_spaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {}
    for width in ("60", "100", "200"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(["envs"]) == 0
        text = capsys.readouterr().out
        assert width == "60" or "[...]" not in text  # no sentence is cut
        rows[width] = {
            line.split()[0].partition(":")[0]: line
            for line in text.splitlines()
            if line.startswith("  ") and not line.startswith("      ")
        }
    folders = [ROOT / "envs", ROOT / "envs" / "mujoco"]
    files = {path.stem for folder in folders for path in folder.glob("[a-z]*.py")}
    for listed in rows.values():
        assert listed.keys() - {"name"} == (files - NOT_ENVS) | {"isaac_gym"}
        assert listed["pendulum"].split()[:6] == ["pendulum", "Box", "(3,)", "Box", "(1,)", "200"]
    assert "swing up a rod" in rows["200"]["pendulum"]
    assert "four legs" in rows["200"]["ant"]
    assert max(map(len, rows["100"].values())) <= 100


def test_envs_explains_one_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "chasing"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "observation Box (8,), action Box (2,), steps 1,024" in text
    assert "--env.dim coordinates of the space, 1 to 8 (default 2)" in text
    # a comment above the declaration, a comment behind it, and that of a base
    assert main(["envs", "ant"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert '--env.simulator "mujoco": its own C on a CPU; "warp": mujoco-warp; "auto":' in text
    assert "--env.healthy-reward reward of a step without a fall (default 1.0)" in text
    assert "--env.frame-skip steps of physics in a step of the environment (default 5)" in text


def test_arguments_of_a_gymnasium_task_are_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["envs", "Pendulum-v1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--env.g (default 10.0)" in text
    assert "task-options" not in text
    # those that no flag sets
    assert main(["envs", "frame_stack:catch"]) == 0
    assert "  task_options, in a file of --config under env_options\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "ppo", "Pendulum-v1", "--help"])
    assert "--env.g FLOAT " in capsys.readouterr().out
    assert main(["config", "ppo", "Pendulum-v1"]) == 0
    assert "\n#   g: 10.0\n" in capsys.readouterr().out
    # a run has them, and an evaluation may change them
    small = ["--num-envs", "2", "--horizon", "8", "--minibatches", "1", "--total-steps", "16"]
    run = ["--run-dir", str(tmp_path / "run"), "--quiet", "--device", "cpu"]
    assert main(["train", "ppo", "Pendulum-v1", "--env.g", "3.7", *small, *run]) == 0
    assert read_config(tmp_path / "run" / "config.yaml")["env_options"] == {"g": 3.7}
    returns = []
    for options in ([], ["--env-options", "g=3.7"], ["--env-options", "g=9"]):
        words = ["--episodes", "2", "--json", "--device", "cpu", *options]
        assert main(["eval", str(tmp_path / "run"), *words]) == 0
        returns.append(json.loads(capsys.readouterr().out)["eval/mean_reward"])
    assert returns[0] == returns[1] != returns[2]


def test_every_option_of_every_environment_is_explained() -> None:
    for name in env_names():
        env_class, _ = resolve_env(name)
        unexplained = env_options(env_class).keys() - option_help(env_class).keys()
        assert unexplained <= {"task", "env"}, name


def test_doctor_names_every_extra_and_what_of_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    simulators = {"mujoco", "envpool", "minari", "dev"}  # the section above names them
    assert set(project["optional-dependencies"]) == set(doctor.EXTRAS) | simulators
    monkeypatch.setitem(doctor.EXTRAS, "video", (("json", "no_such_module"), "films"))
    monkeypatch.setitem(doctor.EXTRAS, "gpu", (("no_such_module",), "figures"))
    monkeypatch.setitem(doctor.EXTRAS, "plot", (("json",), "intervals"))
    assert main(["doctor"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "plot: there (intervals)" in lines
    assert f"gpu: missing (figures; get it by {install_extra('gpu')})" in lines
    how = install_extra("video")
    assert f"video: missing without no_such_module (films; get it by {how})" in lines


def test_doctor_names_versions_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "no_such_package"))
    monkeypatch.setattr(
        doctor,
        "SIMULATORS",
        {
            "json": ("tasks of JSON", "pip install json"),
            "no_such_module": ("nothing", "pip install it"),
        },
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"torch {torch.__version__}".split("+")[0] in [line.split("+")[0] for line in lines]
    assert f"triton {triton.__version__}" in lines
    assert "no_such_package is missing: pip install -e . -c constraints.txt" in lines
    assert "json: there (tasks of JSON)" in lines
    assert "no_such_module: missing (nothing; get it by pip install it)" in lines
    assert any(line.startswith("no CUDA device: ") for line in lines)
    count = torch.get_num_threads()
    threads = "1 thread," if count == 1 else f"{count} threads,"
    assert any(f"torch uses {threads}" in line for line in lines)


def test_a_default_that_is_changed_keeps_the_help_of_its_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert exit_code(["train", "fast_td3", "chasing", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for line in (
        "Decoupled weight decay (AdamW). [0.1]",
        "Updates of the critics per update of the actor. (policy_frequency in CleanRL) [1]",
    ):
        assert line in text


# ---- spellings and where settings come from ----


def test_all_spellings_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "algorithm: ppo\nenv: chasing\nnum_envs: 64\ntotal_steps: 1e6\nlearning_rate: "
        "1e-4\nstagger: false\n"
        "network: {hidden: [32, 16]}\nenv_options: {dim: 3, discrete: true}\n"
    )
    flags = [
        *(
            "--num-envs",
            "64",
            "--total-steps",
            "1_000_000",
            "--learning-rate",
            "0.0001",
            "--no-stagger",
            "--network.hidden",
            "32",
            "16",
        ),
        *("--env.dim", "3", "--env.discrete"),
    ]
    equals = [
        "num_envs=64",
        "total_steps=1e6",
        "learning_rate=1e-4",
        "stagger=False",
        "network.hidden=[32, 16]",
        "env.dim=3",
        "env.discrete=true",
    ]
    expected = settings("ppo", "chasing", *flags)
    assert (
        expected["num_envs"],
        expected["total_steps"],
        expected["learning_rate"],
        expected["stagger"],
    ) == (64, 10**6, 1e-4, False)
    assert expected["network"]["hidden"] == [32, 16]
    assert expected["env_options"] == {"dim": 3, "discrete": True}
    assert (
        settings(
            "ppo", "chasing", *(flag.replace("-", "_").replace("__", "--", 1) for flag in flags)
        )
        == expected
    )
    assert settings("ppo", "chasing", *equals) == expected
    assert settings("ppo", "chasing", *(f"--{word}" for word in equals)) == expected
    assert settings("--config", str(file)) == expected
    assert settings("ppo", "chasing", f"--config={file}") == expected
    file.write_text("learning_rate: 1.0e-4\nnum_envs: 64\n")
    assert settings("ppo", "chasing", "--config", str(file), *flags[2:4], *flags[6:]) == expected


def test_overrides_of_a_simulators_task_hold_equal_signs() -> None:
    text = "env.episodeLength=1e3 task.randomize=True"
    for words in (["--env.overrides", text], [f"env.overrides={text}"]):
        for parse in (parse_train, parse_profile):
            assert parse(["ppo", "isaac_gym:Ant", *words])[0].env_options == {"overrides": text}


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "horizon: 4\ngamma: 0.5\nnetwork: {hidden: [8], activation: relu}\n"
    )
    values = settings(
        "ppo",
        "pendulum",
        "--config",
        str(tmp_path / "mine.yaml"),
        "gamma=0.25",
        "network.hidden=4,4",
    )
    assert (values["horizon"], values["gamma"], values["num_envs"]) == (
        4,
        0.25,
        1024,
    )  # file, flag, preset
    assert values["network"]["hidden"] == [4, 4]
    assert values["network"]["activation"] == "relu"


@pytest.mark.parametrize(
    ("names", "text", "flags", "expected"),
    [
        (
            ("dqn", "cart_pole"),
            "batch_size: 8192\n",
            ("--learning-starts", "9000"),
            {"batch_size": 8192, "learning_starts": 9000},
        ),
        (
            ("ppo", "chasing"),
            "epochs: 1\nminibatches: 1\n",
            ("schedule=linear",),
            {"epochs": 1, "minibatches": 1, "schedule": "linear"},
        ),
        (
            ("ppo", "chasing"),
            "graph: policy\nrollout: persistent\nnum_envs: 0\n",
            ("--graph", "full", "--num-envs", "8"),
            {"graph": "full", "rollout": "persistent", "num_envs": 8},
        ),
    ],
    ids=str,
)
def test_a_file_and_flags_are_checked_together(
    names: tuple[str, str],
    text: str,
    flags: tuple[str, ...],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The file alone is refused, with the flags it is valid."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    values = settings(*names, "--config", str(file), *flags)
    assert {name: values[name] for name in expected} == expected
    with pytest.raises(UsageError):
        parse_train([*names, "--config", str(file)])


def test_a_files_network_is_checked_together_with_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("network: {body: simba, hidden: [64, 32], activation: relu}\n")
    words = ["ppo", "chasing", "--config", str(file)]
    assert settings(*words, "network.hidden=64,64")["network"]["hidden"] == [64, 64]
    assert exit_code(["train", *words]) == 2
    assert "hidden is (64, 32)" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_resume_with_a_file_and_flags_checks_them_together(
    run_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("stop_return: 100.0\neval_episodes: 0\n")
    words = ["--resume", str(run_folder), "--config", str(file)]
    resumed = parse_train([*words, "--eval-episodes", "4"])[0].train
    assert (resumed.stop_return, resumed.eval_episodes) == (100.0, 4)
    with pytest.raises(UsageError, match="needs evaluations"):
        parse_train(words)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("run_dir=/tmp/a,b", "run_dir", "/tmp/a,b"),
        ("root=x=1", "root", "x=1"),
        ("root=[a]", "root", "[a]"),
        ("root=1e3", "root", "1e3"),
        ("--root=true", "root", "true"),
        ("max_seconds=None", "max_seconds", None),
        ("max_seconds=5", "max_seconds", 5.0),
        ("stop_return=-1.5", "stop_return", -1.5),
        ("--seed=2e3", "seed", 2000),
        ("device=cuda:1", "device", "cuda:1"),
        ("total_steps=2.5e3", "total_steps", 2500),
    ],
)
def test_values_arrive_as_they_are_meant(word: str, name: str, value: Any) -> None:
    got = settings("ppo", "chasing", word)[name]
    assert got == value
    assert type(got) is type(value)


def test_the_resolved_configuration_of_a_run_gives_the_same_settings(run_folder: Path) -> None:
    expected = settings(
        "ppo", "pendulum", *SMALL, "quiet=true"
    )  # all but the folder, which is that run's own
    assert expected["num_envs"] == 16
    assert settings("--config", str(run_folder / "config.yaml")) == expected
    assert yaml.safe_load((run_folder / "config.yaml").read_text()) | {"run_dir": None} == expected


def test_the_command_is_kept_as_it_was_typed(run_folder: Path) -> None:
    command = (run_folder / "command.txt").read_text()
    assert (
        command == f"gpurl train ppo pendulum {' '.join(SMALL)} run_dir={run_folder} quiet=true\n"
    )


def test_resume_takes_the_saved_settings_and_goes_on(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, options = parse_train(["--resume", str(run_folder), "--total-steps", "9999"])
    assert options.resume == run_folder
    assert (saved.train.num_envs, saved.train.total_steps) == (16, 9999)
    (tmp_path / "more.yaml").write_text("gamma: 0.5\nnetwork: {activation: relu}\n")
    changed = settings("--resume", str(run_folder), "--config", str(tmp_path / "more.yaml"))
    assert changed == {
        **saved.to_dict(),
        "run_dir": None,
        "total_steps": 3 * ITERATION,
        "gamma": 0.5,
        "network": {**saved.to_dict()["network"], "activation": "relu"},
    }
    with pytest.raises(UsageError, match="leave out ppo chasing"):
        parse_train(["ppo", "chasing", "--resume", str(run_folder)])
    assert (
        main(["train", "--resume", str(run_folder), f"total_steps={4 * ITERATION}", "quiet=false"])
        == 0
    )
    out = capsys.readouterr().out
    assert f"ended after {4 * ITERATION:,} steps: total_steps reached" in out
    assert f"run folder {run_folder}" in out
    assert re.search(r"evaluated return -\d+\.\d\d ± \d+\.\d\d over 4 episodes", out)


# ---- commands on a run ----


def test_eval_prints_the_evaluation(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpurl.api import evaluate_run, load

    assert main(["eval", str(run_folder), "--episodes", "6", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    best = load(run_folder).step
    assert out.endswith(f", length 200.0, 6 episodes; policy of step {best:,}\n")
    assert out.startswith(f"return {evaluate_run(run_folder, 6, 'cpu')['eval/mean_reward']:.3f} ± ")
    assert main(["eval", str(run_folder), "--episodes", "6", "--latest"]) == 0
    latest = evaluate_run(run_folder, 6, "cpu", best=False)
    assert latest["step"] == load(run_folder, best=False).step
    out = capsys.readouterr().out
    assert out.startswith(f"return {latest['eval/mean_reward']:.3f} ± ")
    assert out.endswith(f"; policy of step {latest['step']:,.0f}\n")


def test_eval_plays_elsewhere(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpurl.api import evaluate_run

    def evaluated(*words: str) -> dict[str, Any]:
        assert main(["eval", str(run_folder), "--episodes", "4", "--json", *words]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    # the task itself, with other seeds and options
    here = evaluated()
    assert here == {"run": str(run_folder), **evaluate_run(run_folder, 4)}
    assert evaluated("--env", "pendulum") == here
    assert evaluated("--seed", "3") == evaluated("--seed", "3") != here
    short = evaluated("--env-options", "max_episode_steps=20")
    assert short["eval/mean_ep_length"] == 20.0
    # the other options stay those of the training
    from gpurl.api import train

    small = {"num_envs": 4, "horizon": 4, "minibatches": 1, "total_steps": 16, "quiet": True}
    options = {"dim": 3, "max_episode_steps": 30}
    solid = train("ppo", "chasing", run_dir=str(tmp_path / "solid"), env_options=options, **small)
    changed = evaluate_run(solid.folder, 2, env_options={"max_episode_steps": 20})
    assert changed["eval/mean_ep_length"] <= 20.0
    # the same task, stepped by somebody else
    there = evaluated("--env", "gymnasium_cpu:Pendulum-v1")
    assert there["eval/mean_ep_length"] == 200.0
    assert there["eval/mean_reward"] != here["eval/mean_reward"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "cart_pole"], r"trained on observations Box.*cart_pole has Box"),
        (["--env", "mountain_car_continuous"], r"observations Box.*\(3,\).*\(2,\)"),
        (["--env", "pendulun"], "did you mean pendulum"),
        (["--env-options", "gravity"], "options are NAME=VALUE, got 'gravity'"),
        (["--env-options", "a-b=3"], "options are NAME=VALUE"),
        (["--env-options", "x=[1"], "options are NAME=VALUE"),
        (["--env-options", "colour=3"], "colour"),
    ],
)
def test_eval_refuses_what_it_cannot_play(
    run_folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["eval", str(run_folder), *words]) == UsageError.exit_code
    assert re.search(message, capsys.readouterr().err)


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": -math.inf, "c": 1.5, "d": "e"})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": None, "c": 1.5, "d": "e"}


def test_play_prints_episodes_and_draws_the_first(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpurl.cli import play

    drawn: list[Any] = []
    original = play.plot_episode
    monkeypatch.setattr(
        play, "plot_episode", lambda *arguments: drawn.append(arguments) or original(*arguments)
    )
    assert main(["play", str(run_folder), "--episodes", "2", "--seed", "5"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert second.startswith("episode 2: return ")
    assert last == f"picture of the first episode: {run_folder / 'episode.png'}"
    assert (run_folder / "episode.png").stat().st_size > 10_000
    _, title, episode, signals = drawn[0]
    assert title == "ppo on pendulum"
    shapes = [column.shape for column in (episode.obs, episode.action, episode.reward)]
    assert shapes == [(201, 1, 3), (200, 1, 1), (200, 1)]
    # the last observation is that after the last step, not the first of the next episode
    assert np.abs(np.diff(episode.obs[-3:, 0, :2], axis=0)).max() < 0.5
    assert episode.end == "time limit"
    assert signals.observation_names == ["cos(angle)", "sin(angle)", "angular velocity"]
    assert signals.limits.tolist() == [[[-2.0]], [[2.0]]]
    number, rest = first.removeprefix("episode 1: return ").split(", ", 1)
    assert float(number) == pytest.approx(
        float(episode.reward.sum()), abs=2e-3
    )  # float32, added up in another order
    assert rest == "200 steps, time limit"


def test_play_plays_what_eval_evaluates(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another task, other options, another checkpoint, a member or all of them."""
    from gpurl.api import evaluate_run, film

    picture = tmp_path / "episode.png"
    words = ["play", str(run_folder), "--device", "cpu", "--episodes", "1", "--out", str(picture)]
    short = ["--env-options", "max_episode_steps=20"]
    assert main([*words, "--env", "gymnasium_cpu:Pendulum-v1", *short]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^episode 1: return .*, 20 steps, time limit$", out, re.M)
    assert out.endswith(f"picture of the first episode: {picture}\n")
    assert picture.is_file()
    # the same episode of every policy as `eval` plays
    trained = small_run(tmp_path / "run", 2, population=2, eval_every=ITERATION, eval_episodes=2)
    words[1] = str(trained.folder)
    returns = set()
    for more, chosen in (
        (["--latest"], {"best": False}),
        (["--member", "0"], {"member": 0}),
        (["--member", "1"], {"member": 1}),
        (["--member", "all"], {"member": "all"}),
    ):
        assert main([*words, "--seed", "3", *more]) == 0
        played = float(capsys.readouterr().out.removeprefix("episode 1: return ").split(",")[0])
        expected = evaluate_run(trained.folder, 1, "cpu", seed=3, **chosen)["eval/mean_reward"]
        assert played == pytest.approx(expected, abs=2e-3)
        shown = film(trained.folder, 1, "cpu", 3, height=16, max_fps=1.0, **chosen)
        for _ in shown:
            pass
        assert shown.episodes[0].episode_return == pytest.approx(expected, abs=2e-3)
        returns.add(played)
    assert len(returns) >= 2
    assert not (trained.folder / "episode.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "cart_pole"], "trained on observations Box"),
        (["--env", "cart_pole", "--video", "FILE.mp4"], "trained on observations Box"),
        (["--env-options", "colour=3"], "colour"),
        (["--member", "2"], "there is no member 2"),
        (["--out", "x.txt"], "a picture is a file .png, .svg, .pdf, got 'x.txt'"),
        (["--out", "x.png", "--video", "FILE.mp4"], "--out names the picture of an episode"),
        (["--out", "x.png", "--viewer"], "--out names the picture of an episode"),
    ],
)
def test_play_refuses_what_it_cannot_play(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    words = [str(tmp_path / word) if word == "FILE.mp4" else word for word in words]
    assert main(["play", str(run_folder), *words]) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_plot_draws_the_curve_again(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "learning_curve.png").unlink()
    kinds = {"a.png": b"\x89PNG", "b.SVG": b"<?xml", "c.pdf": b"%PDF"}
    for words, picture, start in (
        *((["--out", str(tmp_path / name)], tmp_path / name, kinds[name]) for name in kinds),
        ([], run_folder / "learning_curve.png", b"\x89PNG"),
    ):
        assert not picture.exists()
        assert main(["plot", str(run_folder), *words]) == 0
        assert capsys.readouterr().out == f"{picture}\n"
        assert picture.read_bytes().startswith(start)
    assert main(["plot", str(run_folder), "--out", str(tmp_path / "a")]) == UsageError.exit_code
    assert "a picture is a file .png, .svg, .pdf, got" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["play", "--episodes", "1"], ["plot"]])
def test_a_picture_that_cannot_be_written_belongs_elsewhere(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    target = tmp_path / "no_folder" / "x.png"
    assert main([*command, str(run_folder), "--out", str(target)]) == 1
    error = capsys.readouterr().err
    assert f"cannot write {target}: " in error
    assert error.endswith("; choose another place with --out\n")


# ---- wrong words ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evl"], "did you mean eval"),
        (["plto"], "did you mean plot"),
        (["check_env"], "did you mean check-env"),
        (["xyz"], "Known: train, tune, pbt, tournament, config, eval, play"),
        (["train", "a3c", "chasing"], "did you mean sac or a2c"),
        (["train", "ppo", "cartpole"], "did you mean cart_pole"),
        (["train", "ppo", "no.such.module"], "Known: acrobot"),
        (["train", "ppo", "chasing:big"], "has no tasks to choose from"),
        (
            ["train", "ppo", "mujoco:ant"],
            "name a task of mujoco without its folder: ant, half_cheetah",
        ),
        (["train", "ppo"], "environments: acrobot"),
        (
            ["train", "ppo", "chasing", "fast"],
            "one algorithm and one environment, got ppo chasing fast",
        ),
        (["train", "ppo", "chasing", "env.dmi=3"], "no option dmi; did you mean dim?"),
        (
            ["train", "ppo", "chasing", "learning_rat=1"],
            "--learning-rat is not known; did you mean --learning-rate? gpurl train ppo chasing "
            "--help lists what there is",
        ),
        (["train", "ppo", "chasing", "--procesess", "2"], "did you mean --processes?"),
        (["train", "ppo", "chasing", "num_envs=8.5"], "--num-envs must be a whole number, got '8"),
        (["train", "ppo", "chasing", "num_envs=8.5e0"], "must be a whole number, got '8.5e0'"),
        (["train", "ppo", "chasing", "--num-envs", "9" * 20], "a whole number below 2^63, got"),
        (["train", "ppo", "chasing", "--num-envs", "--quiet"], "--num-envs needs a value; gpurl"),
        (["train", "ppo", "chasing", "--learning-rate", "x"], "must be a number, got 'x'"),
        (["train", "ppo", "chasing", "--clip-range-value", "x"], "must be a number, got 'x'"),
        (["train", "ppo", "chasing", "--network.hidden", "8", "x"], "a whole number, got 'x'"),
        (["train", "ppo", "chasing", "--quiet", "x"], "--quiet is true or false, got 'x'"),
        (
            ["train", "ppo", "chasing", "--seed", "1", "x"],
            "'x' is the value of no setting; settings",
        ),
        (
            ["train", "ppo", "cart_pole", "--env.velocities", "maybe"],
            "--env.velocities is true or false, got 'maybe'",
        ),
        (["train", "ppo", "chasing", "--quiet=x"], "--quiet is true or false, got 'x'"),
        (["train", "ppo", "chasing", "-n", "8"], "gpurl: -n is not known"),
        (["train", "ppo", "chasing", "--schedule", "linea"], "'linea'; did you mean linear? it"),
        (["train", "ppo", "chasing", "num_envs=0"], "num_envs must be at least 1, got 0"),
        (["train", "ppo", "chasing", "eval_every=0"], "for no evaluations take eval_episodes 0"),
        (["train", "ppo", "chasing", "network.activation=sine"], "one of tanh, elu, relu"),
        (["train", "ppo", "chasing", "--config"], "--config needs a value"),
        (["train", "ppo", "chasing", "--network.options", "--quiet"], "takes pairs, as in"),
        (["train", "ppo", "chasing", "--network.options", "a=1"], "NAME VALUE, got 'a=1'"),
        (["train", "ppo", "chasing", "--callback"], "gpurl: --callback needs a value"),
        (["train", "ppo", "chasing", "--callback", "--quiet"], "gpurl: --callback needs a value"),
        (
            ["train", "ppo", "chasing", "--teacher", "x"],
            "--teacher is not known; it is a setting of bc; gpurl",
        ),
        (
            ["train", "sac", "pendulum", "clip_range=1"],
            "not known; it is a setting of a2c, ppo; gpurl train sac",
        ),
        (["eval"], "RUN, a run folder (required)"),
        (["eval", "RUN", "--episods", "3"], "--episods is not known; did you mean --episodes?"),
        (["eval", "RUN", "--episodes", "many"], "--episodes must be a whole number, got 'many'"),
        (
            ["export", "RUN", "--format", "onx"],
            "'onx'; did you mean onnx? it must be one of auto, onnx",
        ),
        (["eval", "RUN", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (["play", "RUN", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (["plot", "nowhere"], "nowhere is not a run folder: cannot read its metrics.jsonl"),
        (["doctor", "nowhere"], "nowhere does not exist"),
        (
            ["train", "--resume", "RUN", "--seed", "5"],
            "has seed 0, this run 5; a resumed run keeps",
        ),
        (
            ["train", "--resume", "RUN", "--network.hidden", "8"],
            "has network.hidden [16], this run",
        ),
        (["convert", "nowhere.pt"], "there is no file nowhere.pt"),
        (["envs", "chasng"], "did you mean chasing"),
    ],
)
def test_wrong_words_name_what_would_do(
    words: list[str], message: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_folder) if word == "RUN" else word for word in words]
    assert exit_code(words) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_envs: [1\n", "as YAML: while parsing a flow sequence"),
        ("- num_envs\n", "must hold `name: value` lines, got list"),
        ("", "must hold `name: value` lines, got NoneType"),
        ("1: 2\n", "must hold `name: value` lines"),
        ("num_env: 8\n", "did you mean num_envs"),
        ("num_envs: many\n", "num_envs is 'many'; it must be int"),
        ("num_envs: 8.5\n", "num_envs is 8.5; it must be int"),
        ("network: 3\n", "network is 3; it must be NetworkConfig"),
        ("network: {hiden: [3]}\n", "did you mean hidden"),
        ("quiet: 1\n", "quiet is 1; it must be bool"),
        ("env_options: 5\n", "env_options is 5; it must be"),
        ("env_options: {dim: two}\n", "env option dim is 'two'; it must be int"),
        (
            "env_options: {dmi: 5}\n",
            "has no option dmi; did you mean dim? it has: max_episode_steps, dim",
        ),
        ("device: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert exit_code(["train", "ppo", "chasing", "--config", str(tmp_path / "bad.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_other_bytes_or_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cannot read .*bytes\.yaml as YAML"):
        read_config(tmp_path / "bytes.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "names.yaml").write_text("algorithm: 5\nenv: chasing\n")
    with pytest.raises(UsageError, match="algorithm and env must be names, got 5"):
        parse_train(["--config", str(tmp_path / "names.yaml")])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GpurlError("x"), 1),
        (UsageError("x"), 2),
        (EnvError("x"), 3),
        (NonFiniteError("x"), 4),
        (CheckpointError("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "doctor", fail)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == ("" if code == 130 else "gpurl: x\n")


def test_switches_take_true_and_false() -> None:
    names = ["ppo", "chasing"]
    equals = ["quiet=true", "--stagger=False", "env.discrete=true", "env.bonus=false"]
    flags = ["--quiet", "--no-stagger", "--env.discrete", "--env.no-bonus"]
    spaced = ["--quiet", "true", "--stagger", "False", "--env.discrete", "true", "env.bonus=False"]
    assert settings(*names, *equals) == settings(*names, *flags)
    assert settings(*names, *spaced) == settings(*names, *flags)


def test_gymnasiums_tasks_share_a_preset_of_few_environments() -> None:
    expected = settings("ppo", "gymnasium_cpu:Pendulum-v1")
    assert (expected["num_envs"], expected["horizon"], expected["minibatches"]) == (8, 256, 8)


def test_what_is_known_of_a_task_wins_over_what_is_known_of_its_algorithm() -> None:
    num_envs = [
        settings("ddpg", env)["num_envs"]
        for env in ("mountain_car_continuous", "gymnasium_cpu:Pendulum-v1", "pendulum")
    ]
    assert num_envs == [64, 8, 64]
    assert settings("ddpg", "pendulum")["total_steps"] == 40_000
    assert settings("ddpg", "mountain_car_continuous")["total_steps"] == 1_000_000


@pytest.mark.parametrize("words", [["network.memory=gru"], ["num_envs=1", "horizon=16"]])
def test_the_preset_of_gymnasiums_tasks_takes_a_memory_and_one_environment(
    tmp_path: Path, words: list[str]
) -> None:
    small = [
        "total_steps=16",
        "eval_episodes=0",
        "epochs=1",
        "device=cpu",
        "quiet=true",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert main(["train", "ppo", "gymnasium_cpu:CartPole-v1", *small, *words]) == 0


@pytest.mark.curve
def test_drawing_the_curve_again_keeps_the_baseline(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = [word for word in SMALL if not word.startswith("total_steps")]
    assert (
        main(
            [
                "train",
                "ppo",
                "chasing",
                *small,
                f"total_steps={ITERATION}",
                f"run_dir={folder}",
                "quiet=true",
            ]
        )
        == 0
    )
    first = (folder / "learning_curve.png").read_bytes()
    assert list(json.loads((folder / "references.json").read_text())) == ["scripted policy"]
    assert main(["plot", str(folder)]) == 0
    assert (folder / "learning_curve.png").read_bytes() == first


def test_eval_reports_skipped_episodes(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "step": 1024.0,
        "eval/mean_reward": 1.0,
        "eval/std_reward": 0.0,
        "eval/mean_ep_length": 3.0,
        "eval/episodes": 6.0,
    }
    monkeypatch.setattr(
        "gpurl.api.evaluate_run", lambda *_, **__: {**values, "eval/non_finite_episodes": 2.0}
    )
    assert main(["eval", str(run_folder)]) == 0
    assert capsys.readouterr().out == (
        "return 1.000 ± 0.000, length 3.0, 6 episodes; 2 gave NaN or infinity and were skipped; "
        "policy of step 1,024\n"
    )


def test_a_run_of_an_own_module_says_where_the_module_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "project"
    home.mkdir()
    (home / "my_far_pendulum.py").write_text(
        "from gpurl.envs.pendulum import Pendulum\nclass Mine(Pendulum):\n    pass\n"
    )
    with monkeypatch.context() as there:
        there.chdir(home)
        there.syspath_prepend(home)
        assert main(["train", "ppo", "my_far_pendulum", *SMALL, "run_dir=run", "quiet=true"]) == 0
        sys.modules.pop("my_far_pendulum")
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(home / "run"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert (
        f"my_far_pendulum of this run is {home / 'my_far_pendulum.py'}: call the command" in error
    )
    # another error is none of the module's
    assert main(["eval", str(home / "run"), "--device", "cpu", "--env", "cart_pole"]) == 2
    error = capsys.readouterr().err
    assert "cart_pole has" in error
    assert "call the command" not in error
    monkeypatch.syspath_prepend(home)
    assert main(["eval", str(home / "run"), "--device", "cpu", "--episodes", "1"]) == 0
