"""`gpurl config` writes a file of all settings, explained, that reads back as they are."""

import dataclasses
import re
from pathlib import Path

import pytest

from gpurl.algorithms import algorithm_names
from gpurl.cli.config_template import config_template, field_help
from gpurl.cli.main import main
from gpurl.cli.settings import parse_train
from gpurl.run.settings import make_settings

ENVS = {"vdn": "two_step_game", "pqn": "cart_pole", "dqn": "cart_pole", "rainbow": "cart_pole"}


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_the_file_reads_back(algorithm: str, tmp_path: Path) -> None:
    settings = make_settings(algorithm, ENVS.get(algorithm, "chasing"))
    path = tmp_path / "my.yaml"
    path.write_text(config_template(settings))
    assert parse_train(["--config", str(path)])[0] == settings


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_every_setting_is_explained(algorithm: str) -> None:
    env = ENVS.get(algorithm, "chasing")
    lines = config_template(make_settings(algorithm, env)).splitlines()
    begin = lines.index("# ---- the run ----")
    for before, line in zip(lines[begin:], lines[begin + 1 :]):
        name, colon, _ = line.strip().partition(":")
        if colon and name.isidentifier():
            assert before.strip().startswith("# "), line
    assert max(map(len, lines)) <= 100


def test_the_options_of_the_task_are_shown(tmp_path: Path) -> None:
    given = config_template(make_settings("ppo", "chasing", env_options={"dim": 3}))
    assert "env_options:\n  dim: 3\n#   # steps to the time limit; None: the task's\n" in given
    assert "#   # 3^dim directions instead of a force\n#   discrete: false\n" in given
    text = config_template(make_settings("ppo", "chasing"))
    assert "#   # coordinates of the space, 1 to 8\n#   dim: 2\n" in text
    # without the marks it is what the options are
    path = tmp_path / "my.yaml"
    begin = text.index("# env_options")
    end = text.index("\n\n", begin)
    path.write_text(
        text[:begin] + re.sub("^# ", "", text[begin:end], flags=re.MULTILINE) + text[end:]
    )
    options = parse_train(["--config", str(path)])[0].env_options
    assert options == {"max_episode_steps": None, "dim": 2, "discrete": False, "bonus": True}


def test_the_command_takes_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "sac", "pendulum", "--gamma", "0.5", "num_envs=16"]) == 0
    path = tmp_path / "my.yaml"
    path.write_text(capsys.readouterr().out)
    settings = parse_train(["--config", str(path)])[0]
    assert (settings.algorithm_config.gamma, settings.train.num_envs) == (0.5, 16)
    assert settings.algorithm == "sac"


@dataclasses.dataclass
class Base:
    """A dataclass with and without help."""

    first: int = 1
    """Of
    two lines."""
    second: int = 2
    third: int = 3
    """The third."""


@dataclasses.dataclass
class Derived(Base):
    """Another default, another help."""

    first: int = 5
    third: int = 6
    """Changed."""


def test_help_is_the_string_under_a_field() -> None:
    assert field_help(Base) == {"first": "Of two lines.", "third": "The third."}
    assert field_help(Derived) == {"first": "Of two lines.", "third": "Changed."}
