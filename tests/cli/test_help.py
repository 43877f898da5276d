"""The help of the command line: every setting in a group with its choices and its names elsewhere,
at any width of the terminal, and hints at settings that another library calls differently.
"""

import dataclasses
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpurl.algorithms import algorithm_names
from gpurl.algorithms.ppo import PPOConfig
from gpurl.cli.completion import completion_words
from gpurl.cli.help_page import COMMON, GROUPS, setting_lines
from gpurl.cli.main import COMMANDS, main
from gpurl.cli.runs import COLUMNS
from gpurl.cli.settings import TrainOptions, parse_train
from gpurl.envs.registry import env_names
from gpurl.errors import UsageError
from gpurl.export.formats import FORMATS
from gpurl.nn.actor_critic import NetworkConfig
from gpurl.run.members import member_settings
from gpurl.run.other_names import OTHER_NAMES
from gpurl.run.settings import TrainConfig, make_settings
from tests.small_runs import exit_code

ROOT = Path(__file__).resolve().parents[2]


def page(words: list[str], width: int, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        assert exit_code(["train", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 200])
def test_all_settings_are_shown_at_any_width(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(["ppo", "chasing", "--help-all"], width, capsys)
    kinds = (TrainOptions, TrainConfig, PPOConfig)
    names = [item.name for kind in kinds for item in dataclasses.fields(kind)]
    names += [f"network.{item.name}" for item in dataclasses.fields(NetworkConfig)]
    names = [name for name in names if name != "network"] + ["env.dim", "env.discrete"]
    names += [f"member.{name}" for name in member_settings(PPOConfig)]
    names += [f"explore.{name}" for name in PPOConfig.changeable]
    flags = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    shown = {flag.replace("[no-]", "").replace("-", "_") for flag in flags}
    assert shown == {*names, "env.max_episode_steps", "env.bonus"}
    assert len(flags) == len(shown)
    # nothing but a flag with its choices or an indivisible word is wider than the terminal
    wide = [line for line in text.splitlines() if len(line) > width]
    assert not wide
    words = " ".join(text.split())
    for sentence in (
        "--nan {raise,skip,reset-envs} If an environment gives NaN or infinity: raise an error",
        "Environment steps between evaluations; by default a tenth of total_steps, or more where",
        "n_steps in SB3, num_steps in CleanRL, num_steps_per_env in rsl_rl",
        "Units of the hidden layers.",
        "coordinates of the space, 1 to 8 [2]",
    ):
        assert sentence in words


def test_the_short_page_has_what_is_changed_first(capsys: pytest.CaptureFixture[str]) -> None:
    short = page(["ppo", "chasing", "--help"], 100, capsys)
    whole = page(["ppo", "chasing", "--help-all"], 100, capsys)
    count = len(re.findall(r"^  --", short, re.MULTILINE))
    hidden = len(re.findall(r"^  --", whole, re.MULTILINE)) - count
    assert 15 <= count <= 30
    assert f"{hidden} more settings: --help-all" in " ".join(short.split())
    assert "--learning-rate" in short
    assert "--keep-checkpoints" not in short
    # the groups, in their order
    titles = re.findall(r"^([A-Za-z].*)$", whole, re.MULTILINE)[1:7]
    assert titles == ["Run", *GROUPS, "ppo", "Networks", "chasing"]
    # the values are those of the task's preset and of the other words
    assert "[1_000_000]" in page(["ppo", "CartPole-v1", "--help"], 100, capsys)


@pytest.mark.parametrize("name", algorithm_names())
def test_every_setting_of_every_algorithm_is_explained(name: str) -> None:
    lines = setting_lines(make_settings(name, "chasing"), TrainOptions)
    assert [line.name for line in lines if not line.help] == []
    assert len({line.flag for line in lines}) == len(lines)
    assert {line.name for line in lines} & COMMON >= {"num_envs", "learning_rate", "gamma"}


def test_names_of_other_libraries_lead_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for words, setting in (
        (["--n-steps", "5"], "horizon"),
        (["ent_coef=0.1"], "entropy-coef"),
        (["--n_epochs=5"], "epochs"),
        (["--clip-range-vf", "0.2"], "clip-range-value"),
        (["num_learning_epochs=5"], "epochs"),
        (["net_arch=64,64"], "network.hidden"),
        (["--max-epochs", "9"], "total-steps (max_epochs * num_envs * horizon)"),
        (["--minibatch-size", "64"], "minibatches (a number: num_envs * horizon / minibatch_size)"),
        (["--no-norm-adv"], "normalize-advantage (batch, minibatch or none)"),
    ):
        with pytest.raises(UsageError, match=f"here it is --{re.escape(setting)}$"):
            parse_train(["ppo", "chasing", *words])
    with pytest.raises(UsageError, match=r"no setting is called 'n_steps'; here it is horizon\."):
        make_settings("ppo", "chasing", n_steps=16)
    # one name may be another setting in another algorithm
    for words, settings in (
        (["--n-steps", "5"], "--n-step"),
        (["ent_coef=0.1"], "--temperature (without it learned, from initial_temperature)"),
        (["net_arch=64"], "--actor-network.hidden and --critic-network.hidden"),
    ):
        with pytest.raises(UsageError, match=f"here it is {re.escape(settings)}$"):
            parse_train(["sac", "pendulum", *words])
    # in Python what is no flag, and settings as keywords
    for name, told in (
        ("callback", r"callbacks=\[...\], a list of gpurl.Callback"),
        ("seeds", r"gpurl.train_seeds\(algorithm, env, seeds=5\)"),
        ("verbose", r"here it is quiet \(true prints nothing\)\."),
        ("policy_kwargs", r'here it is network=\{"hidden": ...\}\.'),
        ("network.hidden", r'here it is network=\{"hidden": ...\}\.'),
    ):
        with pytest.raises(UsageError, match=f"no setting is called '{name}'; .*{told}"):
            make_settings("ppo", "chasing", **{name: 1})
    # a block of an algorithm, as other libraries' files have it
    with pytest.raises(UsageError, match=r"'ppo'; those of ppo have no block: learning_rate: 0"):
        make_settings("ppo", "chasing", ppo={"learning_rate": 0.01})
    # a setting that the algorithm has is what it says; one that it has not is no hint
    assert parse_train(["sac", "pendulum", "tau=0.01"])[0].to_dict()["tau"] == 0.01


def test_every_name_elsewhere_belongs_to_a_setting() -> None:
    known = set()
    for name in algorithm_names():
        lines = setting_lines(make_settings(name, "chasing"), TrainOptions)
        known |= {line.name for line in lines}
    assert OTHER_NAMES.keys() <= known


@pytest.mark.parametrize(
    "command", ["train", "tune", "pbt", "tournament", "config", "profile", "convert"]
)
def test_help_of_a_command_is_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([command, "--help"]) == 0
    assert f"gpurl {command}" in capsys.readouterr().out
    if command == "profile":
        assert exit_code(["profile", "ppo", "chasing", "--help"]) == 0
        text = capsys.readouterr().out
        assert "usage: gpurl profile ppo chasing" in text
        assert "--iterations INT" in text
        assert "--out PATH" in text


@pytest.mark.parametrize(
    "command",
    sorted(
        COMMANDS.keys()
        - {"train", "tune", "pbt", "tournament", "config", "profile", "convert", "completion"}
    ),
)
def test_options_of_other_commands_are_explained(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: gpurl {command}" in text
    # a flag without help is followed by nothing but its default
    assert not re.search(r"│ (--\S+ )?\S+ +\((required|default)", text)


def test_choices_are_shown_and_what_may_be_left_out_has_no_type_of_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = {}
    for command in ("export", "runs", "doctor"):
        assert exit_code([command, "--help"]) == 0
        texts[command] = capsys.readouterr().out
    assert f"--format {{auto,{','.join(FORMATS)}}}" in texts["export"]
    assert f"--sort {{{','.join(COLUMNS)}}}" in "".join(texts["runs"].split()).replace(
        "--sort", "--sort "
    )
    assert "None" not in texts["doctor"]
    assert "DUMP" in texts["doctor"]
    assert exit_code(["export", "RUN", "--format", "onx"]) == 2
    words = completion_words(COMMANDS)
    assert words.choices["--format"] == ("auto", *FORMATS)
    assert words.choices["--sort"] == COLUMNS


@pytest.mark.parametrize("words", [["train", "--help"], ["config", "-h"], ["runs", "--help"]])
def test_help_that_names_nothing_needs_no_torch(words: list[str]) -> None:
    """Torch takes most of the seconds of a start. All names are there, as those that are found."""
    code = (
        "import sys, contextlib\n"
        "from gpurl.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main({words!r})\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text, _, imported = done.stdout.strip().rpartition("\n")
    assert imported == "False"
    if words[0] != "runs":
        assert f"gpurl {words[0]} ALGORITHM ENV [settings]" in text
        found = re.sub(r"\s+", " ", text)
        assert f"algorithms: {', '.join(algorithm_names())}, or" in found
        assert f"environments: {', '.join(env_names())}, an id" in found
        assert {"ppo", "flash_sac"} <= {*algorithm_names()}
        assert {"ant", "isaac_gym"} <= {*env_names()}


def test_a_terminal_gets_a_line_before_torch_is_there() -> None:
    code = (
        "import sys, builtins\n"
        "from gpurl.cli.main import main\n"
        "real = builtins.print\n"
        "def show(*words, **options):\n"
        "    real(*words, **options)\n"
        "    real('torch' in sys.modules)\n"
        "    sys.exit(0)\n"
        "builtins.print = show\n"
        "main(['train', 'ppo', 'chasing'])\n"
    )
    control, terminal = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], stdout=terminal, env=env, check=True, timeout=60)
    assert os.read(control, 1000).decode().split("\r\n")[:2] == [
        "gpurl train ppo chasing starts ...",
        "False",
    ]


def test_no_line_for_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "no_such_env"]) == 2
    assert capsys.readouterr().out == ""
