"""What the caller's process has set or is: other defaults of torch, a fork, several threads."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gpurl
from gpurl.cli.play import play_run
from gpurl.errors import UsageError
from tests.small_runs import ITERATION, assert_same, small_run, state_of

# ---- the working directory ----


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_an_environment_that_changes_the_working_directory_moves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = "tests.tiny_envs:Wanderer"
    for changes in ({"run_dir": "run"}, {"run_dir": None, "root": "all"}):
        run = small_run(Path("run"), 4, env=env, save_every="1i", **changes)
        assert not run.folder.is_absolute()  # as it was given
        assert run.outcome.unsaved == ""
        assert len(list(run.folder.glob("checkpoints/step_*"))) == 3
        assert (run.folder / "metrics.jsonl").exists()
        assert Path.cwd() == tmp_path  # the caller's again
    # a resume continues where the run was
    again = gpurl.resume("run", total_steps=6 * ITERATION)
    assert again.outcome.steps == 6 * ITERATION
    assert again.outcome.new_steps == 2 * ITERATION
    play_run("run", 1)
    assert (tmp_path / "run" / "episode.png").exists()
    os.chdir(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["all", "elsewhere", "run"]
    assert os.listdir(tmp_path / "elsewhere") == []


# ---- torch's defaults ----


@pytest.mark.parametrize("what", ["float64", "meta"])
def test_other_defaults_of_torch_are_told(what: str, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 1, eval_episodes=0)
    try:
        if what == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)
        for call in (
            lambda: small_run(tmp_path / "other", 1),
            lambda: gpurl.load(run.folder),
            lambda: gpurl.resume(run.folder, total_steps=2 * ITERATION),
        ):
            with pytest.raises(UsageError, match=rf"torch's default \w+ is .*{what}.*: call torch"):
                call()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


# ---- threads and forks ----


def test_trainings_in_threads_begin_with_the_weights_of_their_seed(tmp_path: Path) -> None:
    def train(place: str, seed: int) -> None:
        small_run(tmp_path / place, 1, seed=seed, eval_episodes=0, threads=1)

    for seed in range(4):
        train(f"alone{seed}", seed)
    threads = [threading.Thread(target=train, args=(f"beside{seed}", seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert_same(state_of(tmp_path / f"beside{seed}"), state_of(tmp_path / f"alone{seed}"))


def test_weights_are_drawn_by_one_thread_at_a_time() -> None:
    """The others wait: torch's random numbers are of the whole process."""
    from gpurl.algorithms.base import global_stream

    drawn: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(3)

    def draw(seed: int) -> None:
        barrier.wait()
        with global_stream(seed):
            drawn[seed] = torch.stack([torch.randn(()) for _ in range(2000)])

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, numbers in drawn.items():
        with global_stream(seed):
            assert torch.equal(numbers, torch.stack([torch.randn(()) for _ in range(2000)]))


@pytest.mark.usefixtures("_two_threads")
def test_a_fork_of_a_process_that_has_trained_says_so_before_it_trains_or_plays(
    tmp_path: Path,
) -> None:
    small_run(tmp_path / "parent", 1, eval_episodes=0, threads=2)

    def child(pipe: object) -> None:
        words = []
        for threads in (2, 1):
            torch.set_num_threads(threads)
            for use in (
                lambda threads=threads: small_run(tmp_path / f"child{threads}", 1).outcome.steps,
                lambda: gpurl.load(tmp_path / "parent").act(torch.zeros(3)).shape,
                lambda: gpurl.evaluate_run(tmp_path / "parent", 1, "cpu")["eval/episodes"],
            ):
                try:
                    words.append(str(use()))
                except UsageError as error:
                    words.append(str(error))
        pipe.send(words)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,))
    process.start()
    assert here.poll(60), "it hangs"
    words = here.recv()
    process.join()
    assert all("is a fork of one that has trained" in told for told in words[:3])
    assert words[3] == str(ITERATION)
    assert not any("fork" in answer for answer in words[4:])
