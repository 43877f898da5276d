"""Trackers: what arrives in the real packages is metrics.jsonl, key by key and step by step; one
that fails, hangs or dies costs the training a line of warning. Nothing leaves this machine.
"""

import importlib.util
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl.errors import UsageError
from gpurl.run.trackers import process as module
from gpurl.run.trackers.process import read_ids
from tests.small_runs import ITERATION, SMALL, small_run

NOT_METRICS = ("step", "time")
Rows = dict[tuple[int, str], list[float]]  # by step and name, in order


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """First bytes of every request that leaves this machine, also of processes and other languages:
    all of them go through a proxy, this one.
    """
    seen: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    seen.append(connection.recv(200))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            for key in (name, name.upper()):
                monkeypatch.setenv(key, f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield seen
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def in_metrics(folder: Path) -> Rows:
    rows: Rows = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name not in NOT_METRICS and value is not None:
                rows.setdefault((line["step"], name), []).append(value)
    return rows


# ---- what arrived in the real packages ----


def in_wandb(root: Path, run_id: str) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    rows: Rows = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for path in sorted(root.glob(f"wandb/offline-run-*-{run_id}/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.history.item:
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                step = items.pop("_step")
                for name, value in items.items():
                    if not name.startswith("_"):
                        rows.setdefault((step, name), []).append(value)
            for item in (*record.config.update, *record.run.config.update):
                config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return rows, config, summary


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: LevelDB's log format after seven bytes."""
    block, record = 32768, b""
    place = 7
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def in_trackio(root: Path, run_id: str) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([S.get_logs('tests', sys.argv[1]), "
        "S.get_run_config('tests', sys.argv[1])], default=str))"
    )
    words = [sys.executable, "-c", code, run_id]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    logs, config = json.loads(done.stdout.splitlines()[-1])
    rows: Rows = {}
    summary: dict[str, Any] = {}
    for line in logs:
        for name, value in line.items():
            if name.startswith("summary/"):
                summary[name.removeprefix("summary/")] = value
            elif name not in ("step", "timestamp", "time"):
                rows.setdefault((line["step"], name), []).append(value)
    return rows, config, summary


def in_mlflow(root: Path, run_id: str) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "tests"
    rows: Rows = {}
    for name in run.data.metrics:
        for entry in client.get_metric_history(run_id, name):
            rows.setdefault((entry.step, name), []).append(entry.value)
    return rows, run.data.params, run.data.tags


READERS = {"wandb": in_wandb, "trackio": in_trackio, "mlflow": in_mlflow}
NEEDS = {"wandb": ["wandb"], "trackio": ["trackio"], "mlflow": ["mlflow", "sqlalchemy", "alembic"]}


@pytest.mark.parametrize("name", READERS)
def test_what_arrives_is_metrics_jsonl(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: list[bytes]
) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the extra {name}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # of this process, which reads
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("gpurl.run.trackers.process.FINISH_SECONDS", 120.0)  # of a busy machine
    root = tmp_path / "runs"
    settings: dict[str, Any] = {
        "root": str(root),
        "track": (name,),
        "project": "tests",
        "eval_every": ITERATION,
    }
    run = small_run(tmp_path / "run", 3, **settings)
    first_ids = read_ids(run.folder)
    gpurl.resume(run.folder, total_steps=5 * ITERATION)
    # the same run of the tracker, with everything in it
    assert read_ids(run.folder) == first_ids
    rows, config, summary = READERS[name](root, first_ids[name])
    expected = in_metrics(run.folder)
    assert len({step for step, _ in expected}) == 5
    assert {key: len(values) for key, values in rows.items()} == {
        key: len(values) for key, values in expected.items()
    }
    for key, values in expected.items():
        assert rows[key] == pytest.approx(values, rel=1e-6), key
    # settings and summary
    assert str(config["algorithm"]) == "ppo"
    assert float(config["num_envs"]) == SMALL["num_envs"]
    assert summary["ended_by"] == "total_steps"
    assert float(summary["env_steps"]) == 5 * ITERATION
    best = max(values[0] for (_, tag), values in expected.items() if tag == "eval/mean_reward")
    assert float(summary["best_return"]) == pytest.approx(best)
    assert requests == []


def test_the_proxy_of_these_tests_sees_a_request(requests: list[bytes]) -> None:
    code = "import urllib.request as u; u.urlopen('http://192.0.2.1/x', timeout=5)"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert requests[0].startswith(b"GET http://192.0.2.1/x")


# ---- trackers that fail, played by a package of the same name ----

FAKE = """
import json, os, sys, time
class Settings:
    sync_dir, base_url = "files of the run", "https://wandb.test"
    def __init__(self, mode="online", **settings): self.mode = mode
class Run:
    def __init__(self, id, settings):
        self.id, self.config, self.summary, self.settings = id, {}, {}, settings
    def log(self, values, step):
        {on_log}
    def finish(self, exit_code):
        {on_finish}
def init(project, name, id, resume, settings):
    {on_init}
    return Run(id, settings)
def setup():
    class Session: settings = Settings()
    return Session()
def teardown():
    pass
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a package wandb whose functions do what they are told."""

    def write(on_init: str = "pass", on_log: str = "pass", on_finish: str = "pass") -> None:
        folder = tmp_path / "packages"
        folder.mkdir()
        parts = {"on_init": on_init, "on_log": on_log, "on_finish": on_finish}
        code = FAKE
        for name, part in parts.items():
            code = code.replace(f"{{{name}}}", part)
        (folder / "wandb.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(module, "FINISH_SECONDS", 2.0)

    return write


@pytest.mark.parametrize(
    ("part", "code", "message"),
    [
        ("on_init", "raise RuntimeError('no key')", "RuntimeError: no key"),
        ("on_init", "sys.exit('no key')", "SystemExit: no key"),
        ("on_init", "input('your key? ')", "EOFError"),
        ("on_init", "time.sleep(100)", "did not finish in time and was ended"),
        ("on_log", "time.sleep(100)", "did not finish in time and was ended"),
        ("on_log", "raise OSError('no network')", "OSError: no network"),
        ("on_log", "os._exit(3)", "its process has ended"),
        ("on_log", "os.kill(os.getpid(), 9)", "its process has ended"),
        ("on_finish", "time.sleep(100)", "did not finish in time and was ended"),
        ("on_finish", "raise OSError('no network')", "OSError: no network"),
    ],
)
def test_a_tracker_that_fails_costs_a_line(
    part: str, code: str, message: str, fake: Any, tmp_path: Path, caplog: Any
) -> None:
    fake(**{part: code})
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        run = small_run(tmp_path / "run", 3, track=("wandb",), eval_episodes=0)
    assert run.outcome.reason == "total_steps"
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 3
    lines = [line.getMessage() for line in caplog.records if "tracker" in line.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"tracker wandb: {message}")
    assert "the training goes on" in lines[0]
    assert time.monotonic() - began < 60  # of 100 that it wants


def test_a_tracker_without_its_server_writes_files_to_send_later(
    fake: Any, tmp_path: Path, caplog: Any
) -> None:
    logged = tmp_path / "logged"
    fake(
        on_init="\n    ".join(
            (
                "if settings.mode != 'offline':",
                "    raise OSError('connection refused')",
            )
        ),
        on_log=f"open({str(logged)!r}, 'a').write(f'{{step}}\\n')",
    )
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        run = small_run(tmp_path / "run", 3, track=("wandb",), eval_episodes=0)
    (line,) = (line.getMessage() for line in caplog.records if "tracker" in line.getMessage())
    assert line == (
        f"tracker wandb: no run on https://wandb.test (OSError: connection refused); the training "
        f"goes on ({run.folder}/tracking/wandb.log); later: wandb sync files of the run"
    )
    steps = [json.loads(each)["step"] for each in (run.folder / "metrics.jsonl").open()]
    assert list(map(int, logged.read_text().split())) == steps


@pytest.mark.parametrize("server", ["", "http://127.0.0.1:9"])
def test_without_key_or_server_wandb_loses_nothing(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """With the real package; port 9 refuses."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of this machine's user
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    if server:
        monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
        monkeypatch.setenv("WANDB_BASE_URL", server)
    monkeypatch.setattr(module, "FINISH_SECONDS", 120.0)  # of a busy machine
    root = tmp_path / "runs"
    with caplog.at_level(logging.WARNING, logger="gpurl"):
        run = small_run(tmp_path / "run", 2, track=("wandb",), root=str(root), project="tests")
    (line,) = (line.getMessage() for line in caplog.records if "tracker" in line.getMessage())
    assert line.startswith(f"tracker wandb: no run on {server or 'https://'}")
    (folder,) = (root / "wandb").glob("offline-run-*")
    assert line.endswith(f"; later: wandb sync {folder}")
    rows, _, summary = in_wandb(root, read_ids(run.folder)["wandb"])
    assert rows == {key: pytest.approx(each) for key, each in in_metrics(run.folder).items()}
    assert summary["ended_by"] == "total_steps"


def test_a_process_that_hangs_is_ended_with_its_children(fake: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fake(
        on_init="import subprocess; child = subprocess.Popen(['sleep', '100']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(100)"
    )
    small_run(tmp_path / "run", 1, track=("wandb",), eval_episodes=0)
    for pid in map(int, pids.read_text().split()):
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def test_a_training_that_fails_is_told(fake: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    fake(on_finish=f"open({str(told)!r}, 'w').write(json.dumps([self.summary, exit_code]))")

    class Fails(gpurl.Callback):
        def after_iteration(self, run: Any, metrics: Any) -> None:
            raise UsageError("stop here")

    with pytest.raises(UsageError, match="stop here"):
        small_run(tmp_path / "run", 3, track=("wandb",), eval_episodes=0, callbacks=[Fails()])
    summary, exit_code = json.loads(told.read_text())
    assert (summary["ended_by"], exit_code) == ("error: UsageError", 1)


def test_the_package_must_be_there_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"track mlflow needs .* pip install -e '.*\[mlflow\]'"):
        small_run(tmp_path / "run", 1, track=("mlflow",))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="no tracker is called 'wandbb'; did you mean wandb"):
        small_run(tmp_path / "run", 1, track=("wandbb",))


def test_a_module_in_the_working_directory_is_not_taken_for_a_tracker(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "wandb.py").write_text("open('was_run', 'w')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    small_run(tmp_path / "run", 1, track=("wandb",), eval_episodes=0)
    assert not Path("was_run").exists()
    assert os.listdir(tmp_path / "run" / "tracking") == ["wandb.log"]
