"""README's Python runs as it stands: the environment of one's own by module path, and the three
lines.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
GPURL = [sys.executable, "-m", "gpurl"]


def run(command: list[str], folder: Path) -> str:
    """Output of `command` in `folder`, gpurl being importable but the folder only because it is the
    working one.
    """
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_environment_of_ones_own(tmp_path: Path) -> None:
    (code,) = (block for block in BLOCKS if block.startswith("# my_env.py"))
    assert len(code.splitlines()) <= 40
    (tmp_path / "my_env.py").write_text(code)
    assert "keeps the contract" in run([*GPURL, "check-env", "my_env"], tmp_path)
    told = run(
        [
            *GPURL,
            "train",
            "ppo",
            "my_env",
            "--num-envs",
            "256",
            "--total-steps",
            "300_000",
            "--run-dir",
            "run",
        ],
        tmp_path,
    )
    value = re.search(r"evaluated return (-?[\d.]+)", told)
    assert value, told
    assert (
        float(value[1]) > 60.0
    )  # doing nothing gets about -400, the best possible is 100 less the way to the origin


def test_the_gymnasium_environment_of_ones_own(tmp_path: Path) -> None:
    (code,) = (block for block in BLOCKS if block.startswith("# my_gym.py"))
    (tmp_path / "my_gym.py").write_text(code)
    assert "keeps the contract" in run([*GPURL, "check-env", "my_gym"], tmp_path)
    small = [
        "num_envs=4",
        "horizon=8",
        "minibatches=2",
        "total_steps=64",
        "eval_episodes=1",
        "run_dir=run",
    ]
    run([*GPURL, "train", "ppo", "my_gym", "--env.gravity", "3.7", *small], tmp_path)
    assert "gravity: 3.7" in (tmp_path / "run" / "config.yaml").read_text()
    run([*GPURL, "train", "--resume", "run", "total_steps=128"], tmp_path)


def test_the_mujoco_model_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("mujoco_warp")
    (code,) = (block for block in BLOCKS if block.startswith("# my_slider.py"))
    (tmp_path / "my_slider.py").write_text(code)
    assert "keeps the contract" in run([*GPURL, "check-env", "my_slider"], tmp_path)
    small = [
        "num_envs=64",
        "horizon=32",
        "total_steps=30_000",
        "eval_episodes=8",
        "learning_rate=3e-3",
        "schedule=constant",
    ]
    told = run([*GPURL, "train", "ppo", "my_slider", *small, "run_dir=run"], tmp_path)
    value = re.search(r"evaluated return (-?[\d.]+)", told)
    assert value, told
    assert float(value[1]) > -18.0  # doing nothing gets about -25


def test_the_vector_environment_of_ones_own(tmp_path: Path) -> None:
    """With a stand-in for the simulator that one has."""
    (code,) = (block for block in BLOCKS if block.startswith("# my_sim.py"))
    code = code.replace("MyVectorEnv(num_envs, device)", "PickWalks(num_envs)")
    (tmp_path / "my_sim.py").write_text(f"from tests.torch_walks import PickWalks\n{code}")
    small = [
        "num_envs=4",
        "horizon=8",
        "minibatches=2",
        "total_steps=64",
        "eval_episodes=1",
        "run_dir=run",
    ]
    run([*GPURL, "train", "ppo", "my_sim", *small], tmp_path)


def test_the_three_lines(tmp_path: Path) -> None:
    (code,) = (block for block in BLOCKS if block.startswith("import gpurl"))
    assert len([line for line in code.splitlines() if line]) == 3
    code = code.replace("4096", "64").replace("20_000_000", "10_000")
    run(
        [
            sys.executable,
            "-c",
            code + "assert policy.act([[0.0] * 8]).shape == (1, 2), policy.act([[0.0] * 8])\n",
        ],
        tmp_path,
    )


@pytest.mark.parametrize("word", re.findall(r"^gpurl (\S+)", README, re.MULTILINE))
def test_commands_exist(word: str) -> None:
    from gpurl.cli.main import COMMANDS

    assert word in COMMANDS
