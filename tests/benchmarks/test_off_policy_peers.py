"""The off-policy side against other libraries, at tiny sizes: what differs is not timed, who fails
does not stop the others.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.off_policy import compare, one_run, redq_critics, replays, sac_updates
from benchmarks.off_policy.job import SKIPPED, Job, Measurement, result
from benchmarks.results_table import ROOT, read_rows
from gpurl.algorithms.redq import REDQ
from gpurl.buffers.prioritized import PrioritizedReplay
from gpurl.buffers.replay import Replay
from gpurl.errors import GpurlError, UsageError

SMALL: dict[str, Any] = {
    "seconds": 0.0,
    "size": 256,
    "num_envs": (1, 8),
    "batch_sizes": (16,),
    "shapes": ((5, 2),),
    "hidden": (8, 8),
}
PACKAGES = {"sb3": "stable_baselines3", "torchrl": "torchrl"}


def small_job(case: str, trainer: str = "gpurl", **changes: Any) -> Job:
    return Job(case, trainer, **(SMALL | changes))


def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "CHECKED", 256)
    monkeypatch.setattr(replays, "PREPARED", 4)


# ---- replay ----


@pytest.mark.parametrize("name", compare.CONTESTANTS["replay"])
def test_a_replay_is_compared_and_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, mode = name.partition(":")
    if trainer in PACKAGES:
        pytest.importorskip(PACKAGES[trainer])
    small_checks(monkeypatch)
    try:
        found = replays.measure(small_job("replay", trainer, mode=mode or "default"))
    except GpurlError as error:
        assert (trainer, mode) == (
            "torchrl",
            "prioritized",
        )  # whose compiled part may be another torch's
        pytest.skip(str(error))
    kind = "prioritized replay" if mode else "replay"
    whats = ("memory", "add", "sample 16", "add + sample 16")
    assert [(each.case, each.num_envs) for each in found] == [
        *((f"{kind} 256x5+2: {what}", size) for size in ("1", "8") for what in whats),
        (f"{kind} 256x5+2: process", "-"),
    ]
    assert all(each.value > 0.0 for each in found)
    assert {each.unit for each in found} == {"MiB", "us", "peak MiB"}


@pytest.mark.parametrize("column", ["obs", "action", "reward", "next_obs"])
def test_a_replay_that_gives_something_else_is_not_timed(
    column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Replay.sample

    def wrong(self: Replay, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        batch = right(self, *arguments, **options)
        batch[column] = (
            batch[column].roll(1, 0)
            if column != "obs"
            else batch["obs"] + torch.tensor([0.0, 1e-6, 0.0, 0.0, 0.0])
        )
        return batch

    small_checks(monkeypatch)
    monkeypatch.setattr(Replay, "sample", wrong)
    monkeypatch.setattr(replays, "timed", None)
    with pytest.raises(GpurlError, match=rf"gpurl: sampled {column} differs from what was added"):
        replays.measure(small_job("replay"))


def test_a_replay_that_draws_from_a_part_only_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Replay._sample

    def halved(
        self: Replay, size: int, gamma: float, steps: int, reuse: bool, index: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        drawn = right(self, size, gamma, steps, False, index)["index"]
        return right(
            self,
            size,
            gamma,
            steps,
            reuse,
            drawn // 2 if not isinstance(self, PrioritizedReplay) else drawn.flip(0) * 0,
        )

    small_checks(monkeypatch)
    monkeypatch.setattr(Replay, "_sample", halved)
    monkeypatch.setattr(replays, "timed", None)
    with pytest.raises(GpurlError, match="draws are not uniform over the newest 2048 transitions"):
        replays.measure(small_job("replay", num_envs=(8,), size=256 * 8))
    with pytest.raises(GpurlError, match="draws do not follow the priorities"):
        replays.measure(small_job("replay", mode="prioritized"))


def test_old_transitions_must_be_gone() -> None:
    job = small_job("replay")
    steps = replays.make_steps(job, 1)
    contestant = replays.GpurlReplay(small_job("replay", size=300), 1, steps)
    contestant.fill()
    with pytest.raises(GpurlError, match=r"transitions \d+ to 281, wanted only from 26 on"):
        replays.check(job, contestant, steps)


# ---- SAC ----


def test_the_updates_of_both_learn_similarly(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(sac_updates, "COMPARED", 200)
    message = sac_updates.compare(
        small_job("sac", "both", size=512, batch_sizes=(64,), hidden=(64, 64))
    )
    assert message.startswith("critic loss 5+2: gpurl ")


def test_the_same_weights_give_the_same_values() -> None:
    pytest.importorskip("stable_baselines3")
    job, shape = small_job("sac"), (5, 2)
    steps = sac_updates.make_steps(job, shape)
    algorithm, model = (
        sac_updates.gpurl_sac(job, shape, steps, 1),
        sac_updates.sb3_sac(job, shape, steps),
    )
    sac_updates.copy_weights(algorithm, model)
    obs, action = torch.randn(7, 5), torch.rand(7, 2)
    with torch.no_grad():
        for ours, theirs in (
            (algorithm.critic, model.critic),
            (algorithm.target_critic, model.critic_target),
        ):
            expected = torch.stack(theirs(obs, action))
            torch.testing.assert_close(ours.forward(torch.cat((obs, action), 1)), expected)
        mean, log_std, _ = model.actor.get_action_dist_params(obs)
        torch.testing.assert_close(algorithm.actor.forward(obs)[0], torch.cat((mean, log_std), 1))


@pytest.mark.parametrize(
    ("gpurl", "sb3", "similar"),
    [
        ((9.0, 4.0), (9.5, 4.2), True),
        ((9.0, 9.5), (9.0, 9.5), False),
        ((9.0, 4.0), (9.0, 5.0), False),
        ((9.0, 4.0), (4.0, 3.9), False),
    ],
)
def test_losses_must_decrease_and_be_similar(
    gpurl: tuple[float, float],
    sb3: tuple[float, float],
    similar: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sac_updates, "WINDOW", 2)
    losses = {
        name: [first, first, 7.0, last, last]
        for name, (first, last) in (("gpurl", gpurl), ("sb3", sb3))
    }
    if similar:
        assert (
            sac_updates.check_losses((5, 2), losses)
            == "critic loss 5+2: gpurl 9 to 4, sb3 9.5 to 4.2"
        )
        return
    with pytest.raises(GpurlError, match="learn differently, so nothing is timed"):
        sac_updates.check_losses((5, 2), losses)


@pytest.mark.parametrize("trainer", compare.CONTESTANTS["sac"])
def test_updates_of_sac_are_measured(trainer: str) -> None:
    if trainer in PACKAGES:
        pytest.importorskip(PACKAGES[trainer])
    rate, memory = sac_updates.measure(small_job("sac", trainer))
    assert (rate.case, rate.unit) == ("sac 5+2, batch 16", "updates/s")
    assert 1.0 < rate.value < 1e5
    assert memory.unit == "peak MiB"


# ---- REDQ ----


def test_a_loop_over_modules_gives_what_redq_gives() -> None:
    message = redq_critics.compare(small_job("redq", "both"))
    assert message.startswith("values after as many steps: critics moved by ")


def test_other_critics_than_the_loops_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = REDQ.critic_step
    monkeypatch.setattr(
        REDQ, "critic_step", lambda self, batch, move_target: right(self, batch, False)
    )
    with pytest.raises(
        GpurlError, match="not the same after 10 steps, so nothing is timed: targets moved"
    ):
        redq_critics.compare(small_job("redq", "both"))
    monkeypatch.setattr(
        REDQ,
        "critic_step",
        lambda self, batch, move_target: right(
            self, batch | {"discount": batch["reward"] * 0}, True
        ),
    )
    with pytest.raises(GpurlError, match="nothing is timed: critics moved"):
        redq_critics.compare(small_job("redq", "both"))


@pytest.mark.parametrize("trainer", compare.CONTESTANTS["redq"])
def test_steps_of_redqs_critics_are_measured(trainer: str) -> None:
    step, memory = redq_critics.measure(small_job("redq", trainer))
    assert (step.case, step.unit, memory.unit) == (
        "redq critics 10x5+2, batch 16",
        "us",
        "peak MiB",
    )
    assert step.value > 0.0


# ---- in turn ----


def test_a_job_survives_json(capsys: pytest.CaptureFixture[str]) -> None:
    job = small_job("redq", num_envs=(3,))
    assert one_run.job_of(json.dumps(vars(job))) == job
    one_run.main([json.dumps(vars(job))])
    found = json.loads(capsys.readouterr().out.removeprefix("RESULT "))
    assert [case for case, _, _, _ in found["measurements"]] == [
        "redq critics 10x5+2, batch 16",
        "redq process",
    ]
    one_run.main([json.dumps(vars(small_job("redq", "both", only_compare=True)))])
    assert "message" in json.loads(capsys.readouterr().out.removeprefix("RESULT "))
    for case in compare.CONTESTANTS:
        assert (ROOT / "benchmarks" / "off_policy" / f"{one_run.FILES[case]}.py").is_file()


WORDS = [
    "--python",
    "python",
    "--rounds",
    "3",
    "--threads",
    "2",
    "--waits",
    "passive",
    "--sizes",
    '{"size": 64}',
]


def fake_runs(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, float], differ: str = ""
) -> list[str]:
    """Processes that answer from `values`, or fail without one; who ran."""
    ran: list[str] = []

    def run_once(
        python: Path, module: str, job: dict[str, Any], environment: dict[str, str], name: str
    ) -> dict[str, Any]:
        assert (module, environment["OMP_NUM_THREADS"], job["size"]) == (
            "benchmarks.off_policy.one_run",
            "2",
            64,
        )
        if job.get("only_compare"):
            ran.append(f"compare {job['case']}")
            if job["case"] == differ:
                raise GpurlError("they differ")
            return {"message": "the same"}
        ran.append(name.partition(" ")[0])
        if ran[-1] not in values:
            raise GpurlError(
                "broken"
                if ran[-1] != "torchrl:prioritized"
                else f"Traceback\nGpurlError: {SKIPPED}no compiled part\n"
            )
        kind, unit = {
            "replay": ("prioritized replay" if job["mode"] != "default" else "replay", "us")
        }.get(job["case"], ("x", "updates/s"))
        value = values[ran[-1]] + job["seed"]
        found = result(Job(job["case"], "gpurl"), [Measurement(kind, "8", value, unit)])
        return found | {"version": "1"}

    monkeypatch.setattr(compare, "run_once", run_once)
    return ran


def test_libraries_take_turns_and_ratios_go_the_right_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"gpurl": 10.0, "sb3": 54.0, "torchrl": 109.0, "gpurl:prioritized": 20.0}
    ran = fake_runs(monkeypatch, values)
    assert compare.main([*WORDS, "--case", "replay", "sac", "--out", str(tmp_path)]) == 0
    replay = [*values, "torchrl:prioritized"]
    assert ran == [
        *replay,
        *list(values)[::-1],
        *values,
        "compare sac",
        "gpurl",
        "sb3",
        "sb3",
        "gpurl",
        "gpurl",
        "sb3",
    ]
    said = capsys.readouterr().out
    assert "skipped: torchrl:prioritized: no compiled part\n" in said
    lines = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert lines["replay"] == [
        "replay",
        "8",
        "us",
        "11.00",
        "55.00",
        "5.00",
        "110.0",
        "10.00",
    ]  # less is better
    assert lines["x"] == ["x", "8", "updates/s", "11.00", "55.00", "0.20"]  # more is better
    assert lines["prioritized replay"][-3:] == ["8", "us", "21.00"]
    rows = read_rows(tmp_path / "off_policy_cpu.csv")
    assert [
        (
            row["case"],
            row["trainer"],
            row["note"],
            row["value"],
            row["lowest"],
            row["highest"],
            row["rounds"],
        )
        for row in rows[:4]
    ] == [
        ("replay", "gpurl", "default", "11", "10", "12", "3"),
        ("replay", "sb3", "default", "55", "54", "56", "3"),
        ("replay", "torchrl", "default", "110", "109", "111", "3"),
        ("prioritized replay", "gpurl", "prioritized", "21", "20", "22", "3"),
    ]


def test_a_library_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, {"gpurl": 10.0})
    assert compare.main([*WORDS, "--case", "redq", "--out", str(tmp_path)]) == 1
    assert "failed: torch_loop: broken" in capsys.readouterr().out
    assert {row["trainer"] for row in read_rows(tmp_path / "off_policy_cpu.csv")} == {"gpurl"}


def test_what_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = fake_runs(monkeypatch, {"gpurl": 10.0, "torch_loop": 10.0}, differ="redq")
    with pytest.raises(GpurlError, match="they differ"):
        compare.main([*WORDS, "--case", "redq", "--out", str(tmp_path)])
    assert ran == ["compare redq"]
    assert not list(tmp_path.iterdir())


def test_a_case_without_a_contestant_is_refused() -> None:
    with pytest.raises(
        UsageError, match="redq is not measured with sb3, only with gpurl, torch_loop"
    ):
        compare.parse(["--trainers", "sb3"])
    assert compare.parse(["--trainers", "sb3", "--case", "sac"]).case == ["sac"]
