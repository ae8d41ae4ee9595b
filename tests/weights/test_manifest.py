"""Manifests: merging the ranks' parts, and refusing what is not consistent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_128

from asyncflow.errors import ProtocolError, Refused
from asyncflow.identity import Version
from asyncflow.weights.manifest import (
    HASH,
    MANIFEST,
    Manifest,
    ManifestPart,
    Slice,
    TensorEntry,
    decoded,
    digest_of,
    dtype_name,
    encoded,
    entries_digest,
    merge,
)
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
        ([part(0, 2, {"a": TOP}), part(1, 2, {"a": TOP})], "no rank publishes"),
        ([part(0, 2, {"a": WHOLE}), part(1, 2, {"a": TOP})], "overlaps"),
        ([part(0, 2, {"a": WHOLE}), part(1, 2, {"a": WHOLE}, digest="e")], "different bytes"),
        ([part(0, 2, {"a": TOP}), part(1, 2, {"a": BOTTOM}, dtype="bfloat16")], "float32.*bfloat16"),
        ([part(0, 2, {"a": TOP}), part(1, 2, {"a": Box((2, 0), (3, 6))}, shape=(5, 6))], "at another"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts, match):
    with pytest.raises(Refused, match=match):
        merge(parts)


def with_entry(found: ManifestPart | Manifest, **changes):
    """Return it with its one entry changed, and a digest that follows from that."""
    tensors = (msgspec.structs.replace(found.tensors[0], **changes),)
    more = {"digest": entries_digest(tensors)} if isinstance(found, Manifest) else {}
    return msgspec.structs.replace(found, tensors=tensors, **more)


GOOD = part(0, 1, {"a": WHOLE})
(SLICE,) = GOOD.tensors[0].slices


def sliced(*boxes: Box) -> tuple[Slice, ...]:
    return tuple(msgspec.structs.replace(SLICE, box=box, nbytes=box.volume * 4) for box in boxes)


DEEP = Box.whole((1,) * 9)
MALFORMED = [
    ({"dtype": "object"}, "unknown dtype 'object'"),
    ({"name": MANIFEST}, "a tensor needs a name"),
    ({"shape": (0, -6), "slices": sliced(Box.whole((0, 0)))}, "impossible shape"),
    ({"shape": DEEP.extent, "slices": sliced(DEEP)}, "impossible shape"),
    ({"shape": (3, 6)}, "does not lie inside"),
    ({"slices": (msgspec.structs.replace(SLICE, nbytes=1 << 40),)}, "bytes do not follow"),
    ({"slices": sliced(TOP, WHOLE)}, "overlaps another"),
    ({"slices": sliced(Box((0, 0), (1, 6)), Box((3, 0), (1, 6)))}, "no rank publishes"),
]


@pytest.mark.parametrize("change", MALFORMED, ids=lambda change: change[1])
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_malformed_is_refused(change, whole):
    good = merge([GOOD]) if whole else GOOD
    good.check()
    with pytest.raises(ProtocolError, match=change[1]):
        with_entry(good, **change[0]).check()
    deepest = Box.whole((1,) * 8)
    with_entry(GOOD, shape=deepest.extent, slices=sliced(deepest)).check()


def test_malformed_parts_are_refused():
    for change, why in (
        ({"part": 1}, "part 1 of 1 does not exist"),
        ({"tensors": GOOD.tensors * 2}, "named twice"),
        ({"worker": "other"}, "not of other alone"),
    ):
        with pytest.raises(ProtocolError, match=why):
            msgspec.structs.replace(GOOD, **change).check()
    half = with_entry(GOOD, slices=sliced(BOTTOM))
    half.check()
    assert half.regions == {"a": BOTTOM}


def test_a_manifest_whose_figures_do_not_follow_is_refused():
    manifest = merge([GOOD])
    for change, why in (({"nbytes": 7}, "7 bytes"), ({"digest": "0" * 32}, "digest"), ({"tensors": ()}, "bytes")):
        with pytest.raises(ProtocolError, match=f"{why} do(es)? not follow"):
            msgspec.structs.replace(manifest, **change).check()


def test_of_a_peer_s_manifest_only_that_of_the_catalogue_is_taken_and_checked():
    manifest, version = merge([GOOD]), Version(1, 2)
    data = memoryview(encoded(manifest))
    assert decoded(data, version=version, digest=manifest.digest) == manifest
    for changed in ({"version": Version(1, 3)}, {"digest": "0" * 32}):
        with pytest.raises(ProtocolError, match="not that of the catalogue"):
            decoded(data, **{"version": version, "digest": manifest.digest, **changed})
    with pytest.raises(ProtocolError, match="cannot be read"):
        decoded(data[:-1], version=version, digest=manifest.digest)
    forged = memoryview(encoded(msgspec.structs.replace(manifest, tensors=())))
    with pytest.raises(ProtocolError, match="do not follow"):
        decoded(forged, version=version, digest=manifest.digest)


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
