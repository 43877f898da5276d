"""`gpurl convert` with its worker as a fork of this process, which has imported torch already."""

import io
import os
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from gpurl.cli.convert import worker as convert_worker
from tests.small_runs import exit_code


def forked(path: Path, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    """In place of `gpurl.cli.convert.tensors.run_worker`."""
    answer = folder / "answer"
    if (child := os.fork()) == 0:
        code = 1
        try:
            with redirect_stdout(io.StringIO()) as message:
                code = convert_worker.main(
                    str(path.absolute()), str(folder / "tensors.safetensors")
                )
            answer.write_text(message.getvalue())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed = answer.read_bytes() if answer.exists() else b""
    return subprocess.CompletedProcess([], code, printed, b"")


def convert(file: Path, *words: str) -> int | str | None:
    """The exit code of `gpurl convert FILE words`."""
    with patch("gpurl.cli.convert.tensors.run_worker", forked):
        return exit_code(["convert", str(file), *words])
