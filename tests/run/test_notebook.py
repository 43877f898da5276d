"""Training in a notebook, executed by a kernel: one table that is redrawn in its place, a summary,
the picture, an environment of a cell, and errors in one line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ENV = """
import gpurl, numpy as np, torch
from gymnasium.spaces import Box
from gpurl.envs.torch_env import TorchEnv

class Ball(TorchEnv):
    single_observation_space = Box(-10.0, 10.0, (1,), np.float32)
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 8
    def initial_state(self, rng):
        return {"x": rng.uniform(-1.0, 1.0)}
    def transition(self, state, action, rng):
        x = state["x"] + 0.1 * action[:, 0]
        return {"x": x}, -x.abs(), x.abs() > 5.0
    def observe(self, state):
        return state["x"][:, None]
SMALL = dict(num_envs=4, horizon=8, minibatches=1, eval_episodes=2, log_every=0.0, device="cpu")
"""
TRAIN = 'run = gpurl.train("ppo", Ball, total_steps=256, run_dir="run", **SMALL)'
INSTANCE = 'gpurl.train("ppo", Ball(4), total_steps=64, run_dir="run2", **SMALL);'
RESUME = 'gpurl.resume("run", env=Ball, total_steps=320).outcome.steps'
WRONG = 'gpurl.train("ppo", Ball, n_steps=16)'
QUIET = 'gpurl.train("ppo", Ball, total_steps=64, run_dir="run3", quiet=True, **SMALL);'


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """{source: its outputs} of one notebook."""
    folder = tmp_path_factory.mktemp("notebook")
    sources = [ENV, TRAIN, INSTANCE, RESUME, WRONG, QUIET]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in sources])
    client = nbclient.NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = {cell.source: cell.outputs for cell in notebook.cells}
    outputs["folder"] = folder
    return outputs


def text_of(outputs: list[Any]) -> str:
    return "".join(one.text for one in outputs if one.output_type == "stream")


def displayed(outputs: list[Any], kind: str) -> list[str]:
    return [one.data[kind] for one in outputs if kind in one.get("data", {})]


def test_a_class_of_a_cell_is_trained_with_one_table_and_a_summary(cells: dict[str, Any]) -> None:
    assert displayed(cells[ENV], "text/plain") == []
    outputs = cells[TRAIN]
    assert not [one for one in outputs if one.output_type == "error"]
    # eight iterations were logged; the last state of the table stands there once
    (table,) = displayed(outputs, "text/html")
    assert table.count("<table>") == 1
    assert "256/256 steps, 100.0 %" in table
    assert "episode return" in table
    assert "env-steps/s" not in text_of(outputs)
    # the summary and the curve
    text = text_of(outputs)
    assert "ended after 256 steps: total_steps reached" in text
    assert "gpurl.resume('run', env=..., total_steps=...)" in text
    assert "gpurl eval" not in text
    assert len(displayed(outputs, "image/png")) == 1


def test_instances_and_resumes_work_in_the_session(cells: dict[str, Any]) -> None:
    assert "ended after 64 steps: total_steps reached" in text_of(cells[INSTANCE])
    assert displayed(cells[RESUME], "text/plain")[-1] == "320"


def test_an_error_is_its_message(cells: dict[str, Any]) -> None:
    (error,) = cells[WRONG]
    assert error.ename == "UsageError"
    assert len(error.traceback) == 1
    assert "no setting is called 'n_steps'; here it is horizon" in error.traceback[0]


def test_quiet_shows_nothing(cells: dict[str, Any]) -> None:
    assert cells[QUIET] == []


def test_another_process_says_why_it_cannot_play(
    cells: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from gpurl.api import evaluate_run
    from gpurl.errors import UsageError
    from gpurl.policy import load

    folder: Path = cells["folder"] / "run"
    assert load(folder).act([[0.5]]).shape == (1, 1)
    with pytest.raises(UsageError, match="Ball was defined in a notebook, a console or a script"):
        evaluate_run(folder, episodes=1)
