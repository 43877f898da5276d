"""What README and docs/ say is true: their Python runs, their commands are understood, their links
lead somewhere, and the names in the glossary are those of the code.
"""

import importlib.util
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

import gpurl
from gpurl.cli.main import COMMANDS, main
from gpurl.cli.settings import (
    parse_config,
    parse_convert,
    parse_population,
    parse_profile,
    parse_train,
    parse_tune,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md")
}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, code) of every block of code in `language`."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page, code) for page, text in PAGES.items() for code in pattern.findall(text)]


# a block that begins with `# my_env.py` is a file, any other a script
NAMED = [(re.match(r"# (\w+\.py)\b", code), page, code) for page, code in blocks("python")]
# tests/export/test_newcomer.py runs them, without gpurl
ALONE = {"act.py", "deploy.py"}
FILES = [(name[1], code) for name, _, code in NAMED if name and name[1] not in ALONE]
SCRIPTS = [(page, code) for name, page, code in NAMED if not name]
COMMAND_LINES = sorted(
    {
        line.partition("  #")[0].strip()
        for _, code in blocks("bash")
        for line in code.splitlines()
        if line.startswith("gpurl ")
    }
)

# how each file is trained: words behind `gpurl train`, and the return to be exceeded
SMALL = ["num_envs=4", "horizon=8", "minibatches=2", "total_steps=64", "eval_episodes=1"]
SMALL_REPLAY = ["num_envs=4", "total_steps=400", "learning_starts=64", "batch_size=32"]
SMALL_REPLAY += ["updates=2", "eval_episodes=1"]
SLIDER = ["eval_episodes=8", "learning_rate=3e-3", "schedule=constant"]
TRAININGS: dict[str, tuple[list[str], float]] = {
    "my_atari.py": (["ppo", "frame_stack:my_atari", *SMALL], -1e9),
    # doing nothing gets about -400, the best possible is 100 less the way to the origin
    "my_env.py": (["ppo", "my_env", "num_envs=256", "total_steps=300_000"], 60.0),
    "my_random_env.py": (["ppo", "my_random_env", *SMALL], -1e9),
    "my_drawn_env.py": (["ppo", "my_drawn_env", *SMALL, "--video-every", "32"], -1e9),
    "my_named_env.py": (["ppo", "my_named_env", *SMALL], -1e9),
    "my_graded_env.py": (["ppo", "my_graded_env", *SMALL], -1e9),
    "my_asymmetric_env.py": (["ppo", "my_asymmetric_env", *SMALL], -1e9),
    "my_seeing_env.py": (["ppo", "my_seeing_env", *SMALL], -1e9),
    "my_gym.py": (["ppo", "my_gym", "--env.gravity", "3.7", *SMALL], -1e9),
    # doing nothing gets about -25
    "my_slider.py": (
        ["ppo", "my_slider", "num_envs=64", "horizon=32", "total_steps=30_000", *SLIDER],
        -18.0,
    ),
    "my_sim.py": (["ppo", "my_sim", *SMALL], -1e9),
    # doing nothing gets about -50, the best possible about -1.5
    "my_vec_env.py": (["ppo", "my_vec_env", "num_envs=64", "total_steps=100_000"], -10.0),
    "my_ppo.py": (["my_ppo", "chasing", *SMALL], -1e9),
    "my_sac.py": (["my_sac", "pendulum", *SMALL_REPLAY], -1e9),
    "my_trunk.py": (["ppo", "chasing", *SMALL, "--network", "my_trunk:Residual"], -1e9),
    "my_mirror.py": (["ppo", "pendulum", *SMALL, "--symmetry", "my_mirror:mirror"], -1e9),
    "my_blind_env.py": (["ppo", "my_blind_env", *SMALL], -1e9),
    "my_network.py": (["my_network", "chasing", *SMALL], -1e9),
    "my_q_network.py": (["my_q_network", "cart_pole", *SMALL_REPLAY], -1e9),
    # chance gets about 20
    "my_algorithm.py": (
        ["my_algorithm", "cart_pole", "num_envs=256", "total_steps=150_000", "learning_rate=3e-3"],
        100.0,
    ),
    "my_exported.py": (["my_exported", "chasing", *SMALL], -1e9),
    "my_callback.py": (
        ["ppo", "chasing", *SMALL, "--callback", "my_callback:StopWhenSure"],
        -1e9,
    ),
    "my_curriculum.py": (
        ["ppo", "my_curriculum", *SMALL, "--callback", "my_curriculum:Widen"],
        -1e9,
    ),
}
NEEDS = {"my_slider.py": "mujoco_warp", "my_atari.py": "cv2"}
SHORTER = {
    "num_envs=4096": "num_envs=64",
    "total_steps=20_000_000": "total_steps=10_000, eval_episodes=4",
    '"total_steps": 20_000': '"total_steps": 2_000',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with every file that the pages show."""
    for name, code in FILES:
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    games = [] if importlib.util.find_spec("ale_py") else ["ale_py", "cv2"]
    if games:  # stand-ins
        monkeypatch.syspath_prepend(str(ROOT / "tests" / "envs" / "fake_atari"))
    yield tmp_path
    for name in (*games, *(name.removesuffix(".py") for name, _ in FILES)):
        sys.modules.pop(name, None)
    if games:
        gymnasium.registry.pop("ALE/Pong-v5", None)


def test_readme_is_one_page_without_scroll_bars() -> None:
    """On the page of a repository about 95 columns of code are seen; ends of lines are comments."""
    assert len(PAGES["README.md"].splitlines()) <= 130
    code = [
        code
        for language in ("bash", "python")
        for page, code in blocks(language)
        if page == "README.md"
    ]
    assert len(code) == 5
    assert max(len(line) for block in code for line in block.splitlines()) <= 88


# ---- Python ----


def test_every_file_has_a_name_of_its_own_and_is_trained() -> None:
    assert sorted(name for name, _ in FILES) == sorted(TRAININGS)


@pytest.mark.parametrize("name", TRAININGS)
def test_files_train(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    words, min_return = TRAININGS[name]
    assert main(["train", *words, "device=cpu", "threads=1", "run_dir=run"]) == 0
    output = capsys.readouterr().out
    value = re.search(r"evaluated return (-?[\d.]+)", output)
    assert value, output
    assert float(value[1]) > min_return


def test_a_working_directory_is_searched_by_the_command(folder: Path) -> None:
    """In a process of its own, where gpurl is importable and the folder is only the working one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gpurl", "check-env", "my_env"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keeps the contract" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("my_random_env", "my_graded_env", "my_asymmetric_env", "my_vec_env"),
        *("my_gym", "my_slider", "my_atari", "frame_stack:my_atari"),
    ],
)
def test_environments_keep_the_contract(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"{name.rpartition(':')[2]}.py"
    if file in NEEDS:
        pytest.importorskip(NEEDS[file])
    assert main(["check-env", name]) == 0
    assert "keeps the contract" in capsys.readouterr().out


def test_an_option_is_written_down_and_resumed(folder: Path) -> None:
    words = ["ppo", "my_gym", "--env.gravity", "3.7", *SMALL, "run_dir=run", "quiet=true"]
    assert main(["train", *words]) == 0
    assert "gravity: 3.7" in (folder / "run" / "config.yaml").read_text()
    assert main(["train", "--resume", "run", "total_steps=128"]) == 0


@pytest.mark.parametrize(("page", "code"), SCRIPTS, ids=[page for page, _ in SCRIPTS])
def test_scripts_run(page: str, code: str, folder: Path) -> None:
    compile(code, page, "exec")
    for library in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    (folder / "script.py").write_text(code)
    values = runpy.run_path(str(folder / "script.py"))
    if "action" in values:
        assert values["action"].shape == (1, 2)


# ---- commands ----


def test_command_lines_are_understood(folder: Path) -> None:
    """Each line of the pages becomes settings; nothing is trained."""
    (folder / "my.yaml").write_text("num_envs: 8\n")
    for tuning in (folder / "runs/pendulum/ppo/tuning", folder / "pendulum"):
        tuning.mkdir(parents=True)
        (tuning / "best.yaml").write_text("algorithm: ppo\nenv: pendulum\n")
    small = {"num_envs": 4, "horizon": 8, "minibatches": 2, "total_steps": 64}
    run = gpurl.train("ppo", "chasing", run_dir="RUN", eval_episodes=0, quiet=True, **small)
    (newest,) = (run.folder / "checkpoints").glob("step_*")
    assert len(COMMAND_LINES) > 30
    for line in COMMAND_LINES:
        line = line.replace(" ENV", " chasing").replace("step_000010000000", newest.name)
        command, *words = shlex.split(line)[1:]
        assert command in COMMANDS, line
        if command == "train":
            settings, _ = parse_train(words)
            assert settings.train.num_envs > 0, line
        elif command == "tune":
            parse_tune(words)
        elif command in ("pbt", "tournament"):
            parse_population(words, command)
        elif command == "config":
            parse_config(list(itertools.takewhile(lambda word: word != ">", words)))
        elif command == "profile":
            parse_profile(words)
        elif command == "convert":
            parse_convert(words)


# ---- links and names ----


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", PAGES[page])
    for link in links:
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {link}"


def test_readme_links_every_page_of_docs() -> None:
    for page in PAGES:
        if page.startswith("docs/"):
            assert f"({page}" in PAGES["README.md"], page


def test_the_glossary_has_the_names_of_the_code() -> None:
    folders = [ROOT / name for name in ("gpurl", "envs", "kernels")]
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", PAGES["docs/glossary.md"], re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(names) > 50
    for name in names:
        word = re.sub(r'^info\["(\w+)"\]$', r"\1", name)
        assert re.search(rf"\b{re.escape(word)}\b", source), f"the code has no {name}"
