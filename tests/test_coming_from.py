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
from gpurl.cli.flags import flag_name
from gpurl.cli.help_page import setting_lines
from gpurl.cli.settings import TrainOptions, parse_train
from gpurl.errors import UsageError
from gpurl.nn.actor_critic import NetworkConfig
from gpurl.run.logger import ALIASES
from gpurl.run.other_names import names_of
from gpurl.run.settings import TrainConfig, make_settings

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming_from.md").read_text()
LIBRARIES = {
    "SB3": "stable-baselines3",
    "rsl_rl": "rsl_rl",
    "rl_games": "rl_games",
    "CleanRL": "CleanRL",
}
OURS = "a setting of this name"
# names of classes, functions and parameters, which no command line has
NO_SETTINGS = {"VecNormalize", "NormalizeObservation", "NormalizeReward", "make_vec_env"}


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
                known = OFF_POLICY if title == "SAC, TD3 and DQN" else PPO
                for library, listed in names_of(known).get(setting, {}).items():
                    if LIBRARIES.get(library) not in header:
                        continue
                    there = names(row[header.index(LIBRARIES[library])]) + names(row[-1])
                    for name in listed.split(", "):
                        assert name in there, (setting, library, name)
                        checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    ("title", "algorithms"),
    [
        ("How long a training is", ["ppo"]),
        ("PPO", ["ppo"]),
        ("SAC, TD3 and DQN", ["sac", "td3", "dqn"]),
    ],
)
def test_every_name_of_the_tables_leads_to_ours(title: str, algorithms: list[str]) -> None:
    """Typed as a flag, it prints the name here; for one of these algorithms, as not all have all
    settings.
    """
    header, *body = rows(title)
    last = len(header) - (header[-1] == "difference in meaning")
    checked = 0
    for row in body:
        ours = {flag_name(name) for name in names(row[0])}
        for name in set(names(" ".join(row[1:last]))) - NO_SETTINGS - {*names(row[0])}:
            said = " ".join(typed(algorithm, flag_name(name)) for algorithm in algorithms)
            found = set(re.findall(r"here it is --([\w.-]+)", said))
            assert (found and found <= ours) or said == OURS, (name, said)
            checked += bool(found)
    assert checked >= 8


def typed(algorithm: str, flag: str) -> str:
    """What a wrong flag is told, OURS for one that exists."""
    lines = setting_lines(make_settings(algorithm, "pendulum"), TrainOptions)
    if flag in {flag_name(line.name) for line in lines}:
        return OURS
    with pytest.raises(UsageError) as caught:
        parse_train([algorithm, "pendulum", f"--{flag}", "3"])
    return str(caught.value)


def test_flags_of_the_last_table_lead_to_ours() -> None:
    _, *body = rows("What else is called otherwise")
    checked = 0
    for here, there in body:
        for flag in re.findall(r"--([\w-]+)", there):
            if flag in re.findall(r"--([\w-]+)", here):
                continue
            with pytest.raises(UsageError, match="here it is --") as caught:
                parse_train(["ppo", "chasing", f"--{flag}", "3"])
            assert set(re.findall(r"--([\w-]+)", str(caught.value))) <= set(
                re.findall(r"--([\w-]+)", here)
            )
            checked += 1
    assert checked == 2


def test_flags_and_functions_of_the_last_table_exist() -> None:
    _, *body = rows("What else is called otherwise")
    cells = " ".join(row[0] for row in body)
    for name in re.findall(r"gpurl\.(\w+)", cells):
        assert hasattr(gpurl, name), name
    flags = re.findall(r"--([\w-]+)", cells)
    assert len(flags) >= 5
    assert {flag.replace("-", "_") for flag in flags} <= RUN
    assert {"cleanrl", "rsl_rl", "rl_games"} <= ALIASES.keys()
