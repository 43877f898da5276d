"""Catch: what is drawn where, who moves how, and when it counts as caught."""

import numpy as np
import pytest
import torch

from gpurl.colors import BLUE, ORANGE
from gpurl.envs.catch import Catch
from gpurl.errors import UsageError
from tests.video.test_drawing import HEIGHT, where


def test_the_ball_falls_and_the_paddle_moves() -> None:
    env = Catch(3, size=5)
    env.reset()
    env._state = {
        "ball": torch.tensor([[0, 2], [0, 0], [0, 4]]),
        "paddle": torch.tensor([2, 0, 2]),
    }
    moves = torch.tensor([[1, 0, 2], [0, 0, 2], [2, 1, 1], [1, 2, 2]])  # left 0, stay 1, right 2
    for step, move in enumerate(moves):
        result = env.step(move)
        picture = result.info["final_obs"][:, 0]
        expected = np.zeros((3, 5, 5), np.uint8)
        paddles = [[2, 0, 3], [1, 0, 4], [2, 0, 4], [2, 1, 4]][step]
        for env_index, (column, paddle) in enumerate(zip((2, 0, 4), paddles)):
            expected[env_index, step + 1, column] = expected[env_index, 4, paddle] = 255
        np.testing.assert_array_equal(picture.numpy(), expected)
        if step < 3:
            assert result.reward.tolist() == [0.0, 0.0, 0.0]
            assert not result.terminated.any()
    assert result.reward.tolist() == [1.0, -1.0, 1.0]
    assert result.terminated.all()
    assert not result.truncated.any()


def test_the_ball_is_drawn_above_the_paddle() -> None:
    env = Catch(1, size=4)
    env.reset()
    env._state = {"ball": torch.tensor([[0, 1]]), "paddle": torch.tensor([3])}
    picture = env.picture(0, HEIGHT)
    scale = HEIGHT / 5.0
    assert where(picture, ORANGE).mean(0) == pytest.approx([2.0 * scale, 4.0 * scale], abs=3)
    assert where(picture, BLUE).mean(0) == pytest.approx([4.0 * scale, 1.0 * scale], abs=3)


def test_a_picture_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 4 pixels, got 3"):
        Catch(2, size=3)
