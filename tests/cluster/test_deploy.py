"""The files of deploy/ for clusters: manifests have what KubeRay requires and start commands that
gpurl has, the Slurm script starts a head, workers and the command.
"""

import contextlib
import os
import re
import shlex
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpurl.cli.settings import parse_population
from tests.small_runs import ROOT

DEPLOY = ROOT / "deploy"
# fields that the CRDs of ray.io/v1 know, here; those in capitals are required
CLUSTER_FIELDS = {"HEADGROUPSPEC", "workerGroupSpecs", "enableInTreeAutoscaling", "rayVersion"}
JOB_FIELDS = {
    *("entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"),
    *("backoffLimit", "submissionMode", "activeDeadlineSeconds"),
}
HEAD_FIELDS = {"TEMPLATE", "rayStartParams", "serviceType"}
WORKER_FIELDS = {
    *("GROUPNAME", "TEMPLATE", "MAXREPLICAS", "MINREPLICAS", "replicas", "rayStartParams"),
}


def read(name: str) -> dict[str, Any]:
    content = yaml.safe_load((DEPLOY / name).read_text())
    assert isinstance(content, dict)
    return content


def check_fields(values: Mapping[str, Any], fields: set[str]) -> None:
    known = {name.lower() for name in fields}
    assert {name.lower() for name in values} <= known, values.keys()
    required = {name.lower() for name in fields if name.isupper()}
    assert required <= {name.lower() for name in values}, values.keys()


def check_cluster(spec: Mapping[str, Any]) -> None:
    check_fields(spec, CLUSTER_FIELDS)
    check_fields(spec["headGroupSpec"], HEAD_FIELDS)
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in spec["workerGroupSpecs"]:
        check_fields(group, WORKER_FIELDS)
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups:
        # `ray start` takes texts
        assert all(type(each) is str for each in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        for container in pod["containers"]:
            assert container["image"] == "gpurl-ray:latest"
            # members on all nodes see one folder
            (mount,) = container["volumeMounts"]
            assert mount["mountPath"] == "/runs"
            claim = volumes[mount["name"]]["persistentVolumeClaim"]["claimName"]
            assert claim == "gpurl-runs"
            limits, requests = (container["resources"][name] for name in ("limits", "requests"))
            assert requests.keys() == limits.keys()
            assert limits.get("nvidia.com/gpu") == requests.get("nvidia.com/gpu")


def check_command(line: str) -> None:
    """A command that gpurl has, with settings that it knows, whose folder all nodes see."""
    name, command, *words = shlex.split(line)
    assert name == "gpurl"
    settings, options = parse_population(words, command)
    assert str(settings.train.run_dir).startswith("/runs/")
    assert options.gpus > 0


def test_a_cluster_of_kuberay() -> None:
    manifest = read("raycluster.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    assert re.fullmatch("[a-z][a-z0-9-]*", manifest["metadata"]["name"])
    check_cluster(manifest["spec"])
    text = (DEPLOY / "raycluster.yaml").read_text()
    (line,) = re.findall(r"service/(.+)-head-svc -- (gpurl .+)", text)
    assert line[0] == manifest["metadata"]["name"]
    check_command(line[1])


def test_a_job_of_kuberay() -> None:
    manifest = read("rayjob.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    check_fields(spec, JOB_FIELDS)
    check_cluster(spec["rayClusterSpec"])
    check_command(spec["entrypoint"])
    # the cluster does not outlive the job
    assert spec["shutdownAfterJobFinishes"] is True


@pytest.mark.parametrize("change", ["drop", "add", "number"])
def test_a_wrong_manifest_is_seen(change: str) -> None:
    spec = read("raycluster.yaml")["spec"]
    if change == "drop":
        del spec["workerGroupSpecs"][0]["groupName"]
    elif change == "add":
        spec["headGroupSpecs"] = {}
    else:
        spec["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    with pytest.raises(AssertionError):
        check_cluster(spec)


def test_the_image_for_ray_is_made_of_that_of_gpurl() -> None:
    text = (DEPLOY / "Dockerfile.ray").read_text()
    assert "\nFROM gpurl\n" in text
    assert "--constraint /opt/gpurl/constraints.txt 'ray[default,tune]'" in text
    base = (DEPLOY / "Dockerfile").read_text()
    assert "WORKDIR /opt/gpurl" in base
    assert "COPY pyproject.toml constraints.txt ./" in base


# ---- Slurm ----

# the command ends at once: not before all nodes have begun
GPURL = """#!/bin/bash
for _ in $(seq 300); do
    [ "$(grep -c '^ray start' "$LOG")" = 3 ] && break
    sleep 0.1
done
echo "gpurl $*" >> "$LOG"
exit "${GPURL_EXIT:-0}"
"""
# a step runs what it is given, without what is not here
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
RAY = """#!/bin/bash
echo "ray $* token=${#RAY_AUTH_TOKEN} mode=$RAY_AUTH_MODE" >> "$LOG"
echo $$ >> "$LOG.pids"
exec sleep 60
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Variables of a job with three nodes, whose commands write into LOG what they are given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "srun": SRUN,
        "ray": RAY,
        "gpurl": GPURL,
        "scontrol": "#!/bin/bash\nprintf 'n1\\nn2\\nn3\\n'\n",
        "hostname": "#!/bin/bash\necho 10.0.0.1 fe80::1\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    log = tmp_path / "log"
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "GPURL_HEAD_SECONDS": "0",
    }


def submit(words: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", str(DEPLOY / "slurm.sh"), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


WORDS = ["pbt", "ppo", "chasing", "--population", "6"]


def test_the_script_is_a_script() -> None:
    path = DEPLOY / "slurm.sh"
    assert path.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    # sbatch reads its options before the first command
    first = next(k for k, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(k < first for k, line in enumerate(lines) if line.startswith("#SBATCH"))
    (usage,) = [line for line in lines if line.startswith("#   sbatch ")]
    words = shlex.split(usage.split("slurm.sh")[1])
    parse_population(words[1:], words[0])


def test_it_starts_a_head_the_workers_and_the_command(slurm: dict[str, str]) -> None:
    done = submit(WORDS, slurm)
    assert done.returncode == 0, done.stderr
    lines = Path(slurm["LOG"]).read_text().splitlines()
    started = [line for line in lines if line.startswith("ray start")]
    assert len(started) == 3
    heads = [line for line in started if "--head" in line]
    assert len(heads) == 1
    assert "--port=20041 --node-ip-address=10.0.0.1 --include-dashboard=false" in heads[0]
    # everyone has the token
    assert all(line.endswith("token=64 mode=token") for line in started)
    assert sum("--address=10.0.0.1:20041" in line for line in started) == 2
    nodes = [
        line.split("--nodelist=")[1][:2]
        for line in lines
        if "ray start" in line[:200] and "srun" in line
    ]
    assert sorted(nodes) == ["n1", "n2", "n3"]
    (command,) = [line for line in lines if line.startswith("gpurl ")]
    assert command == "gpurl pbt ppo chasing --population 6 --address 10.0.0.1:20041"
    # nothing is left
    left = {*Path(f"{slurm['LOG']}.pids").read_text().split()}
    assert len(left) == 3
    deadline = time.monotonic() + 30
    while left := {each for each in left if is_running(each)}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_workers_wait_for_the_head(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "hostname").write_text("#!/bin/bash\necho 127.0.0.1\n")
    started: list[list[str]] = []

    def listen() -> None:
        log = Path(slurm["LOG"])
        deadline = time.monotonic() + 30
        while not log.exists() or "--head" not in log.read_text():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(1.5)
        started.append([line for line in log.read_text().splitlines() if "--address" in line])
        server.listen()

    with socket.socket() as server:
        # the port is 20000 and the number of the job
        for job in range(os.getpid() % 10_000, 20_000):
            with contextlib.suppress(OSError):
                server.bind(("127.0.0.1", 20_000 + job))
                break
        listener = threading.Thread(target=listen)
        listener.start()
        done = submit(WORDS, slurm | {"SLURM_JOB_ID": str(job), "GPURL_HEAD_SECONDS": "60"})
        listener.join()
    assert done.returncode == 0, done.stderr
    assert started == [[]]
    lines = Path(slurm["LOG"]).read_text().splitlines()
    assert (
        sum(f"--address=127.0.0.1:{20_000 + job}" in each for each in lines if "ray start" in each)
        >= 2
    )


def is_running(process: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_its_exit_code_is_that_of_the_command(slurm: dict[str, str]) -> None:
    assert submit(WORDS, slurm | {"GPURL_EXIT": "5"}).returncode == 5
    done = submit(WORDS[:2], slurm)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
    del slurm["SLURM_JOB_ID"]
    done = submit(WORDS, slurm)
    assert done.returncode
    assert "it is a script for sbatch" in done.stderr
