"""A newcomer's path, as README says it: train, film, export, act from ONNX without gpurl."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/export.md").read_text()
SHORTER = ("200_000", "20_000")
START = "gpurl train ppo cart_pole"
# an import hook in the process's own start: gpurl and torch do not exist
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gpurl", "torch"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
"""


def run(words: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alone(folder: Path, name: str) -> Path:
    """Write the script `name` of the page into `folder`, and a hook that hides gpurl and torch;
    returns the hook's folder.
    """
    (script,) = re.findall(rf"```python\n(# {re.escape(name)}.*?)```", PAGE, re.DOTALL)
    (folder / name).write_text(script)
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(BLOCKED)
    return hook


def test_plain_mujoco_gets_the_same_return(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("mujoco")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    (block,) = (each for each in blocks if "deploy.py" in each)
    train, export, evaluate, deploy = (line.partition("  #")[0] for line in block.splitlines())
    for line in (train.replace("1_000_000", "8_000"), export):
        words = [*shlex.split(line)[1:], *(["--eval-episodes", "0"] if line != export else [])]
        run([sys.executable, "-m", "gpurl", *words], tmp_path, PYTHONPATH=str(ROOT))
    words = [sys.executable, "-m", "gpurl", *shlex.split(evaluate)[1:], "--json"]
    wanted = json.loads(run(words, tmp_path, PYTHONPATH=str(ROOT)))["eval/mean_reward"]
    hook = alone(tmp_path, "deploy.py")
    output = run([sys.executable, *shlex.split(deploy)[1:]], tmp_path, PYTHONPATH=str(hook))
    assert float(output.removeprefix("return ")) == pytest.approx(wanted, abs=0.05)


def test_four_commands_lead_to_a_video_and_a_policy_that_acts_without_gpurl(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("imageio_ffmpeg")
    (block,) = (
        each for each in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if START in each
    )
    lines = [line.partition("  #")[0].strip() for line in block[block.index(START) :].splitlines()]
    assert [line.split()[:2] for line in lines] == [
        ["gpurl", "train"],
        ["gpurl", "play"],
        ["gpurl", "export"],
        ["python", "act.py"],
    ]
    hook = alone(tmp_path, "act.py")
    for line in lines[:3]:
        words = shlex.split(line.replace(*SHORTER))[1:]
        run([sys.executable, "-m", "gpurl", *words], tmp_path, PYTHONPATH=str(ROOT))
    assert (tmp_path / "my_run.mp4").stat().st_size > 10_000
    output = run([sys.executable, *shlex.split(lines[3])[1:]], tmp_path, PYTHONPATH=str(hook))
    episode_return = float(re.fullmatch(r"return ([\d.]+)\n", output)[1])
    assert episode_return > 15.0  # a constant action gets 8 to 10
    # the hook works
    with pytest.raises(AssertionError, match="gpurl is blocked"):
        run([sys.executable, "-c", "import gpurl"], tmp_path, PYTHONPATH=str(hook))
