"""A memory that does not exist, or that an algorithm cannot have: one line says which there are and
who has one, on the command line, in a file and in Python.
"""

import re
from pathlib import Path

import pytest

from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.run.settings import make_settings

NONE_OF = "have no memory, network.memory is 'lstm': take a2c or ppo, or leave it out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sac", "pendulum", "--network.memory", "lstm"], f"policies of sac {NONE_OF}"),
        (["dqn", "cart_pole", "--network.memory=lstm"], f"policies of dqn {NONE_OF}"),
        (["pqn", "cart_pole", "network.memory=lstm"], f"policies of pqn {NONE_OF}"),
        (["td3", "pendulum", "--memory", "lstm"], f"policies of td3 {NONE_OF}"),
        (["ppo", "cart_pole", "--memory", "lstm"], "called 'memory'; here it is --network.memory"),
    ],
)
def test_on_the_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"gpurl: [^\n]+\n", error)
    assert message in error


def test_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text("network: {memory: lstm}\n")
    assert main(["train", "sac", "pendulum", "--config", str(tmp_path / "my.yaml")]) == 2
    assert NONE_OF in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["sac", "dqn", "pqn", "vdn", "bc"])
def test_in_python(algorithm: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"policies of {algorithm} {NONE_OF}")):
        make_settings(algorithm, "chasing", network={"memory": "lstm"})


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_a_name_that_is_none(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "network: memory is 'rnn'; it must be one of none, gru, lstm, mingru"
    with pytest.raises(UsageError, match=f"^{expected}$"):
        make_settings(algorithm, "chasing", network={"memory": "rnn"})
    assert main(["train", algorithm, "chasing", "--network.memory", "rnn"]) == 2
    assert f"--{expected.replace(': ', '.')}\n" in capsys.readouterr().err


def test_none_is_a_memory_of_nobody() -> None:
    """The settings of an algorithm with a memory turned off are refused for their own reason."""
    with pytest.raises(UsageError, match="no setting is called 'network'"):
        make_settings("sac", "pendulum", network={"memory": "none"})
