"""A network of one's own that a format cannot hold: one sentence, with its line and what to do."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurl.api import train
from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.export.run import export_run
from tests.export import own
from tests.export.runs import OWN
from tests.small_runs import SMALL

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
FORMATS = ("onnx", "pt2", "torchscript")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type], Path]:
    """The run of a trunk, made once."""
    runs = dict[type, Path]()

    def run_of(trunk: type) -> Path:
        if trunk not in runs:
            folder = tmp_path_factory.mktemp(trunk.__name__) / "run"
            network = {"trunk": f"{OWN}:{trunk.__name__}"}
            settings = {**SMALL, "total_steps": 1, "run_dir": str(folder), "network": network}
            train("ppo", "pendulum", **settings)
            runs[trunk] = folder
        return runs[trunk]

    return run_of


def line_of(trunk: type, code: str) -> str:
    """FILE:LINE `code` of a line in the class."""
    lines, first = inspect.getsourcelines(trunk)
    (offset,) = (offset for offset, line in enumerate(lines) if line.strip() == code)
    return f"{trunk.__name__}, {own.__file__}:{first + offset} `{code}`"


@pytest.mark.parametrize("export_format", FORMATS)
@pytest.mark.parametrize("trunk", [own.Branches, own.Outer])
def test_an_if_on_data_is_named_with_its_line(
    trunk: type,
    export_format: str,
    make: Callable[[type], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "a"
    folder = make(trunk)
    capfd.readouterr()
    assert main(["export", str(folder), "--format", export_format, "--out", str(out)]) == 2
    printed, errors = capfd.readouterr()
    assert not printed
    assert len(errors.splitlines()) == 1, errors
    assert line_of(own.Branches, "if y.sum() > 0:") in errors
    assert "torch.where(condition, a, b) in place of an if" in errors
    assert "--format" not in errors  # no other one can hold it either
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export_format", FORMATS)
@pytest.mark.parametrize("trunk", [own.Chooses, own.ReadsItself])
def test_what_does_not_depend_on_observations_is_no_obstacle(
    trunk: type,
    export_format: str,
    make: Callable[[type], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = make(trunk)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert export_run(folder, export_format, tmp_path / "a").difference is not None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("trunk", "code"),
    [
        (own.Item, "return y * y.abs().max().item()"),
        (own.Numpy, "return torch.from_numpy(np.tanh(y.detach().numpy())) + y"),
    ],
)
def test_a_trace_does_not_hold_a_number_as_a_constant(
    trunk: type, code: str, make: Callable[[type], Path], tmp_path: Path
) -> None:
    folder = make(trunk)
    with pytest.raises(UsageError) as raised:
        export_run(folder, "torchscript", tmp_path / "a.pt")
    assert "has no form in torchscript" in str(raised.value)
    assert line_of(trunk, code) in str(raised.value)
    # torch.export knows both
    assert export_run(folder, "onnx", tmp_path / "a.onnx").difference is not None


def test_an_operation_that_onnx_lacks(make: Callable[[type], Path], tmp_path: Path) -> None:
    folder = make(own.Fourier)
    with pytest.raises(UsageError) as raised:
        export_run(folder, "onnx", tmp_path / "a.onnx")
    place = line_of(own.Fourier, "return torch.special.i0(self.linear(x))")
    assert str(raised.value) == (
        f"ONNX has no operator for prims.bessel_i0 (in {place}); compute it in another way, or "
        f"take --format pt2"
    )
    assert not list(tmp_path.iterdir())
    assert export_run(folder, "pt2", tmp_path / "a.pt2").difference is not None
