"""The catalogue against a model of who holds what, under any history."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from asyncflow.errors import Fenced, ProtocolError, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.weights.catalogue import Catalogue, Holding
from asyncflow.weights.manifest import HASH, ManifestPart, Slice, TensorEntry, encoded, merge
from asyncflow.weights.messages import WHOLE
from asyncflow.weights.slices import Box

ROWS = 4
KEEP = 2


def rows(rank: int, parts: int) -> Box:
    size = ROWS // parts
    return Box((rank * size,), (size,))


def part(version: Version, rank: int = 0, parts: int = 1, *, worker: str = "", digest: str = "") -> ManifestPart:
    box, worker = rows(rank, parts), worker or f"t{version.attempt}.{rank}"
    piece = Slice(box=box, holder=worker, nbytes=box.volume * 4, digest=f"{HASH}:{digest or f'{version.step}.{rank}'}")
    entry = TensorEntry(name="w", dtype="float32", shape=(ROWS,), slices=(piece,))
    return ManifestPart(
        version=version.packed, part=rank, parts=parts, worker=worker, address=f"tcp://{worker}", tensors=(entry,)
    )


def holding(worker: str, regions: dict[str, Box] | None = None) -> Holding:
    return Holding(worker=worker, address=f"tcp://{worker}", regions=regions)


class Histories(RuleBasedStateMachine):
    """Two-rank trainers of rising attempts, receivers that hold whole versions or halves, steps required at will."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue(keep=KEEP)
        self.attempt = 0
        self.parts: dict[Version, set[int]] = {}
        self.complete: set[Version] = set()
        self.held: dict[tuple[str, Version], set[int]] = {}
        self.required: set[int] | None = None
        self.newest: Version | None = None
        self.revision = 0
        self.told: dict[int, object] = {}

    def covered(self, version: Version) -> bool:
        rows_held = [part for (_, v), part in self.held.items() if v == version]
        return version in self.complete and set().union(*rows_held) == {0, 1}

    def forget_unheld(self) -> None:
        alive = {version for _, version in self.held}
        self.complete &= alive
        for version in self.parts:
            publishers = {worker for worker, v in self.held if v == version}
            if version not in self.complete:
                ranks = {rank for rank in self.parts[version] if f"t{version.attempt}.{rank}" in publishers}
                self.parts[version] = ranks

    @rule(
        attempt=st.integers(0, 3), step=st.integers(0, 5), ranks=st.sampled_from([(0, 1), (0, 1), (1, 0), (0,), (1,)])
    )
    def publish(self, attempt: int, step: int, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self.publish_part(Version(max(attempt - 2, 0), step), rank)

    def publish_part(self, version: Version, rank: int) -> None:
        attempt = version.attempt
        if attempt < self.attempt:
            with pytest.raises(Fenced):
                self.catalogue.publish(part(version, rank, 2))
            return
        self.attempt = attempt
        self.parts.setdefault(version, set()).add(rank)
        if self.parts[version] == {0, 1}:
            self.complete.add(version)
        assert self.catalogue.publish(part(version, rank, 2)) == (version in self.complete)
        self.held[f"t{attempt}.{rank}", version] = {rank}

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), worker=st.sampled_from(["a", "b", "c"]), half=st.sampled_from([None, 0, 1]))
    def hold(self, data: st.DataObject, worker: str, half: int | None) -> None:
        version = data.draw(st.sampled_from(sorted(self.complete)))
        regions = None if half is None else {"w": rows(half, 2)}
        self.catalogue.hold(version, holding(worker, regions))
        self.held[worker, version] = {0, 1} if half is None else {half}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        worker, _ = data.draw(st.sampled_from(sorted(self.held)))
        assert self.catalogue.held_by(worker) == {version for name, version in self.held if name == worker}
        for version in set(self.catalogue.releasable) & self.catalogue.held_by(worker):
            self.catalogue.drop(worker, version)
            del self.held[worker, version]
        self.forget_unheld()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone, _ = data.draw(st.sampled_from(sorted(self.held)))
        self.catalogue.leave(gone)
        self.held = {key: ranks for key, ranks in self.held.items() if key[0] != gone}
        self.forget_unheld()

    @rule(steps=st.sets(st.integers(0, 5)))
    def require(self, steps: set[int]) -> None:
        self.required = steps
        self.catalogue.require(steps)

    @invariant()
    def found_is_alive_and_of_the_newest_attempt(self) -> None:
        for step in range(6):
            alive = [version for version in self.complete if version.step == step and self.covered(version)]
            assert self.catalogue.find(step) == max(alive, default=None)

    @invariant()
    def what_is_needed_is_never_releasable(self) -> None:
        alive = sorted(version for version in self.complete if self.covered(version))
        kept = set(alive[-KEEP:]) | {self.catalogue.find(step) for step in self.required or ()}
        releasable = set(self.catalogue.releasable)
        assert not releasable & kept
        assert self.required is not None or not releasable
        assert releasable <= {version for _, version in self.held}

    @invariant()
    def what_nobody_needs_is_releasable(self) -> None:
        alive = sorted(version for version in self.complete if self.covered(version))
        if self.required is not None:
            for _, version in self.held:
                older = version in alive[:-KEEP] and version != self.catalogue.newest
                if older and self.catalogue.find(version.step) not in {None, version}:
                    assert version in self.catalogue.releasable

    @invariant()
    def nothing_goes_back(self) -> None:
        newest = self.catalogue.newest
        assert self.newest is None or (newest is not None and newest >= self.newest)
        assert self.catalogue.revision >= self.revision
        self.newest, self.revision = newest, self.catalogue.revision

    @invariant()
    def a_revision_says_always_the_same(self) -> None:
        catalogue = self.catalogue
        known = [version for version in catalogue.versions if catalogue.digest(version) is not None]
        versions = [(version, catalogue.available(version), catalogue.digest(version)) for version in known]
        told = versions, catalogue.newest, catalogue.required, catalogue.releasable
        assert self.told.setdefault(catalogue.revision, told) == told


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_version_is_visible_only_when_all_parts_have_arrived():
    catalogue, version = Catalogue(), Version(0, 1)
    whole = merge([part(version, rank, 2) for rank in (0, 1)])
    for rank in (0, 1):
        assert (catalogue.available(version), catalogue.digest(version)) == (False, None)
        assert catalogue.manifest_nbytes(version) == 0
        assert catalogue.find(1) is None
        with pytest.raises(StaleHandle):
            catalogue.manifest(version)
        assert catalogue.publish(part(version, rank, 2)) == (rank == 1)
    assert catalogue.find(1) == catalogue.newest == version
    assert (catalogue.manifest(version), catalogue.digest(version)) == (whole, whole.digest)
    assert catalogue.manifest_nbytes(version) == len(encoded(whole))


def test_a_part_may_come_again_but_not_with_other_content():
    catalogue = Catalogue()
    catalogue.publish(part(Version(0, 1), 0, 2))
    catalogue.publish(part(Version(0, 1), 0, 2))
    with pytest.raises(Refused, match="other content"):
        catalogue.publish(part(Version(0, 1), 0, 2, digest="x"))
    with pytest.raises(Refused, match="4 parts, but another rank"):
        catalogue.publish(part(Version(0, 1), 1, 4))
    catalogue.publish(part(Version(0, 1), 1, 2))
    revision = catalogue.revision
    assert catalogue.publish(part(Version(0, 1), 1, 2))
    assert catalogue.revision == revision
    with pytest.raises(Refused, match="other content"):
        catalogue.publish(part(Version(0, 1), 1, 2, digest="x"))


def test_a_fence_counts_before_the_new_attempt_has_published():
    catalogue = Catalogue()
    catalogue.fence(2)
    with pytest.raises(Fenced, match="attempt 1 publishes"):
        catalogue.publish(part(Version(1, 9)))
    catalogue.publish(part(Version(2, 4)))
    assert catalogue.newest == Version(2, 4)


def test_a_restarted_catalogue_learns_from_holders_and_their_word_must_agree():
    catalogue, version = Catalogue(), Version(1, 3)
    with pytest.raises(StaleHandle):
        catalogue.hold(version, holding("a"))
    with pytest.raises(ProtocolError, match="no region"):
        catalogue.hold(version, holding("a", {"w": Box((0,), (ROWS + 1,))}), manifest=merge([part(version)]))
    assert catalogue.versions == []
    catalogue.hold(version, holding("a"), manifest=merge([part(version)]))
    assert catalogue.find(3) == version
    with pytest.raises(Refused, match="two different"):
        catalogue.hold(version, holding("b"), manifest=merge([part(version, digest="x")]))
    placed = catalogue.place(version, "c", address="tcp://c", layout=WHOLE)
    assert ([source.address for source in placed.sources], placed.whole, placed.published) == (["tcp://a"], True, False)
    catalogue.publish(part(version))
    assert {holder.worker for holder in catalogue.holders(version)} == {"a", "t1.0"}
    assert catalogue.releasable == []


def test_holders_of_a_lost_newest_version_keep_the_one_before():
    catalogue = Catalogue(keep=1)
    catalogue.require([])
    for step in (1, 2):
        catalogue.publish(part(Version(0, step)))
    catalogue.hold(Version(0, 1), holding("a"))
    assert catalogue.releasable == [Version(0, 1)]
    catalogue.leave("t0.0")
    assert catalogue.releasable == []
    assert (catalogue.find(1), catalogue.find(2), catalogue.newest) == (Version(0, 1), None, Version(0, 2))


def test_what_a_step_needs_stays_and_what_a_newer_attempt_has_made_again_may_go():
    catalogue, half = Catalogue(keep=1), {"w": rows(0, 2)}
    for step in (1, 2, 3):
        catalogue.publish(part(Version(0, step)))
    catalogue.hold(Version(0, 1), holding("a"))
    catalogue.hold(Version(0, 2), holding("a", half))
    catalogue.require([1])
    assert catalogue.releasable == [Version(0, 2)]
    catalogue.leave("t0.0")
    catalogue.require([2])
    assert catalogue.releasable == [], "half of what a step needs may be all that there is"
    catalogue.require([])
    assert catalogue.releasable == [Version(0, 2)]
    catalogue.publish(part(Version(1, 2)))
    catalogue.require([1, 2])
    assert catalogue.releasable == [Version(0, 2)]


def test_parts_of_an_attempt_that_was_replaced_may_go():
    catalogue, version = Catalogue(), Version(0, 1)
    catalogue.require([])
    catalogue.publish(part(version, 0, 2))
    assert catalogue.releasable == []
    catalogue.fence(1)
    assert catalogue.releasable == [version]


def located(
    catalogue: Catalogue, version: Version, worker: str, *, layout: str = WHOLE, outside: bool = False
) -> list[str]:
    placed = catalogue.place(version, worker, address=f"tcp://{worker}", layout=layout, outside=outside)
    return [source.worker for source in placed.sources]


def test_a_version_does_not_live_on_by_what_is_held_outside_of_the_job():
    catalogue, version = Catalogue(), Version(0, 1)
    catalogue.publish(part(version))
    catalogue.hold(version, Holding(worker="f", address="tcp://f", outside=True))
    assert catalogue.available(version)
    catalogue.leave("t0.0")
    assert not catalogue.available(version)
    assert catalogue.find(1) is None
    catalogue.hold(version, holding("a"))
    assert catalogue.available(version)
    told = catalogue.revision
    catalogue.hold(version, holding("a", {"w": rows(0, 2)}))
    assert not catalogue.available(version), "it has only half of it now"
    assert catalogue.revision > told


def test_nobody_in_the_job_pulls_from_outside_and_those_outside_pull_from_each_other():
    catalogue, version = Catalogue(), Version(0, 1)
    catalogue.publish(part(version))
    assert located(catalogue, version, "f0", outside=True) == ["t0.0"]
    catalogue.hold(version, Holding(worker="f0", address="tcp://f0", outside=True))
    assert located(catalogue, version, "f1", outside=True) == ["f0"]
    for worker in ("r0", "r1", "r2", "r3"):
        assert not set(located(catalogue, version, worker)) & {"f0", "f1"}
    catalogue.hold(version, holding("r0"))
    catalogue.leave("t0.0")
    assert located(catalogue, version, "r1") == ["r0"]


@pytest.mark.parametrize("in_full", [False, True])
def test_a_source_that_failed_somebody_is_one_again_once_it_has_got_another_version(in_full: bool):
    catalogue, first, second = Catalogue(), Version(0, 1), Version(0, 2)
    for version in (first, second):
        catalogue.publish(part(version))
    catalogue.hold(first, holding("r0"))
    assert located(catalogue, first, "r1") == ["r0"]
    catalogue.place(first, "r1", address="tcp://r1", layout=WHOLE, failed=["r0"])
    assert located(catalogue, first, "r2") != ["r0"]
    if in_full:
        catalogue.hold(second, holding("r0"))
    else:
        assert catalogue.report("r0", [first, second]) == []
    assert located(catalogue, first, "r3") == ["r0"]


def test_without_publishers_those_who_have_all_of_it_are_the_sources_of_another_layout():
    catalogue, version = Catalogue(), Version(0, 1)
    catalogue.publish(part(version))
    for worker, regions in (("a", {"w": rows(0, 2)}), ("b", {"w": rows(1, 2)}), ("c", None)):
        catalogue.hold(version, holding(worker, regions))
    for gone, sources in (("", ["t0.0"]), ("t0.0", ["c"]), ("c", ["a", "b"])):
        catalogue.leave(gone)
        assert located(catalogue, version, "d", layout=f"after {gone}") == sources


def test_a_worker_is_believed_by_number_once_it_has_said_in_full_what_it_holds_of_the_same_tensors():
    catalogue, half = Catalogue(), {"w": rows(0, 2)}
    first, second, other = Version(0, 1), Version(0, 2), Version(0, 3)
    for version in (first, second):
        catalogue.publish(part(version))
    assert catalogue.report("a", [first]) == [first]
    catalogue.hold(first, holding("a", half))
    assert catalogue.report("a", [first, second]) == []
    assert [each.regions for each in catalogue.holders(second) if each.worker == "a"] == [half]
    wide = TensorEntry(name="w", dtype="float32", shape=(2 * ROWS,), slices=part(other).tensors[0].slices)
    catalogue.hold(other, holding("t"), manifest=replace(merge([part(other)]), tensors=(wide,)))
    assert catalogue.report("a", [second, other]) == [other]
    assert catalogue.held_by("a") == {second}
    assert catalogue.report("a", [second, Version(0, 9)]) == [Version(0, 9)]
    catalogue.leave("a")
    assert catalogue.report("a", [second]) == [second]


def test_parts_of_a_version_that_is_not_complete_are_told_nobody():
    catalogue = Catalogue()
    catalogue.require([])
    revision = catalogue.revision
    catalogue.publish(part(Version(0, 1), 0, 2))
    assert catalogue.revision == revision
    catalogue.publish(part(Version(0, 1), 1, 2))
    assert catalogue.revision == revision + 1
