"""The pictures of tensor tasks show the state: things are at the pixels where they belong."""

import math

import numpy as np
import pytest
import torch

from gpurl.colors import BLUE, GREEN, ORANGE
from gpurl.envs.canvas import Canvas
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.errors import UsageError

HEIGHT = 256


def started(name: str, num_envs: int = 1, **options: object) -> TorchEnv:
    env = make_env(name, num_envs, **options)
    env.reset(seed=0)
    assert isinstance(env, TorchEnv)
    return env


def where(picture: np.ndarray, color: str) -> np.ndarray:
    """[K, 2] x and y, y upwards from the lower edge, of the pixels of exactly this colour."""
    rgb = tuple(bytes.fromhex(color[1:]))
    y, x = np.nonzero((picture == rgb).all(2))
    assert len(x), f"nothing is {color}"
    return np.stack((x + 0.5, len(picture) - 0.5 - y), axis=1)


@pytest.mark.parametrize("angle", [-0.6, 0.0, 0.3])
def test_the_pole_stands_at_its_angle(angle: float) -> None:
    env = started("cart_pole")
    env._state = {"motion": torch.tensor([[0.7, 0.0, angle, 0.0]])}
    picture = env.picture(0, HEIGHT)
    pole = where(picture, ORANGE)
    # the pixels lie along a line from the joint, whose x is the cart's
    scale = HEIGHT / (1.75 + 0.55)
    joint = ((0.7 + 2.9) * scale, 0.55 * scale)
    lean = np.arctan2(*(pole.mean(0) - joint))
    assert lean == pytest.approx(angle, abs=0.03)
    assert np.hypot(*(pole - joint).T).max() == pytest.approx(scale, abs=6)  # 1 m long


@pytest.mark.parametrize("action", [0, 1])
def test_the_push_points_where_it_goes(action: int) -> None:
    env = started("cart_pole")
    env._state = {"motion": torch.zeros(1, 4)}
    picture = env.picture(0, HEIGHT, torch.tensor(action))
    assert (where(picture, BLUE)[:, 0].mean() > picture.shape[1] / 2) == bool(action)
    with pytest.raises(AssertionError, match="nothing"):
        where(env.picture(0, HEIGHT), BLUE)


@pytest.mark.parametrize("angle", [0.0, 1.0, -2.5])
def test_the_pendulum_hangs_at_its_angle(angle: float) -> None:
    env = started("pendulum")
    env._state = {"obs": torch.zeros(1, 3), "angle": torch.tensor([angle])}
    middle = where(env.picture(0, HEIGHT), ORANGE).mean(0) - HEIGHT / 2
    assert np.arctan2(-middle[0], middle[1]) == pytest.approx(angle, abs=0.03)


def test_the_tip_of_acrobot_crosses_the_line_where_the_episode_ends() -> None:
    env = started("acrobot")
    env._state = {
        "obs": torch.zeros(1, 6),
        "angle_1": torch.tensor([math.pi / 2]),
        "angle_2": torch.tensor([math.pi / 2]),
    }
    # link 1 points right, link 2 up: the tip is 1 m right of and 1 m above the joint
    picture = env.picture(0, HEIGHT)
    tip = where(picture, ORANGE).max(0)
    scale = HEIGHT / 4.6
    assert tip == pytest.approx([HEIGHT / 2 + scale, HEIGHT / 2 + scale], abs=6)
    line = where(picture, GREEN)
    assert line[:, 1].mean() == pytest.approx(HEIGHT / 2 + scale, abs=2)


@pytest.mark.parametrize("name", ["mountain_car", "mountain_car_continuous"])
def test_the_car_is_at_its_position(name: str) -> None:
    env = started(name)
    env._state = {"obs": torch.tensor([[0.2, 0.0]])}
    car = where(env.picture(0, HEIGHT), ORANGE).mean(0)
    scale = HEIGHT / 1.34
    ground = 0.55 + 0.45 * math.sin(0.6)
    expected = [(0.2 + 1.3) * scale, (ground + 0.12) * scale]
    assert car == pytest.approx(expected, abs=12)


@pytest.mark.parametrize("bonus", [True, False])
def test_pursuer_and_target_are_where_they_are(bonus: bool) -> None:
    env = started("chasing", bonus=bonus)
    env._state = {
        "obs": torch.tensor([[1.0, 2.0, 0.0, 0.0, -9.0, -5.0, 0.0, 0.0]]),
        "distance": torch.zeros(1),
    }
    picture = env.picture(0, HEIGHT)
    # the plane from -11.5 to 3.5
    scale = HEIGHT / 15.0
    target = where(picture, ORANGE).mean(0) / scale - 11.5
    chaser = where(picture, BLUE).mean(0) / scale - 11.5
    assert target == pytest.approx([1.0, 2.0], abs=0.1)
    assert chaser == pytest.approx([-9.0, -5.0], abs=0.1)
    # the radius of capture around the target: this far it is tinted, and no farther
    radius = 1.0 if bonus else 2.0
    row = picture[round(HEIGHT - (2.0 + 11.5) * scale)]

    def is_tinted(x: float) -> bool:
        red, _, blue = row[round((x + 11.5) * scale)].astype(int)
        return bool(red - blue > 20)

    assert is_tinted(1.0 + 0.9 * radius)
    assert not is_tinted(1.0 + 1.15 * radius)


def test_the_force_of_a_discrete_pursuer_is_its_action() -> None:
    env = started("chasing", discrete=True)
    still = {"obs": torch.tensor([[0.0] * 4 + [-4.0, -4.0, 0.0, 0.0]]), "distance": torch.ones(1)}
    env._state = still
    # action 2 is (1, -1): to the right and down, drawn from the middle of the picture
    blue = where(env.picture(0, HEIGHT, torch.tensor(2)), BLUE).mean(0) - HEIGHT / 2
    assert blue[0] > 3
    assert blue[1] < -3


@pytest.mark.parametrize("dim", [1, 3, 5])
def test_other_dimensions_are_projected(dim: int) -> None:
    env = started("chasing", dim=dim)
    picture = env.picture(0, HEIGHT)
    target = where(picture, ORANGE).mean(0)
    chaser = where(picture, BLUE).mean(0)
    # they start 8 apart in every dimension, the chaser in the lower left
    assert target[0] - chaser[0] > HEIGHT / 5
    assert (target[1] - chaser[1] > HEIGHT / 8) == (dim > 1)


def test_a_pursuer_that_leaves_the_picture_makes_it_larger() -> None:
    env = started("chasing")
    state = torch.tensor([[40.0, 40.0, 0.0, 0.0, -9.0, -5.0, 0.0, 0.0]])
    env._state = {"obs": state, "distance": torch.zeros(1)}
    target = where(env.picture(0, HEIGHT), ORANGE)
    assert target.min() > 0
    assert target.max() < HEIGHT


def test_a_trail_is_of_one_episode() -> None:
    env = started("pendulum")
    env._state = {"obs": torch.zeros(1, 3), "angle": torch.tensor([0.0])}
    first = env.picture(0, HEIGHT)
    for angle in (0.2, 0.4, 0.6, 0.0):
        env._state["angle"] = torch.tensor([angle])
        env.episode_length_buf += 1
        later = env.picture(0, HEIGHT)
    assert (first != later).any()
    env.episode_length_buf.zero_()
    assert (first == env.picture(0, HEIGHT)).all()


def test_a_watcher_sees_the_last_state_before_the_restart() -> None:
    env = started("mountain_car", num_envs=3)
    env._state = {"obs": torch.tensor([[-0.5, 0.0], [0.49, 0.07], [-0.5, 0.0]])}
    seen: list[tuple[int, np.ndarray]] = []
    env.watch_ends(lambda index: seen.append((index, env.picture(index, HEIGHT))))
    assert env.step(torch.tensor([1, 2, 1])).terminated.tolist() == [False, True, False]
    ((index, picture),) = seen
    assert index == 1
    car = where(picture, ORANGE).mean(0)
    assert car[0] > (0.5 + 1.3) * HEIGHT / 1.34  # at the flag
    assert float(env._state["obs"][1, 0]) < -0.3  # a new episode


# ---- the canvas ----


def test_edges_are_smooth_and_widths_grow_with_the_picture() -> None:
    shades, pixels = [], []
    for height in (64, 256):
        canvas = Canvas(height)
        canvas.view(0.0, 0.0, 2.0, 1.0)
        canvas.line([(0.2, 0.2), (1.8, 0.7)], "#000000", 4.0)
        picture = canvas.picture()
        assert picture.shape == (height, 2 * height, 3)
        shades.append(len(np.unique(picture)))
        pixels.append((picture < 128).sum() / picture.size)
    assert min(shades) >= 8
    assert pixels[0] == pytest.approx(pixels[1], rel=0.3)


def test_what_is_wrong_with_a_drawing_is_said() -> None:
    canvas = Canvas(64)
    with pytest.raises(UsageError, match=r"canvas.view\(left, bottom, right, top\) comes first"):
        canvas.circle((0.0, 0.0), 1.0)
    with pytest.raises(UsageError, match="wanted left < right and bottom < top"):
        canvas.view(0.0, 0.0, 0.0, 1.0)
    canvas.view(0.0, 0.0, 1.0, 1.0)
    with pytest.raises(UsageError, match=r"a colour is one of .*, got 'bleu'"):
        canvas.circle((0.0, 0.0), 1.0, "bleu")
