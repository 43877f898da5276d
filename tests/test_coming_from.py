"""docs/coming_from.md: the settings that it names are ours, and it agrees with the hints and help
texts of the command line.
"""

import dataclasses
import re
from pathlib import Path

import pytest

import gpurl
from gpurl.algorithms.dqn import DQNConfig
from gpurl.algorithms.ppo import PPOConfig
from gpurl.algorithms.sac import SACConfig
from gpurl.algorithms.td3 import TD3Config
from gpurl.cli.settings import TrainOptions
from gpurl.nn.actor_critic import NetworkConfig
from gpurl.run.logger import ALIASES
from gpurl.run.other_names import OTHER_NAMES
from gpurl.run.settings import TrainConfig

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming_from.md").read_text()
LIBRARIES = {
    "SB3": "stable-baselines3",
    "rsl_rl": "rsl_rl",
    "rl_games": "rl_games",
    "CleanRL": "CleanRL",
}


def fields(*kinds: type) -> set[str]:
    return {item.name for kind in kinds for item in dataclasses.fields(kind)}


RUN = fields(TrainConfig, TrainOptions)
PPO = RUN | fields(PPOConfig) | {f"network.{name}" for name in fields(NetworkConfig)}
OFF_POLICY = RUN | fields(SACConfig, TD3Config, DQNConfig)


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table of a section, its header first."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


@pytest.mark.parametrize(
    ("title", "known"),
    [("How long a training is", PPO), ("PPO", PPO), ("SAC, TD3 and DQN", OFF_POLICY)],
)
def test_the_settings_are_ours(title: str, known: set[str]) -> None:
    header, *body = rows(title)
    assert header[0] == "here"
    assert len(body) >= 3
    for row in body:
        assert len(row) == len(header), row[0]
        assert names(row[0]), row
        assert {*names(row[0])} <= known, row[0]


def test_the_page_has_the_names_that_the_help_has() -> None:
    """Of every setting on it, in the column of the library or in what is said of it."""
    checked = 0
    for title in ("How long a training is", "PPO", "SAC, TD3 and DQN"):
        header, *body = rows(title)
        for row in body:
            for setting in names(row[0]):
                for library, name in OTHER_NAMES.get(setting, {}).items():
                    if LIBRARIES.get(library) not in header:
                        continue
                    place = header.index(LIBRARIES[library])
                    assert name in names(row[place]) + names(row[-1]), (setting, library, name)
                    checked += 1
    assert checked > 40


def test_flags_and_functions_of_the_last_table_exist() -> None:
    _, *body = rows("What else is called otherwise")
    cells = " ".join(row[0] for row in body)
    for name in re.findall(r"gpurl\.(\w+)", cells):
        assert hasattr(gpurl, name), name
    flags = re.findall(r"--([\w-]+)", cells)
    assert len(flags) >= 5
    assert {flag.replace("-", "_") for flag in flags} <= RUN
    assert {"cleanrl", "rsl_rl", "rl_games"} <= ALIASES.keys()
