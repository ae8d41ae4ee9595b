"""Manifests: merging the ranks' parts, and refusing what is not consistent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_128

from asyncflow.errors import ProtocolError, Refused
from asyncflow.identity import Version
from asyncflow.weights.manifest import HASH, Manifest, ManifestPart, Slice, TensorEntry, digest_of, dtype_name, merge
from asyncflow.weights.slices import Box


def part(rank: int, parts: int, boxes: dict[str, Box], *, shape=(4, 6), dtype="float32", digest="d") -> ManifestPart:
    itemsize = 2 if dtype == "bfloat16" else 4
    tensors = tuple(
        TensorEntry(
            name=name,
            dtype=dtype,
            shape=shape,
            slices=(Slice(box=box, holder=f"r{rank}", nbytes=box.volume * itemsize, digest=f"{HASH}:{digest}"),),
        )
        for name, box in boxes.items()
    )
    return ManifestPart(
        version=Version(1, 2).packed,
        part=rank,
        parts=parts,
        worker=f"r{rank}",
        address=f"tcp://r{rank}",
        tensors=tensors,
    )


TOP, BOTTOM, WHOLE = Box((0, 0), (2, 6)), Box((2, 0), (2, 6)), Box.whole((4, 6))


def test_parts_merge_to_a_manifest_that_passes_its_check_and_survives_the_wire():
    manifest = merge([part(0, 2, {"b": TOP, "a": WHOLE}), part(1, 2, {"b": BOTTOM, "a": WHOLE})])
    manifest.check()
    assert [(entry.name, len(entry.slices)) for entry in manifest.tensors] == [("a", 1), ("b", 2)]
    assert manifest.nbytes == 2 * 24 * 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


def test_the_digest_depends_on_content_and_not_on_who_holds_it():
    one, two = part(0, 1, {"a": WHOLE}), part(0, 1, {"a": WHOLE}, digest="e")
    other = msgspec.structs.replace(
        one,
        tensors=tuple(
            msgspec.structs.replace(entry, slices=(msgspec.structs.replace(entry.slices[0], holder="x"),))
            for entry in one.tensors
        ),
    )
    assert merge([one]).digest == merge([other]).digest != merge([two]).digest


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([part(0, 2, {"a": TOP}), part(1, 2, {"a": TOP})], "nobody publishes"),
        ([part(0, 2, {"a": WHOLE}), part(1, 2, {"a": TOP})], "overlaps"),
        ([part(0, 2, {"a": WHOLE}), part(1, 2, {"a": WHOLE}, digest="e")], "different bytes"),
        ([part(0, 2, {"a": TOP}), part(1, 2, {"a": BOTTOM}, dtype="bfloat16")], "float32.*bfloat16"),
        ([part(0, 2, {"a": TOP}), part(1, 2, {"a": Box((2, 0), (3, 6))}, shape=(5, 6))], "at another"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts, match):
    with pytest.raises(Refused, match=match):
        merge(parts)


def test_malformed_parts_are_refused():
    good = part(0, 1, {"a": WHOLE})
    entry = good.tensors[0]
    bad = [
        msgspec.structs.replace(good, part=1),
        msgspec.structs.replace(good, tensors=(entry, entry)),
        msgspec.structs.replace(good, worker="other"),
        *(
            msgspec.structs.replace(good, tensors=(msgspec.structs.replace(entry, **change),))
            for change in (
                {"dtype": "object"},
                {"shape": (-4, -6)},
                {"shape": (2,) * 9},
                {"shape": (3, 6)},
                {"slices": ()},
                {"slices": (msgspec.structs.replace(entry.slices[0], nbytes=1 << 40),)},
            )
        ),
    ]
    good.check()
    for wrong in bad:
        with pytest.raises(ProtocolError):
            wrong.check()


def test_a_manifest_whose_figures_do_not_follow_is_refused():
    manifest = merge([part(0, 1, {"a": WHOLE})])
    for change in ({"nbytes": 7}, {"digest": "0" * 32}, {"tensors": ()}):
        with pytest.raises(ProtocolError):
            msgspec.structs.replace(manifest, **change).check()


def test_a_digest_of_another_hash_is_refused_and_not_compared():
    other = part(0, 1, {"a": WHOLE})
    (entry,) = other.tensors
    piece = msgspec.structs.replace(entry.slices[0], digest="00112233445566778899aabbccddeeff")
    wrong = msgspec.structs.replace(other, tensors=(msgspec.structs.replace(entry, slices=(piece,)),))
    with pytest.raises(ProtocolError, match="is not of xxh3-128"):
        wrong.check()
    with pytest.raises(ProtocolError, match="is not of xxh3-128"):
        merge([wrong]).check()


def test_the_digest_of_a_strided_array_is_that_of_its_bytes_in_c_order():
    array = np.random.default_rng(0).standard_normal((700, 600))[:, ::2]
    assert digest_of(array) == f"xxh3-128:{xxh3_128(array.tobytes()).hexdigest()}"
    for small in (np.zeros((0, 3)), np.array(1.5, np.float32)):
        assert digest_of(small) == f"xxh3-128:{xxh3_128(small.tobytes()).hexdigest()}"


def test_uint16_is_bfloat16_and_other_dtypes_are_refused():
    assert dtype_name(np.zeros(1, np.uint16)) == "bfloat16"
    assert dtype_name(np.zeros(1, bool)) == "bool"
    with pytest.raises(Refused, match="complex128"):
        dtype_name(np.zeros(1, complex))
