"""Columns packed into rows come back as they were, of every dtype and width."""

import torch

from gpurl.buffers.packed import PackedRows


def test_what_is_packed_comes_back() -> None:
    columns = {
        "obs": torch.randn(3, 4, 5),
        "action": torch.randint(0, 2**24, (3, 4, 2)),
        "choice": torch.tensor([[0, 1, 2**24, 3]] * 3),
        "advantage": torch.randn(3, 4),
        "valid": torch.rand(3, 4) < 0.5,
    }
    packing = PackedRows(columns)
    rows = packing.pack(columns)
    assert rows.shape == (12, 12)  # 5 + 2 + 1 + 1 + 1 floats, to a multiple of 4
    assert rows.dtype == torch.float32
    for name, column in packing.unpack(rows).items():
        wanted = columns[name].flatten(0, 1)
        assert column.dtype == (torch.float32 if wanted.dtype == torch.bool else wanted.dtype)
        assert torch.equal(column, wanted.to(column.dtype)), name
    assert torch.equal(
        packing.unpack(rows[4:8])["obs"], columns["obs"][1]
    )  # row t N + n is step t of environment n
    arrays = packing.unpack(rows.numpy())
    assert arrays["action"].dtype == "int64"
    assert (arrays["choice"] == columns["choice"].flatten().numpy()).all()
    assert all(
        view.data_ptr() >= rows.data_ptr() for view in packing.views(rows).values()
    )  # nothing is copied


def test_rows_are_as_wide_as_the_next_sixteen_bytes() -> None:
    for width, wanted in ((1, 4), (4, 4), (5, 8), (7, 8), (9, 12)):
        column = torch.randn(2, 3, width)
        packing = PackedRows({"reward": column})
        rows = packing.pack({"reward": column})
        assert rows.shape == (6, wanted)
        assert torch.equal(rows[:, :width], column.flatten(0, 1))  # the first column stands first
        assert not rows[:, width:].any()
