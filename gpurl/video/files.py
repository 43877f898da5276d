"""Writes pictures as a video file, by the ffmpeg of imageio-ffmpeg."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gpurl.checkpoints.plain_files import write_regular
from gpurl.errors import GpurlError, UsageError, install_extra

# the encoder's words for each kind of file
ENCODERS = {
    ".mp4": (
        *("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", "-preset", "veryfast"),
        *("-movflags", "+faststart"),
    ),
    # colours chosen for the whole video
    ".gif": ("-filter_complex", "split[a][b];[a]palettegen[p];[b][p]paletteuse"),
}
GIF_FPS = 100 / 3  # pictures of a GIF last whole hundredths of a second; players do not go below 2
MAX_LOG_BYTES = 2000


def max_fps(path: Path) -> float:
    """The most pictures a second that players show of such a file."""
    return GIF_FPS if path.suffix.lower() == ".gif" else 60.0


def check_video_path(path: Path) -> None:
    """UsageError unless `path` names a kind of video, in a folder that exists, and a library that
    writes it is there.
    """
    if path.suffix.lower() not in ENCODERS:
        raise UsageError(f"a video is a file .mp4 or .gif, got {str(path)!r}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    _find_ffmpeg()


def write_video(path: Path, pictures: Iterable[np.ndarray], fps: float) -> Path:
    """Write `path`, .mp4 or .gif, complete or not at all; pictures: [H, W, 3] uint8 of one shape, H
    and W even, `fps` of them a second. GpurlError in one sentence if it cannot be written.
    """
    check_video_path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix.lower()}")
    try:
        write_regular(temporary, b"")
        with tempfile.TemporaryFile() as log:
            try:
                with contextlib.closing(_Encoder(temporary, fps, log.fileno())) as encoder:
                    for picture in pictures:
                        encoder.add(picture)
                    encoder.finish()
            except _EncoderFailed as error:
                log.seek(0)
                lines = log.read(MAX_LOG_BYTES).decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else str(error)
                raise GpurlError(f"cannot write {path}: {reason}") from error
        os.replace(temporary, path)
    except OSError as error:
        raise GpurlError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


class _EncoderFailed(Exception):
    """The encoder ended early, or with an error."""


class _Encoder:
    """ffmpeg in a process of its own, which ends with this one."""

    def __init__(self, path: Path, fps: float, log: int) -> None:
        self.path = path
        self.fps = fps
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, picture: np.ndarray) -> None:
        """The next picture; the first decides the size."""
        if self.process is None:
            self.process = self._start(*picture.shape[:2])
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(np.ascontiguousarray(picture).data)
        except BrokenPipeError as error:
            raise _EncoderFailed(f"ffmpeg ended with {self.process.wait()}") from error

    def finish(self) -> None:
        """Write the end of the file."""
        if self.process is None:
            raise UsageError(f"no pictures for {self.path}")
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if code := self.process.wait():
            raise _EncoderFailed(f"ffmpeg ended with {code}")

    def close(self) -> None:
        """End the process, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def _start(self, height: int, width: int) -> "subprocess.Popen[bytes]":
        words = [_find_ffmpeg(), "-y", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
        words += ["-s", f"{width}x{height}", "-r", f"{self.fps:.6f}", "-i", "-", "-an"]
        words += [*ENCODERS[self.path.suffix], str(self.path.resolve())]
        # a session of its own: Ctrl-C is ours to handle
        return subprocess.Popen(  # noqa: S603 - ffmpeg of imageio-ffmpeg, no shell
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.log,
            start_new_session=True,
        )


def _find_ffmpeg() -> str:
    """The program; UsageError that says how to get it."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"videos need imageio-ffmpeg: {install_extra('video')} ({error})"
        ) from error
