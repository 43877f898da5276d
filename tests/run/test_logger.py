"""The logger: two files with the same numbers, resume as if nothing had happened, dashboards'
names, and disks that fail.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context
from tensorboard.plugins.hparams.list_session_groups import Handler

from gpurl.api import train
from gpurl.run import logger as module
from gpurl.run.logger import ALIASES, NON_FINITE, Logger, in_style
from gpurl.run.metric_help import METRIC_HELP
from tests.small_runs import OFF_POLICY, small_settings

ROOT = Path(__file__).resolve().parent.parent.parent
TASKS = {"vdn": "two_step_game"} | dict.fromkeys(
    ("dqn", "rainbow", "discrete_sac", "pqn"), "cart_pole"
)


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as strict JSON: the words NaN and Infinity are not JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def events(folder: Path) -> EventAccumulator:
    """What TensorBoard shows of the folder."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


@pytest.mark.parametrize("algorithm", [*OFF_POLICY, "ppo", "a2c", "pqn"])
def test_every_metric_of_a_training_is_explained(tmp_path: Path, algorithm: str) -> None:
    short = small_settings(algorithm) | {"total_steps": 128, "eval_episodes": 1, "quiet": True}
    short |= {"num_envs": 16, "device": "cpu", "threads": 1}
    train(algorithm, TASKS.get(algorithm, "pendulum"), run_dir=str(tmp_path / "run"), **short)
    shown = events(tmp_path / "run")
    tags = [tag for tag in shown.Tags()["scalars"] if not tag.startswith("env/")]
    assert {"eval/mean_reward", "time/fps", "train/n_updates"} <= set(tags)
    unexplained = [tag for tag in tags if not shown.SummaryMetadata(tag).summary_description]
    assert unexplained == []


def test_a_metric_is_explained_once(tmp_path: Path) -> None:
    file = module._EventFile(tmp_path, 0)
    for step in range(3):
        file.write_scalars(step, 0.0, {"time/fps": 1.0})
    file.close()
    (written,) = tmp_path.iterdir()
    assert written.read_bytes().count(METRIC_HELP["time/fps"].encode()) == 1


# ---- both files ----


def test_both_files_hold_the_same_numbers_at_env_steps(tmp_path: Path) -> None:
    rows = {
        4096 * (n + 1): {"rollout/ep_rew_mean": n - 0.25, "time/fps": 1000.0 * n} for n in range(5)
    }
    logger = Logger(tmp_path)
    for step, values in rows.items():
        logger.write(step, values)
    logger.close()
    written = {
        line["step"]: {tag: value for tag, value in line.items() if tag not in ("step", "time")}
        for line in lines(tmp_path)
    }
    assert written == rows
    for tag in ("rollout/ep_rew_mean", "time/fps"):
        assert curve(tmp_path, tag) == [(step, values[tag]) for step, values in rows.items()]
    assert set(events(tmp_path).Tags()["scalars"]) == {"rollout/ep_rew_mean", "time/fps"}


def test_the_hparams_tab_shows_settings_beside_the_last_return(tmp_path: Path) -> None:
    """As TensorBoard's own plugin reads two runs of different algorithms."""
    common = {"learning_rate": 3e-4, "squash": True, "network": {"hidden": [8, 8]}, "stop": None}
    for name, best in (("ppo", 2.0), ("sac", 3.0)):
        (tmp_path / name).mkdir()
        logger = Logger(tmp_path / name)
        logger.hyper_parameters({"algorithm": name, f"only_{name}": math.inf, **common})
        for step, value in ((1, 1.0), (2, best)):
            logger.write(step, {"eval/mean_reward": value})
        logger.close()
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    backend = backend_context.Context(TBContext(data_provider=provider))
    metadata = backend.hparams_metadata(RequestContext(), "")
    hparams = backend.hparams_from_data_provider(RequestContext(), "", None)
    experiment = backend.experiment_from_metadata(RequestContext(), "", True, metadata, hparams)
    kinds = {info.name: info.type for info in experiment.hparam_infos}
    assert kinds == {
        "algorithm": api_pb2.DATA_TYPE_STRING,
        "only_ppo": api_pb2.DATA_TYPE_STRING,
        "only_sac": api_pb2.DATA_TYPE_STRING,
        "learning_rate": api_pb2.DATA_TYPE_FLOAT64,
        "squash": api_pb2.DATA_TYPE_BOOL,
        "network.hidden": api_pb2.DATA_TYPE_STRING,
    }
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_UNKNOWN], start_index=0, slice_size=10
    )
    for info in experiment.metric_infos:
        request.col_params.add(metric=info.name)
    listed = Handler(RequestContext(), backend, "", request).run()
    rows = {
        group.hparams["algorithm"].string_value: (
            group.hparams["learning_rate"].number_value,
            group.hparams["squash"].bool_value,
            group.hparams["network.hidden"].string_value,
            {each.name.tag: each.value for each in group.metric_values}["eval/mean_reward"],
        )
        for group in listed.session_groups
    }
    assert rows == {"ppo": (3e-4, True, "[8, 8]", 2.0), "sac": (3e-4, True, "[8, 8]", 3.0)}


def test_hyper_parameters_are_a_table_in_the_text_tab(tmp_path: Path) -> None:
    logger = Logger(tmp_path)
    logger.hyper_parameters({"algorithm": "ppo", "network": {"hidden": [64, 64]}, "note": "a|b\nc"})
    logger.close()
    accumulator = events(tmp_path)
    (tag,) = accumulator.PluginTagToContent("text")
    assert tag.startswith("hyper_parameters")
    text = accumulator.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert text.splitlines() == [
        "|name|value|",
        "|-|-|",
        "|algorithm|ppo|",
        "|network.hidden|[64, 64]|",
        "|note|a\\|b c|",
    ]


def test_nan_and_infinity_are_null_and_counted(tmp_path: Path) -> None:
    logger = Logger(tmp_path)
    logger.write(1, {"train/loss": 0.5})
    logger.write(2, {"train/loss": float("nan"), "train/approx_kl": float("inf"), "train/std": 1.0})
    logger.write(3, {"train/loss": 0.25})
    logger.write(4, {"train/loss": float("-inf")})
    logger.close()
    assert [line.get("train/loss", "absent") for line in lines(tmp_path)] == [0.5, None, 0.25, None]
    assert lines(tmp_path)[1]["train/approx_kl"] is None
    assert lines(tmp_path)[1]["train/std"] == 1.0
    assert [line.get(NON_FINITE) for line in lines(tmp_path)] == [None, 2, 2, 3]
    assert curve(tmp_path, NON_FINITE) == [(2, 2), (3, 2), (4, 3)]


def test_close_may_be_called_twice_and_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    logger = Logger(tmp_path)
    logger.write(1, {"train/loss": 1.0})
    logger.close()
    logger.close()
    assert threading.active_count() == before
    assert len(lines(tmp_path)) == 1


# ---- resume ----


@pytest.mark.parametrize(("style", "xs"), [("sb3", [100, 200, 300, 400]), ("rsl_rl", [1, 2, 3, 4])])
def test_resume_cuts_what_the_killed_run_wrote_after_its_checkpoint(
    tmp_path: Path, style: str, xs: list[int]
) -> None:
    """Killed after step 300, resumed from the checkpoint of step 200: both files read as one run
    that was never killed.
    """
    killed = Logger(tmp_path, style)
    for n in (1, 2, 3):
        killed.write(
            100 * n, {"time/iterations": n, "train/grad_norm": float(n), "train/std": float("nan")}
        )
    killed.close()
    before = lines(tmp_path)[1]["time"]
    time.sleep(0.01)
    resumed = Logger(tmp_path, style, start_step=200)
    for n in (3, 4):
        resumed.write(100 * n, {"time/iterations": n, "train/grad_norm": -float(n)})
    resumed.close()
    assert [line["step"] for line in lines(tmp_path)] == [100, 200, 300, 400]
    assert [line["train/grad_norm"] for line in lines(tmp_path)] == [1.0, 2.0, -3.0, -4.0]
    assert curve(tmp_path, "train/grad_norm") == list(zip(xs, [1.0, 2.0, -3.0, -4.0]))
    assert [line[NON_FINITE] for line in lines(tmp_path)] == [
        1,
        2,
        2,
        2,
    ]  # goes on counting from the checkpoint
    assert lines(tmp_path)[2]["time"] >= before  # the clock too
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2


def test_a_clock_that_went_back_keeps_the_order_of_event_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Logger(tmp_path)
    for step in (1, 2, 3):
        before.write(step, {"train/loss": float(step)})
    before.close()
    now = time.time
    monkeypatch.setattr("gpurl.run.logger.time.time", lambda: now() - 3600.0)
    after = Logger(tmp_path, start_step=1)
    after.write(2, {"train/loss": 20.0})
    after.close()
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 20.0)]


def test_a_cut_half_line_goes(tmp_path: Path) -> None:
    logger = Logger(tmp_path)
    logger.write(100, {"train/loss": 1.0})
    logger.close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for half in (
        b'{"step": 200, "train/lo',
        b'{"step": 150, "time": 3.0}',
        b"\0\0\0\0\n",
        b"7\n",
    ):  # the second lacks its newline only
        (tmp_path / "metrics.jsonl").write_bytes(whole + half)
        resumed = Logger(tmp_path, start_step=200)
        resumed.write(300, {"train/loss": 2.0})
        resumed.close()
        assert [line["step"] for line in lines(tmp_path)] == [100, 300], half


# ---- other frameworks' names ----

NATIVE = {  # tag: a number of its own
    "rollout/ep_rew_mean": 1.0,
    "rollout/ep_len_mean": 2.0,
    "time/fps": 3.0,
    "time/collect_seconds": 4.0,
    "time/update_seconds": 5.0,
    "time/iterations": 6.0,
    "train/learning_rate": 7.0,
    "train/value_loss": 8.0,
    "train/policy_gradient_loss": 9.0,
    "train/entropy_loss": -10.0,
    "train/approx_kl": 11.0,
    "train/clip_fraction": 12.0,
    "train/explained_variance": 13.0,
    "train/std": 14.0,
    "train/clip_range": 15.0,
    "train/ent_coef": 16.0,
    "eval/mean_reward": 17.0,
    "env/speed": 18.0,
    "env/Episode_Reward/alive": 19.0,
}
# what dashboards of these frameworks look for; entropy is positive there, entropy_loss is its
# negative
FOREIGN = {
    "cleanrl": {
        "charts/episodic_return": 1.0,
        "charts/episodic_length": 2.0,
        "charts/SPS": 3.0,
        "charts/learning_rate": 7.0,
        "losses/value_loss": 8.0,
        "losses/policy_loss": 9.0,
        "losses/entropy": 10.0,
        "losses/approx_kl": 11.0,
        "losses/clipfrac": 12.0,
        "losses/explained_variance": 13.0,
        "losses/alpha": 16.0,
        "eval/episodic_return": 17.0,
        "env/speed": 18.0,
        "env/Episode_Reward/alive": 19.0,
        "time/iterations": 6.0,
    },
    "rsl_rl": {
        "Train/mean_reward": 1.0,
        "Train/mean_episode_length": 2.0,
        "Perf/total_fps": 3.0,
        "Perf/collection_time": 4.0,
        "Perf/learning_time": 5.0,
        "Loss/learning_rate": 7.0,
        "Loss/value": 8.0,
        "Loss/surrogate": 9.0,
        "Loss/entropy": 10.0,
        "Policy/mean_std": 14.0,
        "Episode/speed": 18.0,
        "Episode_Reward/alive": 19.0,
        "train/approx_kl": 11.0,
        "eval/mean_reward": 17.0,
    },
    "rl_games": {
        "rewards/step": 1.0,
        "episode_lengths/step": 2.0,
        "performance/step_inference_rl_update_fps": 3.0,
        "performance/rl_update_time": 5.0,
        "info/epochs": 6.0,
        "info/last_lr": 7.0,
        "losses/c_loss": 8.0,
        "losses/a_loss": 9.0,
        "losses/entropy": 10.0,
        "info/kl": 11.0,
        "info/e_clip": 15.0,
        "Episode/speed": 18.0,
        "Episode/Episode_Reward/alive": 19.0,
        "train/clip_fraction": 12.0,
    },
    "sb3": NATIVE,
}


@pytest.mark.parametrize("style", ALIASES)
def test_every_style_has_its_framework_s_names(style: str) -> None:
    renamed = in_style(NATIVE, style)
    assert {name: renamed.get(name) for name in FOREIGN[style]} == FOREIGN[style]
    assert sorted(map(abs, renamed.values())) == sorted(
        map(abs, NATIVE.values())
    )  # nothing lost, nothing twice


def test_a_style_renames_in_tensorboard_and_not_in_metrics(tmp_path: Path) -> None:
    logger = Logger(tmp_path, "cleanrl")
    logger.write(64, NATIVE)
    logger.close()
    assert set(events(tmp_path).Tags()["scalars"]) == set(in_style(NATIVE, "cleanrl"))
    assert curve(tmp_path, "losses/entropy") == [(64, 10.0)]
    assert lines(tmp_path)[0]["train/entropy_loss"] == -10.0


def test_rsl_rl_counts_iterations_and_an_evaluation_stands_at_the_last_one(tmp_path: Path) -> None:
    logger = Logger(tmp_path, "rsl_rl")
    logger.write(4096, {"time/iterations": 1.0, "train/std": 0.5})
    logger.write(4096, {"eval/mean_reward": 3.0})
    logger.close()
    assert curve(tmp_path, "Policy/mean_std") == [(1, 0.5)]
    assert curve(tmp_path, "eval/mean_reward") == [(1, 3.0)]


# ---- disks that fail ----

FULL_DISK = """
import resource, sys, time
from pathlib import Path
from gpurl.run.logger import Logger
def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
folder = Path(sys.argv[1])
logger = Logger(folder)
def write(steps):
    for step in steps:
        logger.write(step, {"train/loss": step / 7, "train/value_loss": 0.1})
    while not logger._queue.empty():
        time.sleep(0.01)
    time.sleep(0.5)  # the thread may still be writing the last one
def fill():  # no record is so short
    limit((folder / "metrics.jsonl").stat().st_size + 30)
write(range(1, 11)); fill(); write(range(11, 101))
limit(resource.RLIM_INFINITY); write(range(101, 111))
fill(); write(range(111, 121))
logger.close()
print("trained on")
"""


def test_a_full_disk_warns_once_a_time_and_leaves_whole_records(tmp_path: Path) -> None:
    """Full, then freed, then full again: two warnings for metrics.jsonl, and what was written in
    between is there.
    """
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained on\n"
    assert done.stderr.count("cannot write metrics.jsonl, the training continues") == 2
    # the limits are of the other file's size
    assert done.stderr.count("cannot write TensorBoard's event file") in (1, 2)
    steps = [line["step"] for line in lines(tmp_path)]
    assert steps == [*range(1, 11), *range(101, 111)]
    assert set(range(101, 111)) <= {
        step for step, _ in curve(tmp_path, "train/loss")
    }  # TensorBoard reads past the failure


@pytest.mark.timeout(20)
def test_a_pipe_or_a_link_in_place_of_the_log_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").write_text("mine\n")
    for name, make in (
        ("pipe", os.mkfifo),
        ("link", lambda path: path.symlink_to(tmp_path / "elsewhere")),
    ):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "metrics.jsonl")
        logger = Logger(tmp_path / name)
        logger.write(1, {"train/loss": 1.0})
        logger.close()
    assert caplog.text.count("cannot write metrics.jsonl, the training continues") == 2
    assert (tmp_path / "elsewhere").read_text() == "mine\n"


def test_a_hanging_disk_does_not_hold_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed = threading.Event()
    monkeypatch.setattr(module, "QUEUE_LENGTH", 4)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(module._EventFile, "_write", lambda *_: freed.wait(300))
    logger = Logger(tmp_path)
    for step in range(50):
        logger.write(step, {"train/loss": 1.0})
    logger.close()
    assert not freed.is_set()  # it ends while the disk still hangs
    assert caplog.text.count("cannot write TensorBoard's event file") == 1
    assert len(lines(tmp_path)) == 50
    freed.set()


def test_an_error_at_closing_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Network disks tell at closing that they were full."""

    def fail(self: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    logger = Logger(tmp_path)
    logger.write(1, {"train/loss": 1.0})
    monkeypatch.setattr(module._AppendFile, "close", fail)
    logger.close()
    assert caplog.text.count("Disk quota exceeded") == 2
