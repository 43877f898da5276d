"""Completion of the command line, asked of the real shells: bash always, zsh and fish where they
are installed. Scripts hold all names, so an answer takes no Python.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gpurl.algorithms import algorithm_names
from gpurl.cli.completion import completion_script, completion_words
from gpurl.cli.main import COMMANDS, main
from gpurl.envs.registry import env_names
from gpurl.errors import UsageError

LINES: list[tuple[str, set[str], set[str]]] = [
    # the line, some candidates, some words that must be none
    ("gpurl t", {"train"}, {"eval", "ppo"}),
    ("gpurl train p", {"ppo", "pqn"}, {"pendulum"}),
    ("gpurl train ppo c", {"chasing", "cart_pole"}, {"acrobot", "config"}),
    ("gpurl train ppo chasing --env.d", {"--env.dim", "--env.discrete"}, {"--env.cone"}),
    ("gpurl train ppo chasing --num-", {"--num-envs"}, {"--num-critics"}),
    ("gpurl train sac ant --num-", {"--num-envs", "--num-critics"}, set()),
    ("gpurl train sac ant --env.c", {"--env.cone", "--env.ctrl-cost-weight"}, {"--env.dim"}),
    ("gpurl train ppo chasing --no-", {"--no-quiet", "--no-stagger"}, {"--no-env.bonus"}),
    ("gpurl train ppo chasing --network.h", {"--network.hidden"}, set()),
    ("gpurl train ppo chasing --nan ", {"raise", "skip", "reset-envs"}, {"chasing"}),
    ("gpurl train ppo chasing --seed 3 --graph p", {"policy"}, {"full"}),
    ("gpurl train --resume ", {"runs/chasing/ppo/one"}, {"runs/chasing/ppo/two", "ppo"}),
    ("gpurl eval runs/", {"runs/chasing/ppo/one"}, {"runs/chasing/ppo/two"}),
    ("gpurl eval runs/chasing/ppo/one --la", {"--latest"}, {"--num-envs"}),
    ("gpurl envs hum", {"humanoid", "humanoid_standup"}, {"hopper"}),
    ("gpurl completion z", {"zsh"}, {"bash"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run, a folder that is none, and the scripts."""
    folder = tmp_path_factory.mktemp("completion")
    for name in ("one", "two"):
        (folder / "runs" / "chasing" / "ppo" / name).mkdir(parents=True)
    (folder / "runs" / "chasing" / "ppo" / "one" / "config.yaml").write_text("env: chasing\n")
    for shell in ("bash", "zsh", "fish"):
        (folder / f"gpurl.{shell}").write_text(completion_script(shell, COMMANDS))
    return folder


def candidates(shell: str, line: str, folder: Path) -> set[str]:
    """What the shell offers at the end of the line."""
    words = line.split(" ")
    array = " ".join(map(shlex.quote, words))
    commands = {
        "bash": f"source gpurl.bash; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _gpurl; "
        'printf "%s\\n" "${COMPREPLY[@]}"',
        # compadd shows candidates inside a widget only, so a function stands in for it
        "zsh": "compdef() { :; }; source gpurl.zsh; compadd() { shift; print -l -- "
        f"${{(M)@:#$words[CURRENT]*}}; }}; words=({array}); CURRENT={len(words)}; _gpurl",
        "fish": f"source gpurl.fish; complete -C {shlex.quote(line)}",
    }
    found = subprocess.run(
        [shell, "-c", commands[shell]], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert found.stderr == "", found.stderr
    return {each.split("\t")[0] for each in found.stdout.split("\n") if each}


@pytest.mark.parametrize(("line", "offered", "others"), LINES, ids=[line[0] for line in LINES])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(
    shell: str, line: str, offered: set[str], others: set[str], folder: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    found = candidates(shell, line, folder)
    assert offered <= found
    assert not others & found
    # fish also offers what contains the word
    if shell != "fish":
        assert all(each.startswith(line.split(" ")[-1]) for each in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_an_answer_takes_no_python(
    shell: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    called = tmp_path / "called"
    for name in ("gpurl", "python", "python3"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {called}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "--num-envs" in candidates(shell, "gpurl train ppo chasing --", folder)
    assert not called.exists()


def test_a_script_has_all_names() -> None:
    words = completion_words(COMMANDS)
    assert set(words.commands) == set(COMMANDS)
    assert list(words.algorithms) == algorithm_names()
    assert list(words.envs) == env_names()
    known = {name for flags in words.flags.values() for name in flags}
    assert words.choices.keys() <= known
    assert "--env-options" in words.flags["command:eval"]
    assert "--teacher" in words.flags["algorithm:bc"]
    assert {*words.choices["--schedule"]} == {"constant", "linear", "kl", "kl_minibatch", "cosine"}


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert "complete -c gpurl" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "takes bash, zsh, fish, got csh" in capsys.readouterr().err
    with pytest.raises(UsageError, match="got nothing"):
        completion_script("", COMMANDS)
