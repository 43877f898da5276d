"""The picture of one episode: what stands in which panel, with which names, limits and ticks."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from gpurl.cli import episode_plot
from gpurl.cli.episode_plot import (
    COLORS,
    MAX_JOINED,
    MAX_LINES,
    Episode,
    Signals,
    plot_episode,
    signals_of,
)
from gpurl.envs import make_env


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved."""
    figures: list[Figure] = []
    monkeypatch.setattr(
        episode_plot, "save_figure", lambda figure, path: figures.append(figure) or path
    )
    return figures


def episode(
    steps: int, obs: int, actions: int, agents: int = 1, end: str = "time limit"
) -> Episode:
    random = np.random.default_rng(0)
    return Episode(
        random.normal(size=(steps + 1, agents, obs)),
        random.normal(size=(steps, agents, actions)),
        random.normal(size=(steps, agents)),
        end,
    )


def signals(obs: int, actions: int, **more: object) -> Signals:
    names = [f"o{i}" for i in range(obs)], [f"a{i}" for i in range(actions)]
    return Signals(*names, **more)  # type: ignore[arg-type]


def panels(figure: Figure) -> dict[str, Axes]:
    figure.draw_without_rendering()
    return {axes.get_ylabel(): axes for axes in figure.axes}


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def curves(axes: Axes) -> list[np.ndarray]:
    """[T, 2] of each line with points of its own: not the mark of the end, not limits."""
    lines = (np.asarray(line.get_xydata()) for line in axes.get_lines())
    return [points for points in lines if len(points) > 2]


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = plot_episode(
        tmp_path / "episode.png", "ppo on chasing", episode(30, 3, 2), signals(3, 2)
    )
    assert path == tmp_path / "episode.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["episode.png"]


def test_lines_have_their_names_over_all_steps(tmp_path: Path, drawn: list[Figure]) -> None:
    played = episode(30, 3, 2)
    plot_episode(tmp_path / "e.png", "ppo on chasing", played, signals(3, 2))
    total = played.reward.sum()
    assert drawn[0].get_suptitle() == f"ppo on chasing · 30 steps · return {total:.6g}"
    found = panels(drawn[0])
    assert list(found) == ["observation", "action", "reward", "return so far"]
    assert legend(found["observation"]) == ["o0", "o1", "o2"]
    assert legend(found["action"]) == ["a0", "a1"]
    # the observation after the last step too; a reward comes at the end of its step
    (first, *_) = curves(found["observation"])
    assert first.tolist() == list(map(list, zip(range(31), played.obs[:, 0, 0])))
    assert curves(found["action"])[1][:, 1].tolist() == played.action[:, 0, 1].tolist()
    (reward,) = curves(found["reward"])
    assert reward.tolist() == list(map(list, zip(range(1, 31), played.reward[:, 0])))
    (so_far,) = curves(found["return so far"])
    assert (so_far[0].tolist(), so_far[-1, 0]) == ([0.0, 0.0], 30.0)
    assert so_far[-1, 1] == pytest.approx(total)
    assert found["return so far"].get_xlabel() == "step"


@pytest.mark.parametrize(
    ("end", "dashes", "text"),
    [
        ("terminated", "-", "terminated"),
        ("time limit", "--", "time limit"),
        ("", None, "it goes on"),
    ],
)
def test_the_end_is_marked_in_every_panel(
    tmp_path: Path, drawn: list[Figure], end: str, dashes: str | None, text: str
) -> None:
    plot_episode(tmp_path / "e.png", "t", episode(30, 3, 2, end=end), signals(3, 2))
    for axes in drawn[0].axes:
        marks = [line for line in axes.get_lines() if list(line.get_xdata()) == [30, 30]]
        assert [line.get_linestyle() for line in marks] == ([dashes] if dashes else [])
    assert [each.get_text() for each in drawn[0].axes[0].texts] == [text]


def test_wide_observations_have_several_panels_that_say_which(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    played = episode(10, 60, 13)
    plot_episode(tmp_path / "e.png", "t", played, signals(60, 13))
    found = panels(drawn[0])
    observed = [f"observation\n{i + 1} to {i + 10} of 60" for i in (0, 10, 20, 30)]
    assert list(found)[:6] == [*observed, "action\n1 to 6 of 13", "action\n7 to 13 of 13"]
    assert legend(found[observed[3]]) == [f"o{i}" for i in range(30, 40)]
    assert curves(found[observed[3]])[9][:, 1].tolist() == played.obs[:, 0, 39].tolist()
    # positions and velocities of a body that moves in the plane are one panel each
    plot_episode(tmp_path / "e.png", "t", episode(10, 17, 1), signals(17, 1))
    assert list(panels(drawn[1]))[:2] == [f"observation\n{i} of 17" for i in ("1 to 8", "9 to 17")]
    assert len(set(COLORS)) == len(COLORS) == MAX_LINES


def test_limits_of_actions_are_thin_lines(tmp_path: Path, drawn: list[Figure]) -> None:
    limits = np.array([[[-3.0, -3.0]], [[3.0, 4.0]]])
    played = episode(30, 3, 2)
    plot_episode(tmp_path / "e.png", "t", played, signals(3, 2, limits=limits))
    plot_episode(tmp_path / "e.png", "t", played, signals(3, 2, limits=limits * 1e4))
    plot_episode(tmp_path / "e.png", "t", played, signals(3, 2, limits=limits * np.inf))
    heights = [
        sorted(
            float(line.get_ydata()[0])
            for line in panels(figure)["action"].get_lines()
            if list(line.get_xdata()) == [0, 1]
        )
        for figure in drawn
    ]
    assert heights == [[-3.0, 3.0, 4.0], [], []]  # far ones would flatten the actions
    low, high = panels(drawn[0])["action"].get_ylim()
    assert low < -3.0
    assert high > 4.0


def test_discrete_actions_are_bars_on_an_axis_of_all_choices(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    played = episode(6, 2, 1)
    action = np.array([0.0, 0.0, 2.0, 2.0, 2.0, 0.0])[:, None, None]
    played = Episode(played.obs, action, played.reward, "terminated")
    known = Signals(["o0", "o1"], ["action"], ["left", "1", "right"], 3)
    plot_episode(tmp_path / "e.png", "t", played, known)
    axes = panels(drawn[0])["action"]
    bars = [
        (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches
    ]
    assert bars == [(0, 2, 0.0), (2, 3, 2.0), (5, 1, 0.0)]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0 left", "1", "2 right"]
    assert axes.get_ylim() == (-0.5, 2.5)
    assert len(curves(axes)) == 1  # steps
    # many changes joined by lines would be a solid area
    action = np.arange(2.0 * MAX_JOINED)[:, None, None] % 2
    many = episode(len(action), 2, 1)
    plot_episode(tmp_path / "e.png", "t", Episode(many.obs, action, many.reward, ""), known)
    axes = panels(drawn[1])["action"]
    assert len(axes.patches) == len(action)
    assert curves(axes) == []


def test_bars_of_agents_lie_in_the_order_of_the_legend(tmp_path: Path, drawn: list[Figure]) -> None:
    played = episode(6, 2, 1, agents=2)
    played = Episode(played.obs, np.ones((6, 2, 1)), played.reward, "")
    plot_episode(tmp_path / "e.png", "t", played, Signals(["o0", "o1"], ["action"], (), 2))
    axes = panels(drawn[0])["action"]
    first, second = axes.patches
    assert first.get_y() == pytest.approx(second.get_y() + second.get_height())
    assert legend(axes) == ["agent 1", "agent 2"]
    assert first.get_facecolor() == to_rgba(COLORS[0])


def test_steps_are_written_out(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_episode(tmp_path / "e.png", "t", episode(1024, 2, 1), signals(2, 1))
    (*_, axes) = panels(drawn[0]).values()
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks[-2:] == ["1,000", "1,200"]


def test_many_choices_have_whole_ticks(tmp_path: Path, drawn: list[Figure]) -> None:
    played = episode(20, 2, 1)
    action = np.arange(20.0)[:, None, None]
    played = Episode(played.obs, action, played.reward, "")
    plot_episode(tmp_path / "e.png", "t", played, Signals(["o0", "o1"], ["action"], (), 27))
    axes = panels(drawn[0])["action"]
    assert axes.get_ylim() == (-0.5, 26.5)
    assert all(float(tick).is_integer() for tick in axes.get_yticks())


@pytest.mark.parametrize(("value", "low", "high"), [(1.0, 0, 1), (-5.0, -5, 0), (0.0, 0, 0)])
def test_constants_have_an_axis_that_holds_zero(
    tmp_path: Path, drawn: list[Figure], value: float, low: float, high: float
) -> None:
    # with the rounding of float32
    constant = np.full((31, 1, 1), value) * (
        1 + 1e-7 * np.random.default_rng(0).normal(size=(31, 1, 1))
    )
    played = Episode(constant, constant[:30], constant[:30, 0], "")
    plot_episode(tmp_path / "e.png", "t", played, signals(1, 1))
    found = panels(drawn[0])
    size = abs(value) or 1.0
    for label in ("observation\no0", "action\na0", "reward"):
        bottom, top = found[label].get_ylim()
        assert bottom == pytest.approx(low - 0.2 * size, rel=1e-3)
        assert top == pytest.approx(high + 0.2 * size, rel=1e-3)


def test_a_bonus_does_not_flatten_the_other_rewards(tmp_path: Path, drawn: list[Figure]) -> None:
    played = episode(200, 2, 1)
    reward = 0.01 * played.reward
    reward[-1] = 8.0
    plot_episode(
        tmp_path / "e.png", "t", Episode(played.obs, played.action, reward, ""), signals(2, 1)
    )
    axes = panels(drawn[0])["reward"]
    assert axes.get_ylim()[1] < 0.1
    assert [text.get_text() for text in axes.texts] == ["▲ 8"]
    # values of all sizes are drawn as they are
    plot_episode(tmp_path / "e.png", "t", played, signals(2, 1))
    axes = panels(drawn[1])["reward"]
    assert axes.get_ylim()[1] > played.reward.max()
    assert list(axes.texts) == []


def test_agents_have_a_panel_each_and_lines_of_their_own(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    played = episode(30, 3, 1, agents=2)
    plot_episode(tmp_path / "e.png", "t", played, signals(3, 1))
    found = panels(drawn[0])
    assert list(found)[:2] == ["observation\nagent 1", "observation\nagent 2"]
    assert legend(found["observation\nagent 2"]) == ["o0", "o1", "o2"]
    assert curves(found["observation\nagent 2"])[2][:, 1].tolist() == played.obs[:, 1, 2].tolist()
    for label, values in (("action", played.action[:, :, 0]), ("reward", played.reward)):
        assert legend(found[label]) == ["agent 1", "agent 2"]
        assert [line[:, 1].tolist() for line in curves(found[label])] == values.T.tolist()
    (so_far,) = curves(found["return so far"])
    assert so_far[-1, 1] == pytest.approx(played.reward.mean(1).sum())
    # a shared reward is one line
    shared = Episode(played.obs, played.action, np.ones((30, 2)), "")
    plot_episode(tmp_path / "e.png", "t", shared, signals(3, 1))
    assert len(curves(panels(drawn[1])["reward"])) == 1
    # actions of several numbers are a panel for each agent
    plot_episode(tmp_path / "e.png", "t", episode(30, 3, 2, agents=2), signals(3, 2))
    assert list(panels(drawn[2]))[2:4] == ["action\nagent 1", "action\nagent 2"]
    # of many agents the first
    plot_episode(tmp_path / "e.png", "t", episode(30, 3, 1, agents=9), signals(3, 1))
    assert list(panels(drawn[3]))[5:7] == ["observation\nagent 6 of 9", "action\n6 of 9"]


def test_an_episode_of_one_step_is_dots(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_episode(tmp_path / "e.png", "t", episode(1, 3, 2, end=""), signals(3, 2))
    assert {line.get_marker() for axes in drawn[0].axes for line in axes.get_lines()} == {"o"}


def test_an_image_is_not_drawn_as_lines(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_episode(tmp_path / "e.png", "t", episode(9, 300, 2), signals(300, 2, has_image=True))
    assert list(panels(drawn[0])) == ["action", "reward", "return so far"]


def test_legends_and_labels_stay_inside(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_episode(tmp_path / "e.png", "t", episode(30, 10, 10), signals(10, 10))
    drawn[0].draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in drawn[0].axes]
    assert all(box.x0 >= 0 and box.x1 <= drawn[0].bbox.x1 for box in boxes)
    # a legend of ten lines is no higher than its panel
    for above, below in itertools.pairwise(drawn[0].axes[:2]):
        upper, lower = (axes.get_legend().get_window_extent() for axes in (above, below))
        assert upper.y0 > lower.y1


def test_signals_of_tasks() -> None:
    found = signals_of(make_env("cart_pole", 1))
    assert (found.num_choices, found.choices, found.limits) == (2, ["left", "right"], None)
    found = signals_of(make_env("two_step_game", 1))
    assert (found.num_choices, len(found.observation_names)) == (2, 5)
    found = signals_of(make_env("tests.tiny_envs:Walkers", 1))
    assert found.limits is not None
    assert found.limits.tolist() == [[[-1.0]] * 3, [[1.0]] * 3]
    assert (found.action_names, found.num_choices) == (["0"], 0)
