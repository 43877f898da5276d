"""Video files: the number of pictures, their size and speed, and what prevents a file."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpurl.errors import GpurlError, UsageError
from gpurl.video import files
from gpurl.video.files import write_video
from gpurl.video.pictures import GAP, arrange, num_columns

ffmpeg = pytest.importorskip("imageio_ffmpeg")


def pictures(count: int) -> Iterator[np.ndarray]:
    """Each brighter than the one before."""
    for number in range(count):
        yield np.full((48, 64, 3), 40 + 4 * number, np.uint8)


@pytest.mark.parametrize(("name", "fps"), [("a.mp4", 20.0), ("a.mp4", 125 / 3), ("a.gif", 25.0)])
def test_a_file_has_all_pictures_in_their_order(tmp_path: Path, name: str, fps: float) -> None:
    path = write_video(tmp_path / name, pictures(37), fps)
    reader = ffmpeg.read_frames(str(path))
    meta = next(reader)
    brightness = [np.frombuffer(frame, np.uint8).mean() for frame in reader]
    assert len(brightness) == 37
    assert brightness == pytest.approx([40 + 4 * number for number in range(37)], abs=3)
    assert meta["size"] == (64, 48)
    assert meta["fps"] == pytest.approx(fps, rel=0.01)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a video is a file .mp4 or .gif, got 'a.avi'"):
        write_video(Path("a.avi"), pictures(1), 20.0)
    with pytest.raises(UsageError, match=r"cannot write .*a.mp4: there is no folder .*nowhere"):
        write_video(tmp_path / "nowhere" / "a.mp4", pictures(1), 20.0)
    (tmp_path / "b.mp4").mkdir()
    with pytest.raises(GpurlError, match=r"cannot write .*b.mp4: Is a directory"):
        write_video(tmp_path / "b.mp4", pictures(1), 20.0)
    assert [each.name for each in tmp_path.iterdir()] == ["b.mp4"]


def test_a_disk_that_gets_full_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from gpurl.errors import GpurlError\n"
        "from gpurl.video.files import write_video\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "noise = np.random.default_rng(0)\n"
        "shots = (noise.integers(0, 255, (96, 128, 3), dtype=np.uint8) for _ in range(200))\n"
        "try: write_video(Path(sys.argv[1]), shots, 20.0)\n"
        "except GpurlError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.mp4")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"cannot write {tmp_path}/a.mp4: ")
    assert len(done.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_pictures_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield from pictures(3)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_video(tmp_path / "a.mp4", broken(), 20.0)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError, match=r"imageio-ffmpeg: pip install -e '.\[video\]'"):
        write_video(tmp_path / "a.mp4", pictures(1), 20.0)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_pillow_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpurl.envs.canvas import Canvas

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"Pillow, .* is missing: pip install -e '.\[video\]'"):
        Canvas(64).view(0.0, 0.0, 1.0, 1.0)


def test_gif_players_have_a_limit() -> None:
    assert files.max_fps(Path("a.GIF")) == pytest.approx(33.3, abs=0.1)
    assert files.max_fps(Path("a.mp4")) == 60.0


# ---- grids ----


@pytest.mark.parametrize(
    ("count", "aspect", "columns"),
    [(1, 1.0, 1), (2, 1.0, 2), (4, 1.0, 2), (9, 1.0, 3), (16, 1.0, 4), (4, 2.5, 2), (6, 4 / 3, 3)],
)
def test_a_grid_is_about_as_wide_as_a_screen(count: int, aspect: float, columns: int) -> None:
    assert num_columns(count, aspect) == columns


def test_a_grid_holds_every_picture_at_its_place() -> None:
    shots = [np.full((21, 31, 3), 10 * number, np.uint8) for number in range(4)]
    whole = arrange(shots)
    assert whole.shape == (2 * 21 + GAP, 2 * 31 + GAP, 3)
    for number in range(4):
        top, left = number // 2 * (21 + GAP), number % 2 * (31 + GAP)
        assert (whole[top : top + 21, left : left + 31] == 10 * number).all()
    # encoders want even numbers
    assert arrange(shots[:1]).shape == (22, 32, 3)
