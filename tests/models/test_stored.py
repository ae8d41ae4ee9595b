"""Model folders as they are published: read bit for bit, and never before they are whole and settled."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from asyncflow.errors import DiskError, ManifestError
from asyncflow.models.folder import whole_folder
from asyncflow.models.stored import ModelWatch, StoredModel, newest_config
from asyncflow.weights.slices import DTYPES

SETTLE = 3.0
INDEX = "model.safetensors.index.json"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn(3, 5, generator=generator),
        "a": torch.randn(2, 2, generator=generator).bfloat16(),
        "scale": torch.tensor(seed + 1.0),
        "steps": torch.arange(4) + seed,
        "none": torch.zeros(0, 3),
    }


def write(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors(seed), folder / "model.safetensors")
    return folder


def split(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    whole, names = tensors(), {}
    for part, held in (("one.safetensors", ("a", "b")), ("two.safetensors", ("scale", "steps", "none"))):
        save_file({name: whole[name] for name in held}, folder / part)
        names |= dict.fromkeys(held, part)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


def read(model: StoredModel) -> dict[str, np.ndarray]:
    arrays = {name: np.empty(shape, DTYPES[dtype]) for name, (dtype, shape) in model.tensors.items()}
    for name, array in arrays.items():
        model.read(name, array)
    return arrays


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8 if tensor.dim() else tensor.dtype).numpy().tobytes()


@pytest.mark.parametrize("make", [write, split])
def test_tensors_are_read_bit_for_bit(tmp_path: Path, make) -> None:
    model = StoredModel(make(tmp_path / "model"))
    assert model.tensors["a"] == ("bfloat16", (2, 2))
    found = read(model)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: bits(tensor) for name, tensor in tensors().items()
    }
    assert model.unchanged


TIES = st.integers(0, 2**16 - 1).map(lambda high: high << 16 | 0x8000)
"""Bits of float32 numbers that lie in the middle between two of bfloat16."""


@given(st.lists(st.integers(0, 2**32 - 1) | TIES, min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_rounding_is_torch_s(tmp_path_factory, words: list[int]) -> None:
    folder = tmp_path_factory.mktemp("rounded")
    exact = torch.from_numpy(np.array(words, np.uint32).view(np.float32).copy())
    (folder / "config.json").write_text("{}")
    stored = {"a": exact, "h": exact.half(), "b": exact.bfloat16(), "steps": torch.arange(4)}
    save_file(stored, folder / "model.safetensors")
    rounded = {name: torch.from_numpy(array) for name, array in read(StoredModel(folder, dtype="bfloat16")).items()}
    wanted = {"a": exact.bfloat16(), "h": exact.half().float().bfloat16(), "b": exact.bfloat16()}
    for name, tensor in wanted.items():
        found, numbers = rounded[name].view(torch.bfloat16), ~tensor.isnan()
        assert found.isnan().equal(~numbers)
        assert found.view(torch.int16)[numbers].equal(tensor.view(torch.int16)[numbers])
    assert rounded["steps"].equal(torch.arange(4))
    widened = read(StoredModel(folder, dtype="float32"))["b"]
    np.testing.assert_array_equal(widened, exact.bfloat16().float().numpy())


def cut(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:count])


def test_what_is_not_whole_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for count, why in (
        (0, "cut off"),
        (7, "cut off"),
        (100, "cut off"),
        (len(whole) - 1, "bytes, and its header says"),
    ):
        file.write_bytes(whole[:count])
        with pytest.raises(ManifestError, match=why):
            StoredModel(folder)
    file.write_bytes(whole + b"0")
    with pytest.raises(ManifestError, match="its header says"):
        StoredModel(folder)
    file.unlink()
    with pytest.raises(ManifestError, match=r"model\.safetensors\.index\.json is missing"):
        StoredModel(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ManifestError, match=r"config\.json is missing"):
        StoredModel(folder)


def test_an_index_is_complete_or_refused(tmp_path: Path) -> None:
    folder = split(tmp_path / "model")
    (folder / "two.safetensors").rename(folder / "two.part")
    with pytest.raises(ManifestError, match=r"two\.safetensors is missing"):
        StoredModel(folder)
    (folder / "two.part").rename(folder / "two.safetensors")
    index = json.loads((folder / INDEX).read_text())
    for wrong, why in (({"c": "two.safetensors"}, "lists c in"), ({"c": "../x"}, "not in the folder")):
        (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | wrong}))
        with pytest.raises(ManifestError, match=why):
            StoredModel(folder)


def test_dtypes_that_weights_cannot_have_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    save_file({"q": torch.zeros(2).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ManifestError, match=r"q in model\.safetensors is F8_E4M3, and weights may be BF16"):
        StoredModel(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ManifestError, match="there are no tensors"):
        StoredModel(folder)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_noticed(tmp_path: Path) -> None:
    model = StoredModel(write(tmp_path / "model"))
    cut(model.folder / "model.safetensors", 400)
    with pytest.raises(DiskError, match="ends before it"):
        read(model)
    assert not model.unchanged


def seen(watch: ModelWatch, now: float) -> tuple[int, str] | None:
    found = watch.look(now)
    return None if found is None else (found[0], found[1].folder.name)


def take(watch: ModelWatch, now: float) -> int:
    found = watch.look(now)
    assert found is not None
    watch.take(*found)
    return found[0]


def test_a_model_is_next_once_it_has_settled_and_again_when_it_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    watch = ModelWatch(folder=folder, settle_s=SETTLE)
    assert watch.look(0.0) is None
    assert "No such file" in watch.waits
    write(folder)
    assert (seen(watch, 1.0), watch.waits) == (None, f"{folder} to stay unchanged for 3 s")
    assert seen(watch, 3.9) is None
    assert seen(watch, 4.0) == (0, "export")
    assert take(watch, 4.0) == 0
    assert (seen(watch, 9.0), watch.waits) == (None, "")
    with whole_folder(folder, replace=True) as made:
        write(made, seed=1)
    assert seen(watch, 10.0) is None
    assert take(watch, 13.0) == 1


def test_a_model_that_stays_is_read_once_and_another_that_comes_in_its_place_is_seen(tmp_path: Path) -> None:
    folder = split(tmp_path / "model")
    watch = ModelWatch(folder=folder, settle_s=SETTLE)
    watch.look(0.0)
    found, again = watch.look(SETTLE), watch.look(SETTLE + 1)
    assert found is not None
    assert again is not None
    assert found[1] is again[1]
    assert found[1].unchanged
    (write(tmp_path / "other", seed=1) / "model.safetensors").rename(folder / "model.safetensors")
    assert not found[1].unchanged
    assert watch.look(SETTLE + 2) is None
    assert take(watch, 2 * SETTLE + 2) == 0


def test_what_is_still_written_is_never_next(tmp_path: Path) -> None:
    """File by file and byte by byte, with pauses that are longer than the time to settle."""
    whole = {file.name: file.read_bytes() for file in split(tmp_path / "whole").iterdir()}
    folder, now = tmp_path / "copied", 0.0
    folder.mkdir()
    watch = ModelWatch(folder=folder, settle_s=SETTLE)
    for count, (name, content) in enumerate(whole.items(), start=1):
        for end in (1, len(content) // 2, len(content)):
            (folder / name).write_bytes(content[:end])
            for _ in range(3):
                now += SETTLE
                is_whole = count == len(whole) and end == len(content)
                assert is_whole or watch.look(now) is None, (name, end)
    assert watch.look(now + SETTLE) is None
    assert take(watch, now + 2 * SETTLE) == 0


def test_files_that_have_their_length_from_the_beginning_have_to_stay_as_they_are(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    watch = ModelWatch(folder=folder, settle_s=SETTLE)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    for now in (0.0, 2.0, 4.0, 6.0):
        content[-1] ^= 1
        with file.open("r+b") as opened:
            opened.write(content)
        changed = int(1e9 * (now + 1))
        os.utime(file, ns=(changed, changed))
        assert watch.look(now) is None
    assert take(watch, 9.0) == 0


def test_of_numbered_folders_the_newest_whole_one_is_next_and_never_an_older_one(tmp_path: Path) -> None:
    runs = tmp_path / "checkpoints"
    for name in ("step-000010", "step-000020"):
        write(runs / name, seed=1)
    write(runs / ".step-000090.draft")
    write(runs / "best")
    half = write(runs / "step-000030")
    (half / "config.json").unlink()
    assert newest_config(runs).name == "step-000020"
    watch = ModelWatch(folder=runs, settle_s=SETTLE)
    watch.look(0.0)
    assert take(watch, SETTLE) == 20
    assert watch.look(5.0) is None
    assert watch.waits.startswith(f"{half}: no whole model")
    write(runs / "step-000015")
    (half / "config.json").write_text("{}")
    assert [seen(watch, now) for now in (10.0, 13.0)] == [None, (30, "step-000030")]
    found = watch.look(14.0)
    assert found is not None
    watch.skip(found[1], "another model")
    assert (seen(watch, 20.0), watch.waits) == (None, "another model")
    write(runs / "checkpoint-40")
    watch.look(21.0)
    assert take(watch, 24.0) == 40


def test_a_folder_without_any_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="neither it nor a numbered subfolder"):
        newest_config(tmp_path)
    with pytest.raises(ManifestError, match="No such file"):
        newest_config(tmp_path / "absent")
