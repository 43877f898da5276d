"""The rollout's rows: where a step is written, in one graph or by the host, what is full, and what
a new rollout forgets.
"""

import pytest
import torch
from torch import Tensor

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.errors import UsageError

CPU = torch.device("cpu")


def step(number: int) -> dict[str, Tensor]:
    """Of two environments, in three dtypes."""
    obs = torch.arange(6.0).view(2, 3) + 10 * number
    return {
        "obs": obs,
        "choice": torch.tensor([number, -number]),
        "done": torch.tensor([number % 2 == 0, True]),
    }


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_every_step_has_its_row_and_a_cleared_rollout_its_memory(in_a_graph: bool) -> None:
    buffer = RolloutBuffer(3, CPU)
    assert buffer.size == 0
    if in_a_graph:
        buffer.row = torch.zeros(1, dtype=torch.int64)
    for first in (0, 100):
        for number in range(3):
            assert buffer.size == number
            buffer.add(step(first + number))
        for name, column in buffer.columns.items():
            expected = torch.stack([step(first + number)[name] for number in range(3)])
            assert column.dtype == expected.dtype
            assert torch.equal(buffer[name], expected)
        with pytest.raises(
            UsageError, match=r"the rollout holds 3 steps and is full; clear\(\) it"
        ):
            buffer.add(step(0))
        places = [buffer[name].data_ptr() for name in step(0)]
        buffer.columns["advantage"] = torch.zeros(3, 2)
        buffer.clear()
        assert list(buffer.columns) == list(step(0))
        assert [buffer[name].data_ptr() for name in step(0)] == places


def test_on_a_gpu_columns_of_one_type_are_copied_together() -> None:
    buffer = RolloutBuffer(3, CPU)
    buffer.add(step(0) | {"reward": torch.zeros(2)})
    assert [names for names, _ in buffer._group_columns()] == [("obs", "choice", "done", "reward")]
    buffer.device = torch.device("cuda")
    groups = buffer._group_columns()
    assert [names for names, _ in groups] == [("done",), ("obs", "reward"), ("choice",)]
    for names, rows in groups:
        assert [[column.data_ptr() for column in row] for row in rows] == [
            [buffer[name][t].data_ptr() for name in names] for t in range(3)
        ]


def test_columns_that_a_kernel_filled_are_taken_whole() -> None:
    buffer = RolloutBuffer(3, CPU)
    reward = torch.zeros(3, 2)
    buffer.set_columns({"reward": reward})
    buffer.columns["advantage"] = reward
    buffer.clear()
    assert list(buffer.columns) == ["reward"]
    assert buffer["reward"] is reward
