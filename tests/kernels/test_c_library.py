"""Building the C kernels: at first use, in the user's own folder, by one compiler or two processes
at once; and doing without.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurl.cli import doctor
from gpurl.engine.cpu_ppo import cpu_ppo_obstacle
from gpurl.kernels import c_library
from tests.small_runs import ITERATION, ROOT, small_run

has_compiler = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and no memory of an earlier load; afterwards the process has its library
    again.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GPURL_CPU_KERNEL", raising=False)
    c_library.load.cache_clear()
    yield
    c_library.load.cache_clear()


def compiler_that(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `cc` on the path, in front of the others."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{does}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@has_compiler
def test_it_is_built_once_into_a_folder_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions, where = c_library.load()
    assert functions is not None
    assert Path(where).parent == tmp_path / "gpurl"
    assert (tmp_path / "gpurl").stat().st_mode & 0o777 == 0o700
    assert os.listdir(tmp_path / "gpurl") == [Path(where).name]  # nothing temporary stays
    monkeypatch.setattr(c_library, "_build", lambda *arguments: pytest.fail("built again"))
    c_library.load.cache_clear()
    assert c_library.load().why == where


@has_compiler
def test_another_source_flag_or_processor_is_another_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(c_library, "FOLDER", tmp_path / "kernels")
    names = {c_library._fingerprint("cc")}
    (tmp_path / "kernels" / "b.h").write_text("int two(void);")
    names.add(c_library._fingerprint("cc"))
    monkeypatch.setattr(c_library, "FLAGS", [*c_library.FLAGS, "-g"])
    names.add(c_library._fingerprint("cc"))
    monkeypatch.setattr(c_library, "_processor", lambda: "abacus")
    names.add(c_library._fingerprint("cc"))
    assert len(names) == 4


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert c_library.load() == (None, "there is no C compiler (cc, gcc or clang)")
    assert "torch serves instead, which is slower: there is no C compiler" in doctor.report()


def test_the_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURL_CPU_KERNEL", "0")
    assert c_library.load() == (None, "GPURL_CPU_KERNEL is 0")


@pytest.mark.parametrize(
    "does",
    ["echo 'no space left' >&2; exit 1", 'echo "cc 1.0"; [ "$1" = --version ] || kill -9 $$'],
)
def test_a_broken_compiler_is_a_reason(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(tmp_path / "bin", does, monkeypatch)
    functions, why = c_library.load()
    assert functions is None
    assert "cc failed: " in why


def test_a_library_that_does_not_load_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(
        tmp_path / "bin",
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done',
        monkeypatch,
    )
    functions, why = c_library.load()
    assert functions is None
    assert "cpu_" in why


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpurl").mkdir(mode=0o700)
    (tmp_path / "gpurl").chmod(0o770)
    assert c_library.load() == (
        None,
        f"{tmp_path / 'gpurl'} must belong to you alone: chmod 700 {tmp_path / 'gpurl'}",
    )


def test_a_cache_that_cannot_be_made_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    functions, why = c_library.load()
    assert functions is None
    assert "Not a directory" in why


def tiny_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that answers with a library of one function, at once."""
    (tmp_path / "x.c").write_text("int seven(void) { return 7; }\n")
    good = tmp_path / "good.so"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "x.c", "-o", good], check=True)
    copies = f'while [ $# -gt 1 ]; do [ "$1" = -o ] && cp {good} "$2"; shift; done'
    compiler_that(tmp_path / "bin", copies, monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


@has_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_library_is_built_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a power failure: loaded, it would end the process or compute other numbers."""
    tiny_library(tmp_path, monkeypatch)
    library = Path(c_library.load().why)
    content = library.read_bytes()
    # another file: this process has the first one in its memory
    library.unlink()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    library.write_bytes({"cut": content[:4096], "empty": b"", "flipped": bytes(flipped)}[damage])
    c_library.load.cache_clear()
    functions, why = c_library.load()
    assert functions is not None, why
    assert functions.seven() == 7
    assert Path(why).read_bytes() == content
    assert caplog.text.count("is damaged, the C kernels are built again") == 1
    assert os.listdir(tmp_path / "gpurl") == [library.name]
    # an intact one is not
    c_library.load.cache_clear()
    assert c_library.load().why == why
    assert caplog.text.count("is damaged") == 1


@has_compiler
def test_sources_that_change_meanwhile_are_not_kept_under_the_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a git checkout beside a training does."""
    tiny_library(tmp_path, monkeypatch)
    sources = tmp_path / "cpu"
    sources.mkdir()
    (sources / "x.c").write_text("int seven(void) { return 7; }\n")
    monkeypatch.setattr(c_library, "FOLDER", sources)
    compiler = tmp_path / "bin" / "cc"
    compiler.write_text(compiler.read_text() + f'[ "$1" = --version ] || echo >> {sources}/x.c\n')
    functions, why = c_library.load()
    assert functions is None
    assert "changed while they were compiled" in why
    assert not list((tmp_path / "gpurl").iterdir())


@has_compiler
def test_a_library_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_library(tmp_path, monkeypatch)
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    assert c_library.load().functions is not None
    assert done == ["fsync", "name"]


@has_compiler
def test_a_relative_cache_and_a_missing_home_are_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_library(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert c_library.load().why.startswith(str(tmp_path / "home" / ".cache" / "gpurl"))
    assert not (tmp_path / "here").exists()

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    c_library.load.cache_clear()
    assert c_library.load() == (None, "Could not determine home directory.")


@has_compiler
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    code = (
        "from gpurl.kernels import c_library; functions, why = c_library.load(); assert functions "
        "is not None, why; print(why)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=200)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(said) == 1
    assert len(os.listdir(tmp_path / "gpurl")) == 1


def test_training_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURL_CPU_KERNEL", "0")
    run = small_run(tmp_path / "run", 2)
    assert run.outcome.steps == 2 * ITERATION
    assert cpu_ppo_obstacle(run.policy().algorithm)
    monkeypatch.delenv("GPURL_CPU_KERNEL")
    c_library.load.cache_clear()
    obstacle = cpu_ppo_obstacle(run.policy().algorithm)
    assert bool(obstacle) == (c_library.load().functions is None)


def test_a_wheel_brings_the_sources(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    shutil.copytree(
        ROOT,
        tmp_path / "tree",
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "runs", "build", "tests", "*.egg-info"),
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        ".",
        "./tree",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    kernels = c_library.FOLDER.parent
    expected = {
        str(path.relative_to(kernels))
        for pattern in ("*.py", "cpu/*.c", "cpu/*.h")
        for path in kernels.glob(pattern)
    }
    assert len(expected) > 20
    assert {f"gpurl/kernels/{name}" for name in expected} <= set(zipfile.ZipFile(wheel).namelist())
