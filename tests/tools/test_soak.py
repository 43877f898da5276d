"""The soak tells growth from noise, and trainings in a row leave nothing open."""

import dataclasses
import math
import os
import random
import threading
from pathlib import Path

import pytest

import gpurl
from tests.small_runs import SMALL
from tests.tools import soak
from tests.tools.soak import BLOCKS, COUNTED, MIB, Growth, Sample, growth, judge, sample, verdict


def samples(
    slope: float, noise: float, handles: float = 0.0, minutes: float = 10.0
) -> list[Sample]:
    """A process whose memory changes by `slope` MiB a minute and whose handles by `handles` a
    minute.
    """
    rng = random.Random(5)
    seconds = [0.25 * step for step in range(int(minutes * 240))]
    return [
        Sample(
            at,
            int((500 + slope * at / 60 + rng.gauss(0, noise)) * MIB),
            0,
            9 + int(handles * at / 60),
            3,
            0,
        )
        for at in seconds
    ]


@pytest.mark.parametrize(
    ("slope", "noise", "expected"),
    [
        (0.0, 5.0, "steady"),
        (0.5, 5.0, "steady"),
        (3.0, 5.0, "resident grows"),
        (-20.0, 1.0, "steady"),
        (1.0, 50.0, "too short to say"),
    ],
)
def test_a_slope_counts_where_its_interval_says_so(
    slope: float, noise: float, expected: str
) -> None:
    found = judge(samples(slope, noise))
    assert verdict(found) == expected
    assert abs(found["resident"]["slope"] - slope) <= 2 * found["resident"]["half"]


def test_a_line_without_noise_is_exact() -> None:
    times = [float(second) for second in range(600)]
    line = growth(times, [7 * MIB * at / 60 for at in times])
    assert math.isclose(line.slope, 7.0, rel_tol=1e-9)
    assert line.half < 1e-6
    assert growth(times[: BLOCKS - 1], times[: BLOCKS - 1]).verdict() == "too short to say"
    assert Growth(1.5, 0.4).verdict() == "grows"


def test_what_happens_in_the_first_third_is_no_growth() -> None:
    rising = samples(0.0, 0.1)
    for each in rising[: len(rising) // 3]:
        each.resident = 0
    assert verdict(judge(rising)) == "steady"


def test_things_that_stay_open_are_counted() -> None:
    assert verdict(judge(samples(0.0, 1.0, handles=1.0))) == "handles grows"
    assert (
        verdict(judge(samples(0.0, 1.0, handles=0.3))) == "steady"
    )  # in ten minutes the file of a font or two
    more = samples(0.0, 1.0)
    more[-300:] = [dataclasses.replace(each, children=1) for each in more[-300:]]
    assert verdict(judge(more)) == "steady"  # for a moment
    more[-900:] = [dataclasses.replace(each, children=1) for each in more[-900:]]
    assert verdict(judge(more)) == "children grows"
    before = sample(0.0)
    ended = threading.Event()
    with Path(os.devnull).open() as _:
        thread = threading.Thread(target=ended.wait)
        thread.start()
        within = sample(0.0)
        ended.set()
        thread.join()
    assert (within.handles - before.handles, within.threads - before.threads) == (1, 1)
    assert within.resident > 50 * MIB


def test_trainings_in_a_row_leave_no_handle_thread_or_child(tmp_path: Path) -> None:
    settings = SMALL | {"total_steps": 256, "eval_episodes": 0, "threads": 1}
    cases = [
        ("ppo", "pendulum", {}),
        (
            "ppo",
            "gymnasium_cpu:CartPole-v1",
            {"num_envs": 2, "env_options": {"vectorization": "async"}},
        ),
    ]
    after = []
    for number in range(3):
        for case, (algorithm, env, more) in enumerate(cases):
            gpurl.train(
                algorithm,
                env,
                **{**settings, **more, "run_dir": str(tmp_path / f"{number}_{case}")},
            )
        after.append([getattr(sample(0.0), name) for name in COUNTED])
    assert after[2] == after[0]  # the first opened fonts, libraries and the like


def test_a_case_is_measured_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steady = judge(samples(0.0, 1.0)) | {"done": 3, "samples": 9}
    leaking = judge(samples(9.0, 1.0)) | {"done": 3, "samples": 9}
    jobs = []
    monkeypatch.setattr(
        soak,
        "run_once",
        lambda python, module, job, *_: (
            jobs.append(job),
            leaking if "many" in job["case"] else steady,
        )[1],
    )
    for only, code in (("log", 0), ("pendulum", 1)):
        monkeypatch.setattr(
            "sys.argv", ["soak", "--minutes", "8", "--only", only, "--out", str(tmp_path)]
        )
        assert soak.main() == code
    assert jobs[0] == {"case": "log entries", "seconds": 480.0}
    assert "resident grows" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["soak", "--minutes", "0.1"])
    with pytest.raises(SystemExit):
        soak.main()


def test_a_row_is_of_the_device_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = list[dict[str, str]]()
    monkeypatch.setattr(
        soak, "run_once", lambda *_: judge(samples(0.0, 1.0)) | {"done": 1, "samples": 1}
    )
    monkeypatch.setattr(soak, "choose_device", lambda name: f"the {name} one")
    monkeypatch.setattr(soak, "machine", lambda device: {"device": device})
    monkeypatch.setattr(soak, "save", lambda script, rows, folder: saved.extend(rows))
    monkeypatch.setattr(
        "sys.argv", ["soak", "--only", "sac pendulum, replay saved", "--minutes", "2"]
    )
    assert soak.main() == 0
    assert [row["device"] for row in saved] == ["the auto one"]
