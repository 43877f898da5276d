"""Files that do something when they are trusted: each makes the folder `canary` if what reads it
executes or unpacks it.
"""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch


class Bomb:
    """Unpickling this makes the folder `canary`."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return (os.makedirs, (str(self.canary),))


def _torch(canary: Path) -> bytes:
    stream = io.BytesIO()
    torch.save({"model": {"weight": Bomb(canary)}}, stream)
    return stream.getvalue()


def _array(canary: Path) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb(canary)], dtype=object), allow_pickle=True)
    return stream.getvalue()


def _arrays(canary: Path) -> bytes:
    stream, bomb = io.BytesIO(), np.array([Bomb(canary)], dtype=object)
    np.savez(stream, obs=bomb, action=bomb)
    return stream.getvalue()


def _zip(canary: Path) -> bytes:
    """Members that leave the folder: upwards, from the root, and through a link."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        link = zipfile.ZipInfo("away")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, str(canary.parent))
        for name in (
            f"../{canary.name}/x",
            f"../../{canary.name}/x",
            f"{canary}/x",
            f"away/{canary.name}/x",
        ):
            archive.writestr(name, "x")
        archive.writestr("policy.pth", _torch(canary))
    return stream.getvalue()


def _tar(canary: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        link = tarfile.TarInfo("away")
        link.type, link.linkname = tarfile.SYMTYPE, str(canary.parent)
        archive.addfile(link)
        for name in (f"../{canary.name}", str(canary), f"away/{canary.name}"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
    return stream.getvalue()


def _safetensors(header: dict | bytes, size: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + b"\0" * 8


def _xml(canary: Path) -> bytes:
    entity = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{canary}">]>'
    return f'{entity}<mujoco><include file="../../{canary}"/>&e;</mujoco>'.encode()


HOSTILE = {
    "pickle": lambda canary: pickle.dumps({"obs": Bomb(canary)}),
    "old pickle": lambda canary: pickle.dumps(Bomb(canary), protocol=0),
    "torch": _torch,
    "npy": _array,
    "npz": _arrays,
    "joblib": lambda canary: zlib.compress(pickle.dumps(Bomb(canary))),
    "zip": _zip,
    "tar": _tar,
    "yaml": lambda canary: f"!!python/object/apply:os.makedirs ['{canary}']\n".encode(),
    "yaml value": lambda canary: f"seed: !!python/object/new:os.makedirs ['{canary}']\n".encode(),
    "safetensors length": lambda canary: _safetensors(b"{}", 1 << 62),
    "safetensors overlap": lambda canary: _safetensors(
        {
            name: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}
            for name in ("obs", "action", "weight")
        }
    ),
    "deep json": lambda canary: b"[" * 200_000,
    "xml": _xml,
}
LIVE = ("pickle", "old pickle", "torch", "npy", "npz", "joblib", "zip", "tar", "yaml", "yaml value")


def trust(kind: str, content: bytes, folder: Path) -> None:
    """Read `content` as who believes in it would, in `folder`."""
    import yaml

    stream = io.BytesIO(content)
    if kind in ("pickle", "old pickle"):
        pickle.loads(content)
    elif kind == "joblib":
        pickle.loads(zlib.decompress(content))
    elif kind == "torch":
        torch.load(stream, weights_only=False)
    elif kind == "npy":
        np.load(stream, allow_pickle=True)
    elif kind == "npz":
        np.load(stream, allow_pickle=True)["obs"]
    elif kind == "zip":
        torch.load(io.BytesIO(zipfile.ZipFile(stream).read("policy.pth")), weights_only=False)
    elif kind == "tar":
        with tarfile.open(fileobj=stream) as archive:
            archive.extractall(folder, filter="fully_trusted")
    else:
        yaml.unsafe_load(content)
