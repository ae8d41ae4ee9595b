"""Slices of tensors in files: what any number of ranks wrote, any other reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import CheckpointError
from asyncflow.training.slice_files import SliceFiles, share_of, within, write_slices
from asyncflow.weights.sender import PublishedSlice
from asyncflow.weights.slices import Box

ranks = st.integers(1, 6)
shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def tensor_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def write(folder: Path, array: np.ndarray, world: int) -> None:
    for rank in range(world if array.shape else 1):
        box = share_of(array.shape, rank=rank, world=world)
        shard = PublishedSlice(array=array[within(box, Box.whole(array.shape))], offset=box.offset, shape=array.shape)
        write_slices(folder / f"{rank}.safetensors", {"w": shard} if box.volume else {})


def files(folder: Path) -> SliceFiles:
    return SliceFiles(sorted(folder.glob("*.safetensors")), framework="numpy")


@settings(max_examples=60, deadline=None)
@given(shape=shapes, wrote=ranks, reads=ranks)
def test_any_number_of_ranks_reads_what_any_other_wrote(shape: tuple[int, ...], wrote: int, reads: int) -> None:
    array = tensor_of(shape)
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), array, wrote)
        stored = files(Path(name))
        assert stored.shapes == {"w": shape}
        for rank in range(reads):
            box = share_of(shape, rank=rank, world=reads)
            np.testing.assert_array_equal(stored.array("w", box), array[within(box, Box.whole(shape))])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), world=ranks)
def test_ranks_share_rows_as_torch_cuts_them(rows: int, world: int) -> None:
    import torch

    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(world)] if rows else []
    boxes = [share_of((rows,), rank=rank, world=world) for rank in range(world)]
    assert [box.extent[0] for box in boxes if box.volume] == chunks
    assert [box.offset[0] for box in boxes if box.volume] == np.cumsum([0, *chunks])[: len(chunks)].tolist()


def test_torch_knows_the_layout(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    write(tmp_path, tensor_of((5, 3)), 2)
    known = HuggingFaceStorageReader(str(tmp_path)).read_metadata().state_dict_metadata["w"]
    assert tuple(known.size) == (5, 3)
    assert sorted((tuple(c.offsets), tuple(c.sizes)) for c in known.chunks) == [((0, 0), (3, 3)), ((3, 0), (2, 3))]


def test_what_no_file_has_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, tensor_of((5, 3)), 2)
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no file contains .* of 'w'"):
        files(tmp_path).array("w", Box.whole((5, 3)))


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    write(tmp_path, tensor_of((5, 3)), 1)
    whole = (tmp_path / "0.safetensors").read_bytes()
    (tmp_path / "0.safetensors").write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"0\.safetensors: the file cannot be read"):
        files(tmp_path)


def test_files_that_differ_have_other_marks(tmp_path: Path) -> None:
    marks = []
    for number, content in enumerate((tensor_of((5, 3)), tensor_of((5, 3)), -tensor_of((5, 3)), tensor_of((5, 4)))):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), content, 1)
        marks.append(files(tmp_path / str(number)).mark())
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3
