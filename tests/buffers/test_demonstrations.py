"""Datasets of what others did: what is read is what was written, and all that is damaged or of
other spaces is told by name.
"""

import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from safetensors.numpy import save_file

from gpurl.buffers.demonstrations import read_demonstrations
from gpurl.errors import UsageError

OBS = Box(-np.inf, np.inf, (3,), np.float32)
ACTION = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
RANDOM = np.random.default_rng(0)
GOOD = {
    "obs": RANDOM.normal(size=(5, 3)),
    "action": RANDOM.uniform((-2.0, 0.0), (2.0, 1.0), (5, 2)),
}


def written(path: Path, arrays: dict[str, Any]) -> str:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_what_is_written_is_read(tmp_path: Path, suffix: str, kind: type) -> None:
    arrays = {name: array.astype(kind) for name, array in GOOD.items()} | {"reward": np.zeros(5)}
    obs, action = read_demonstrations(written(tmp_path / f"some{suffix}", arrays), OBS, ACTION)
    assert obs.dtype == action.dtype == np.float32
    np.testing.assert_array_equal(obs, arrays["obs"].astype(np.float32))
    np.testing.assert_array_equal(action, arrays["action"].astype(np.float32))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize(
    ("space", "action"),
    [(Discrete(3), [0, 2, 1]), (MultiDiscrete([2, 3]), [[1, 2], [0, 0], [1, 1]])],
    ids=str,
)
def test_images_and_choices(tmp_path: Path, suffix: str, space: Any, action: list[Any]) -> None:
    images = RANDOM.integers(0, 256, (3, 4, 4, 1), np.uint8)
    path = written(
        tmp_path / f"some{suffix}", {"obs": images, "action": np.array(action, np.int32)}
    )
    obs, read = read_demonstrations(path, Box(0, 255, (4, 4, 1), np.uint8), space)
    assert (obs.dtype, read.dtype) == (np.uint8, np.int64)
    np.testing.assert_array_equal(obs, images)
    np.testing.assert_array_equal(read, action)


def test_rounding_is_no_other_environment(tmp_path: Path) -> None:
    action = np.array([[2.0 + 1e-6, 0.0 - 1e-6]])
    read_demonstrations(
        written(tmp_path / "some.npz", {"obs": np.zeros((1, 3)), "action": action}), OBS, ACTION
    )
    wide = Box(np.array([0.0], np.float32), np.array([1000.0], np.float32))
    for beyond, is_rounding in ((0.005, True), (0.02, False)):
        path = written(
            tmp_path / "wide.npz",
            {"obs": np.zeros((1, 3)), "action": np.array([[1000.0 + beyond]])},
        )
        with nullcontext() if is_rounding else pytest.raises(UsageError, match="its action 0 is"):
            read_demonstrations(path, OBS, wide)


def with_value(name: str, row: int, value: float) -> dict[str, Any]:
    changed = GOOD[name].copy()
    changed[row, 0] = value
    return GOOD | {name: changed}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"obs": GOOD["obs"]}, "must hold obs and action, it lacks action; there is obs"),
    ({"reward": np.zeros(3)}, "it lacks obs and action; there is reward"),
    (
        GOOD | {"obs": GOOD["obs"][:4]},
        "as many obs as action, at least one; it has 4 of obs and 5 of action",
    ),
    ({name: array[:0] for name, array in GOOD.items()}, "it has 0 of obs and 0 of action"),
    (GOOD | {"action": np.array(1.0)}, "it has 5 of obs and 0 of action"),
    (
        GOOD | {"obs": np.zeros((5, 4))},
        r"its obs is float64 \[M, 4\], wanted float32 \[M, 3\] of Box\(-inf, inf, \(3,\), "
        r"float32\)",
    ),
    (GOOD | {"action": np.zeros(5)}, r"its action is float64 \[M\], wanted float32 \[M, 2\]"),
    (GOOD | {"action": np.zeros((5, 2), np.complex64)}, r"its action is complex64 \[M, 2\]"),
    (GOOD | {"obs": np.full((5, 3), "x")}, r"its obs is <U1 \[M, 3\]"),
    (with_value("obs", 2, np.nan), "obs must be finite, row 2 holds nan"),
    (with_value("obs", 3, 1e300), "obs must be finite, row 3 holds inf"),
    (with_value("action", 1, -np.inf), "action must be finite, row 1 holds -inf"),
    (with_value("action", 4, 2.1), r"its action 4 is \[2\.\d+, .*wanted one of Box"),
    (with_value("action", 4, -2.001), r"its action 4 is \[-2\.\d+, .*wanted one of Box"),
]


@pytest.mark.parametrize(("arrays", "message"), REFUSED, ids=[message for _, message in REFUSED])
@pytest.mark.filterwarnings("error")
def test_what_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_demonstrations(written(tmp_path / "some.npz", arrays), OBS, ACTION)


@pytest.mark.parametrize(
    ("action", "space", "message"),
    [
        (
            [0.0, 1.0],
            Discrete(3),
            r"its action is float64 \[M\], wanted int64 \[M\] of Discrete\(3\)",
        ),
        ([0, 3], Discrete(3), r"its action 1 is 3, wanted one of Discrete\(3\)"),
        ([-1, 1], Discrete(3), r"its action 0 is -1"),
        (
            [[0, 1], [0, 2]],
            MultiDiscrete([3, 2]),
            r"its action 1 is \[0, 2\], wanted one of MultiDiscrete",
        ),
        ([0, 1], MultiDiscrete([3, 2]), r"its action is int64 \[M\], wanted int64 \[M, 2\]"),
    ],
    ids=str,
)
def test_choices_that_do_not_fit_are_refused(
    tmp_path: Path, action: list[Any], space: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_demonstrations(
            written(tmp_path / "some.npz", {"obs": GOOD["obs"][:2], "action": np.array(action)}),
            OBS,
            space,
        )


@pytest.mark.parametrize("kind", ["float64", "uint16", "int8"])
def test_images_are_not_made_of_other_numbers(tmp_path: Path, kind: str) -> None:
    path = written(
        tmp_path / "some.npz", {"obs": np.zeros((2, 4), kind), "action": np.zeros((2, 2))}
    )
    with pytest.raises(UsageError, match=rf"its obs is {kind} \[M, 4\], wanted uint8 \[M, 4\]"):
        read_demonstrations(path, Box(0, 255, (4,), np.uint8), ACTION)


def test_a_limit_on_one_side_is_one(tmp_path: Path) -> None:
    space = Box(np.array([0.0], np.float32), np.array([np.inf], np.float32))
    path = written(
        tmp_path / "some.npz", {"obs": np.zeros((3, 3)), "action": np.array([[1e9], [0.0], [-0.1]])}
    )
    with pytest.raises(UsageError, match=r"its action 2 is \[-0\.1"):
        read_demonstrations(path, OBS, space)


def test_files_that_are_none(tmp_path: Path) -> None:
    npz = Path(written(tmp_path / "whole.npz", GOOD)).read_bytes()
    tensors = Path(written(tmp_path / "whole.safetensors", GOOD)).read_bytes()
    np.save(tmp_path / "one.npy", GOOD["obs"])
    damaged = {
        "empty.npz": b"",
        "half.npz": npz[: len(npz) // 2],
        "turned.npz": npz.replace(npz[100:160], npz[100:160][::-1]),
    }
    damaged |= {
        "array.npz": (tmp_path / "one.npy").read_bytes(),
        "empty.safetensors": b"",
        "half.safetensors": tensors[:-8],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"cannot read the dataset .*{name}"):
            read_demonstrations(str(tmp_path / name), OBS, ACTION)
    for name in ("nowhere.npz", "nowhere.safetensors"):
        with pytest.raises(UsageError, match=r"cannot read the dataset .*No such file"):
            read_demonstrations(str(tmp_path / name), OBS, ACTION)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(
        UsageError, match=r"cannot read the dataset .*folder\.npz: it is no regular file"
    ):
        read_demonstrations(str(tmp_path / "folder.npz"), OBS, ACTION)
    with pytest.raises(
        UsageError, match=r"FILE\.npz, FILE\.safetensors or minari:DATASET_ID, got .*one\.npy"
    ):
        read_demonstrations(str(tmp_path / "one.npy"), OBS, ACTION)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """An array of objects is a pickle, which may run anything."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "ran").touch, ()

    np.savez(
        tmp_path / "bomb.npz",
        allow_pickle=True,
        obs=np.array([Bomb()], object),
        action=GOOD["action"],
    )
    with pytest.raises(
        UsageError, match=r"cannot read the dataset .*Python objects, which are never unpickled"
    ):
        read_demonstrations(str(tmp_path / "bomb.npz"), OBS, ACTION)
    assert not (tmp_path / "ran").exists()


def test_an_archive_is_unpacked_where_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "some.npz", GOOD)
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    for free in (size, None):
        monkeypatch.setattr(
            "gpurl.buffers.demonstrations.available_bytes", lambda device, free=free: free
        )
        read_demonstrations(path, OBS, ACTION)
    monkeypatch.setattr("gpurl.buffers.demonstrations.available_bytes", lambda device: size - 1)
    with pytest.raises(UsageError, match=r"some\.npz unpacks to 0\.0 GiB, where 0\.0 GiB are free"):
        read_demonstrations(path, OBS, ACTION)


# ---- Minari ----


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari")


def episodes(minari: Any, observations: list[Any], actions: list[Any]) -> list[Any]:
    """As Minari holds them: one observation more than actions."""
    result = []
    for number, (obs, action) in enumerate(zip(observations, actions)):
        ends = np.arange(len(action)) == len(action) - 1
        columns = {
            "rewards": np.zeros(len(action)),
            "terminations": ends,
            "truncations": np.zeros_like(ends),
            "infos": {},
        }
        result.append(
            minari.data_collector.EpisodeBuffer(
                id=number, observations=obs, actions=action, **columns
            )
        )
    return result


@pytest.mark.parametrize("discrete", [False, True])
def test_a_minari_dataset(minari: Any, discrete: bool) -> None:
    lengths = (4, 1, 7)
    observations = [RANDOM.normal(size=(length + 1, 3)).astype(np.float32) for length in lengths]
    space = Discrete(4) if discrete else ACTION
    draw = (
        (lambda n: RANDOM.integers(0, 4, n))
        if discrete
        else (lambda n: RANDOM.uniform((-2, 0), (2, 1), (n, 2)).astype(np.float32))
    )
    actions = [draw(length) for length in lengths]
    spaces = {"observation_space": OBS, "action_space": space}
    minari.create_dataset_from_buffers(
        "ours/some-v0", episodes(minari, observations, actions), **spaces
    )
    obs, action = read_demonstrations("minari:ours/some-v0", OBS, space)
    np.testing.assert_array_equal(obs, np.concatenate([each[:-1] for each in observations]))
    np.testing.assert_array_equal(action, np.concatenate(actions))
    with pytest.raises(
        UsageError,
        match=r"minari:ours/some-v0 is of another environment: its obs is float32 \[M, 3\]",
    ):
        read_demonstrations("minari:ours/some-v0", Box(-1.0, 1.0, (9,)), space)


def test_minari_datasets_that_are_none(minari: Any) -> None:
    space = Dict({"place": OBS})
    observations = [{"place": np.zeros((3, 3), np.float32)}]
    spaces = {"observation_space": space, "action_space": ACTION}
    minari.create_dataset_from_buffers(
        "ours/dict-v0", episodes(minari, observations, [np.zeros((2, 2), np.float32)]), **spaces
    )
    with pytest.raises(
        UsageError,
        match=r"minari:ours/dict-v0 must have observations of a Box, it has Dict\('place'",
    ):
        read_demonstrations("minari:ours/dict-v0", OBS, ACTION)
    for name in ("ours/nowhere-v0", "", "no good name"):
        with pytest.raises(UsageError, match=rf"cannot read minari:{name}.*minari download"):
            read_demonstrations(f"minari:{name}", OBS, ACTION)


def test_actions_of_several_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = SimpleNamespace(observation_space=OBS, action_space=Dict({"move": ACTION}))
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(load_dataset=lambda name: dataset))
    with pytest.raises(
        UsageError,
        match=r"minari:some-v0 must have actions of a Box or a Discrete or .*, it has Dict\('move'",
    ):
        read_demonstrations("minari:some-v0", OBS, ACTION)


def test_a_dataset_of_nothing_and_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if name == "nowhere-v0":
            raise FileNotFoundError(name)
        return SimpleNamespace(
            observation_space=OBS, action_space=ACTION, iterate_episodes=lambda: iter(())
        )

    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(load_dataset=load))
    with pytest.raises(
        UsageError, match=r"minari:none-v0 must hold as many obs .* it has 0 of obs and 0 of action"
    ):
        read_demonstrations("minari:none-v0", OBS, ACTION)
    with pytest.raises(
        UsageError, match=r"cannot read minari:nowhere-v0: nowhere-v0; `minari download nowhere-v0`"
    ):
        read_demonstrations("minari:nowhere-v0", OBS, ACTION)


def test_without_the_package_the_error_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(
        UsageError,
        match=r"minari:some-v0 needs Minari: pip install -e '.*\[minari\]' \(import of minari",
    ):
        read_demonstrations("minari:some-v0", OBS, ACTION)
