"""docs/results.md says what the CSV files say: numbers, verdicts, what was not run, pictures."""

from pathlib import Path

import pytest

from benchmarks.learning import report, results, tables
from benchmarks.learning.case import Case
from benchmarks.learning.outcomes import Outcome, published_median, read_outcomes, verdicts
from benchmarks.learning.pictures import at_the_same_steps, draw, in_minutes
from benchmarks.learning.published import COLUMNS, published
from benchmarks.learning.results import Point
from benchmarks.learning.suite import CASES, GROUPS

MACHINE = dict.fromkeys(("cpu", "gpurl", "torch", "gymnasium", "mujoco", "commit"), "x")
MACHINE["episodes"] = "100"


def write(name: str, values: list[float], folder: Path, steps: int | None = None) -> Case:
    """A result of each seed that rises to its value in four evaluations."""
    case = CASES[name]
    total = case.steps if steps is None else steps
    settings = case.resolved_settings().replace(str(case.steps), str(total))
    columns = MACHINE | {"settings": settings, "threads": "1"}
    for seed, value in enumerate(values):
        curve = [Point(total * part // 4, 15.0 * part, value * part / 4) for part in range(1, 5)]
        results.add(case, seed, curve, Point(total, 60.0, value), columns, folder)
    return case


def outcome(name: str, values: list[float], folder: Path) -> Outcome:
    write(name, values, folder)
    return read_outcomes(folder)[name]


def test_the_committed_page_is_what_the_committed_files_give() -> None:
    outcomes = read_outcomes(results.FOLDER)
    drawn = report.groups_with_curves(outcomes)
    made = report.page(outcomes, drawn)
    assert report.PAGE.read_text() == made, "run python -m benchmarks.learning.report"
    assert sorted(path.stem for path in results.FOLDER.glob("*.png")) == sorted(drawn)


def test_every_file_of_results_is_of_a_case() -> None:
    assert {path.stem for path in results.FOLDER.glob("*.csv")} <= set(CASES)


def test_published_columns_exist_and_belong_to_tasks_of_the_suite() -> None:
    tasks = {case.task for case in CASES.values()}
    for column in COLUMNS.values():
        assert set(column.returns) <= tasks
    for case in CASES.values():
        assert set(case.published) <= set(COLUMNS)
    assert published("PPO Tianshou", "half_cheetah") == (5784, 1244)
    assert published("PPO CleanRL", "ant") is None
    assert published("DQN rl-zoo3", "lunar_lander") == (154, 79)
    # 1443, 5784, 5819, and of Ant 3258 and 1327
    assert published_median(CASES["ppo-half_cheetah"]) == 5784
    assert published_median(CASES["ppo-ant"]) == 2292.5


def test_an_outcome_has_the_statistics_of_its_seeds(tmp_path: Path) -> None:
    found = outcome("ppo-half_cheetah", [100.0, 1.0, 3.0, -50.0], tmp_path)
    assert found.estimate.value == 2.0
    assert found.median == 2.0
    assert (found.steps, found.seconds) == (1_000_000, 60.0)
    # the curves rise linearly: at half of the steps half of the return
    assert found.median_at(500_000) == 1.0


def test_seeds_of_other_steps_and_settings_are_left_out(tmp_path: Path) -> None:
    write("sac-hopper", [1.0, 2.0], tmp_path, steps=3_000)
    assert not read_outcomes(tmp_path)
    case = write("ppo-hopper", [1.0, 2.0, 3.0], tmp_path)
    old = MACHINE | {"settings": case.resolved_settings().replace("}", ', "gamma": 0.5}')}
    curve = [Point(10, 1.0, 0.0)]
    results.add(case, 2, curve, Point(case.steps, 1.0, 9.0), old, tmp_path)
    assert read_outcomes(tmp_path)["ppo-hopper"].returns == [1.0, 2.0]


def verdict_words(folder: Path, name: str) -> list[str]:
    return [each.word for each in verdicts(read_outcomes(folder)) if each.case.name == name]


def test_targets_are_reached_by_the_measure_that_they_name(tmp_path: Path) -> None:
    assert verdict_words(tmp_path, "ppo-half_cheetah") == ["not run", "not run"]
    # the lower end of the interval misses 3000, the median misses the 5784 of the publications
    write("ppo-half_cheetah", [100.0, 4000.0, 4000.0], tmp_path)
    assert verdict_words(tmp_path, "ppo-half_cheetah") == ["**not reached**"] * 2
    write("ppo-half_cheetah", [3100.0, 5784.0, 6000.0], tmp_path)
    assert verdict_words(tmp_path, "ppo-half_cheetah") == ["reached", "reached"]
    # a median hides one bad seed
    write("sac-half_cheetah", [0.0, 6070.0, 7000.0], tmp_path)
    assert verdict_words(tmp_path, "sac-half_cheetah") == ["reached"]


def test_a_case_is_compared_with_another_at_the_same_step(tmp_path: Path) -> None:
    """SAC's curve is at 300 after 100 k of 300 k steps if it ends at 900."""
    write("sac-hopper", [900.0], tmp_path)
    assert verdict_words(tmp_path, "redq-hopper") == ["not run"]
    write("redq-hopper", [299.0], tmp_path)
    (verdict,) = (each for each in verdicts(read_outcomes(tmp_path)) if each.case.better_than)
    assert verdict.wanted == pytest.approx(300.0)
    assert verdict.word == "**not reached**"


def test_the_page_shows_results_and_says_what_was_not_run(tmp_path: Path) -> None:
    write("ppo-half_cheetah", [5784.0] * 5, tmp_path)
    write("ppo-hopper", [2410.0 / 2] * 5, tmp_path)
    write("gym-sac-hopper", [10.0, 20.0], tmp_path)
    write("sb3-sac-hopper", [15.0], tmp_path)
    write("clock-ppo-pendulum", [-150.0], tmp_path)
    write("c51-acrobot", [-80.0], tmp_path)
    old = MACHINE | {"settings": CASES["ppo-chasing"].resolved_settings(), "threads": "1"}
    ends = Point(20_000_000, 1.0, 9.0)
    results.add(CASES["ppo-chasing"], 0, [], ends, old | {"episodes": "20"}, tmp_path)
    text = report.page(read_outcomes(tmp_path), ["ppo"])
    assert "(1 of 16\ntrainings, the older ones: 20 or more" in text
    assert "| half_cheetah | 5,784 | 5,784 | 5 | 60 s | 1,443 ± 46 | 5,784 ± 1,244 |" in text
    assert "| walker2d | not run |  |  |  | 2,288 ± 572 |" in text
    # 1 and a half of the published medians, five seeds each: of ten values the middle six
    assert (
        "Over half_cheetah, hopper, as fractions of the median of the published means: 0.75."
        in text
    )
    assert "| sac-hopper | 100 k | 15 [10, 20] (2) | 15 (1) | 60 s | 60 s | 1.0 |" in text
    assert "| ppo-lunar_lander | 1 M | not run | not run |  |  |  |" in text
    assert "| ppo-pendulum | 60 s | 10 M | -150 | 1 |" in text
    assert "| c51 | not run at 50 k | -80 (1) at 100 k | not run at 100 k |" in text
    assert "(../benchmarks/results/learning/ppo.png)" in text
    assert "off_policy.png" not in text
    assert "3 of 6 targets are reached; " in text  # HalfCheetah's two, not Hopper's, and C51's
    assert "\nWithout a target: ddpg-half_cheetah, " in text
    assert all(f" {column.name} {column.steps}" in text for column in COLUMNS.values())


def test_numbers_are_short() -> None:
    values = (12139.4, 100.4, 99.96, 46.0, 4.12, -4.1, 0.847, 0.0, -0.026)
    words = ["12,139", "100", "100.0", "46", "4.1", "-4.1", "0.85", "0", "-0.03"]
    assert [tables.number(value) for value in values] == words
    assert [tables.duration(value) for value in (12.3, 200.0, 9000.0)] == [
        "12 s",
        "3.3 min",
        "2.5 h",
    ]
    assert [tables.count(value) for value in (50_000, 1_000_000, 1_015_808)] == [
        "50 k",
        "1 M",
        "1.02 M",
    ]


def test_cases_with_the_same_settings_share_a_line(tmp_path: Path) -> None:
    for name in ("ppo-half_cheetah", "ppo-hopper", "ppo-lunar_lander"):
        write(name, [1.0], tmp_path)
    lines = tables.settings_table(read_outcomes(tmp_path))[2:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| ppo-half_cheetah, ppo-hopper",
        "| ppo-lunar_lander",
    ]
    assert "num_envs 16" in lines[1]


@pytest.mark.parametrize("axis", ["steps", "time"])
def test_a_picture_has_a_panel_for_each_task(tmp_path: Path, axis: str) -> None:
    import matplotlib.image

    members = [outcome(name, [1.0, 3.0], tmp_path) for name in ("sac-hopper", "td3-hopper")]
    members.append(outcome("sac-half_cheetah", [2.0], tmp_path))
    path = tmp_path / "a.png"
    assert draw(members, path, axis)
    first = path.read_bytes()
    assert draw(members, path, axis)
    assert path.read_bytes() == first
    picture = matplotlib.image.imread(path)
    assert picture.shape[:2] == pytest.approx((2.9 * 110, 8.0 * 110), abs=2)  # two panels
    assert not draw([], path, axis)


def test_a_fast_seed_does_not_end_the_line_of_a_slow_one(tmp_path: Path) -> None:
    case = CASES["gym-ppo-hopper"]
    for seed, seconds in enumerate((60.0, 180.0)):
        curve = [Point(steps, seconds * steps / 100, steps / 10) for steps in (0, 50, 100)]
        columns = MACHINE | {"settings": case.resolved_settings(), "threads": "1"}
        results.add(case, seed, curve, Point(100, seconds, 10.0), columns, tmp_path)
    minutes, values = at_the_same_steps(read_outcomes(tmp_path)[case.name], in_minutes)
    assert (minutes[0], minutes[-1]) == (0.0, 2.0)
    assert values[:, -1].tolist() == [10.0, 10.0]


def test_every_group_has_its_section() -> None:
    assert {section.group for section in report.SECTIONS if section.group} == set(GROUPS)
