"""Populations on Ray, from end to end: 6 members on 2 CPUs, processes that are killed, trials of
Ray Tune. `make ray` runs these.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurl.checkpoints.folders import load_checkpoint
from gpurl.checkpoints.leaderboard import Leaderboard
from gpurl.cluster.driver import BOARD, FILE
from tests.cli.test_processes import listening
from tests.small_runs import ROOT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install -e '.[ray]'",
    ),
    pytest.mark.timeout(900),
]
LIMIT = 600  # seconds of a command on a machine that others work on
MEMBERS, EVERY = 6, 2048
# else Ray takes 127.0.0.1 for another address of this machine, where this cluster does not listen
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
WORDS = [
    *("--population", str(MEMBERS), "--num-envs", "32", "--horizon", "16", "--minibatches", "2"),
    *("--pbt-every", str(EVERY), "--eval-episodes", "8", "--network.hidden", "16"),
    *("--preset", "none", "--save-every", "2i", "--cpus", "1", "--env.max-episode-steps", "50"),
]


def words(command: str, env: str, folder: Path, slices: int) -> list[str]:
    total = ["--total-steps", str(slices * EVERY), "--run-dir", str(folder)]
    return [command, "ppo", env, *WORDS, *total]


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    count = len(STARTED)
    yield
    for process in STARTED[count:]:
        if process.poll() is None:
            process.kill()
            process.communicate()


STARTED: list["subprocess.Popen[str]"] = []


def start(words: list[str], module: str = "gpurl", **environment: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    STARTED.append(process)
    return process


def processes() -> dict[int, tuple[int, str]]:
    """{process: (its parent, its command)} of this machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue
        found[int(folder.name)] = (int(status[1]), command)
    return found


def descendants(of: int) -> dict[int, str]:
    """{process: command} of all that `of` has started."""
    all_, found = processes(), {of: ""}
    while more := {k: x for k, (parent, x) in all_.items() if parent in found and k not in found}:
        found |= more
    return found


@pytest.fixture(scope="module")
def head() -> Iterator["subprocess.Popen[str]"]:
    process = start([], "tests.cluster.head")
    assert process.stdout is not None
    process.address = process.stdout.readline().strip()  # type: ignore[attr-defined]
    yield process
    process.communicate("\n", timeout=LIMIT)


@pytest.fixture
def cluster(head: Any) -> dict[str, str]:
    """Variables with which a command finds the cluster and its token."""
    return {"RAY_ADDRESS": head.address, "RAY_AUTH_MODE": "token", **ON_LOOPBACK}


def wait_for(condition: Any, process: "subprocess.Popen[str]", seconds: float = LIMIT) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def check_trained(
    folder: Path, output: str, slices: int, members: int = MEMBERS, may_stay: bool = False
) -> list[dict[str, Any]]:
    """All members have done their slices, and can be loaded; returns their rows. may_stay: nobody
    waits, so that it depends on who finished first whether one went on from another.
    """
    assert f"{members} members, {members} of them live" in output
    rows = json.loads((folder / FILE).read_text())["members"]
    assert [len(row["slices"]) for row in rows] == [slices] * members
    for row in rows:
        assert row["slices"][-1]["steps"] >= slices * EVERY
    for k in range(members):
        assert load_checkpoint(folder / f"member_{k:03d}")[1]["step"] >= slices * EVERY
    assert any(each["source"] for row in rows for each in row["slices"]) or may_stay
    return rows


def test_the_cluster_is_of_this_machine_alone(head: Any) -> None:
    names = {k: command for k, command in descendants(head.pid).items() if k != head.pid}
    assert any("gcs_server" in command for command in names.values())
    assert any("raylet" in command for command in names.values())
    addresses = listening([head.pid, *names])
    assert len(addresses) >= 3
    assert {*addresses} <= LOOPBACK


@pytest.mark.parametrize("env", ["pendulum", "chasing"])
def test_a_killed_member_recovers(env: str, cluster: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    driver = start(words("pbt", env, folder, 2), **cluster)
    # kill the process of a member that trains its second slice
    schedule = folder / FILE

    def running() -> list[list[str]]:
        if not schedule.exists():
            return []
        rows = json.loads(schedule.read_text())["members"]
        begun = [k for k, row in enumerate(rows) if row["job"] and len(row["slices"]) == 1]
        return [words for k in begun if len(words := pid_of(k)) > 1]

    def pid_of(k: int) -> list[str]:
        """Empty while it is being written."""
        return (folder / f"member_{k:03d}" / "run.pid").read_text().split()

    process = int(wait_for(running, driver)[0][1])
    assert "ray::" in processes()[process][1]
    os.kill(process, signal.SIGKILL)
    output, _ = driver.communicate(timeout=LIMIT)
    assert driver.returncode == 0, output
    assert f"{MEMBERS} members, room for 2 at a time (1 CPU each): they take turns" in output
    assert f"process {process} on 127.0.0.1 has ended" in output
    assert "another process goes on with it" in output
    check_trained(folder, output, 2, may_stay=True)


@pytest.mark.parametrize("env", ["pendulum", "chasing"])
def test_generations(env: str, cluster: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    driver = start([*words("pbt", env, folder, 2), "--pbt-rule", "generation"], **cluster)
    output, _ = driver.communicate(timeout=LIMIT)
    assert driver.returncode == 0, output
    rows = check_trained(folder, output, 2)
    # everyone in place of a worse one has the newest state of the generation before
    for row in rows:
        for number, each in enumerate(row["slices"]):
            assert not each["source"] or each["source"].endswith(f"-{number - 1}")


def test_a_tournament(cluster: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    driver = start(words("tournament", "chasing", folder, 2), **cluster)
    output, _ = driver.communicate(timeout=LIMIT)
    assert driver.returncode == 0, output
    check_trained(folder, output, 2)
    assert len(Leaderboard(folder / BOARD, 12).entries()) == MEMBERS


def test_a_leaderboard_outlives_its_actor_and_the_driver(
    head: Any, cluster: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    command = words("tournament", "pendulum", folder, 3)
    driver = start(command, **cluster)
    board = folder / BOARD

    def entries() -> int:
        return len(Leaderboard(board, 12).entries()) if (board / "leaderboard.json").exists() else 0

    # the actor is killed: Ray starts another one, which reads the folder
    wait_for(lambda: entries() >= 2, driver)
    (actor,) = [k for k, name in descendants(head.pid).items() if "ray::BoardRows" in name]
    os.kill(actor, signal.SIGKILL)
    wait_for(lambda: entries() >= 4, driver)
    # the driver is killed: its actors end, what they have entered stays
    driver.kill()
    driver.communicate()
    before = Leaderboard(board, 12).entries()
    assert len(before) >= 4
    for entry in before:
        assert Leaderboard(board, 12).load(entry, "cpu")["weights"]  # type: ignore[arg-type]
    driver = start(command, **cluster)
    output, _ = driver.communicate(timeout=LIMIT)
    assert driver.returncode == 0, output
    assert "members, 0 slices" not in output
    check_trained(folder, output, 3)
    names = {each.name for each in before}
    after = {each.name: each.score for each in Leaderboard(board, 12).entries()}
    assert len(after) == MEMBERS
    assert names <= after.keys()
    assert all(after[each.name] >= each.score for each in before)


def test_nodes_come_and_go(tmp_path: Path) -> None:
    """Three members on one CPU, then on two, then on one again."""
    folder = tmp_path / "plan"
    nodes = start([], "tests.cluster.nodes")
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    address = nodes.stdout.readline().strip()
    command = [*words("pbt", "pendulum", folder, 4), "--population", "3", "--address", address]
    driver = start(command, **ON_LOOPBACK)

    def busy() -> int:
        """Members in training."""
        if not (folder / FILE).exists():
            return 0
        return sum(bool(row["job"]) for row in json.loads((folder / FILE).read_text())["members"])

    wait_for(lambda: busy() == 1, driver)
    nodes.stdin.write("add\n")
    nodes.stdin.flush()
    wait_for(lambda: busy() == 2, driver)
    nodes.stdin.write("remove\n")
    nodes.stdin.flush()
    output, _ = driver.communicate(timeout=LIMIT)
    nodes.communicate(timeout=LIMIT)
    assert driver.returncode == 0, output
    assert "3 members, room for 1 at a time (1 CPU each): they take turns" in output
    assert "another process goes on with it" in output
    check_trained(folder, output, 4, 3)


def test_trials_of_ray_tune(cluster: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="Ray Tune needs pandas: pip install -e '.[ray]'")
    process = start([str(tmp_path)], "tests.cluster.tuned", **cluster)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    found = json.loads(output.splitlines()[-1])
    assert found["errors"] == 0
    assert [each["steps"] for each in found["trials"]] == [2 * EVERY] * 2
    assert found["exploited"] > 0
    # the settings that Tune has chosen are those that the runs had in the end
    for each in found["trials"]:
        assert each["rate_in_run"] == pytest.approx(each["rate"])
