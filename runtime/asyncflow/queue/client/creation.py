"""New samples on their way to storage units: cut into parts, each taken to a unit that has room.

A part that finds no room at its unit goes to the next one. So a put fails for want of room only where all units
together have none, which ``RLJobSpec.bytes_of_interval`` rules out.

Invariant: a group goes to one unit, whole; a part with all that its samples get later weighs no more than any unit can
hold, unless that is one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncflow.api.queue import LEAST_BYTES
from asyncflow.errors import DeadlineExceeded, Elsewhere, PeerLost, Refused
from asyncflow.net.batches import weighed_batches
from asyncflow.net.frames import Jagged, encode_batch
from asyncflow.queue.client.patience import patience
from asyncflow.queue.client.placement import Placement
from asyncflow.queue.client.scatter import part_of, parts_by
from asyncflow.queue.client.verbs import Clock, Verb, left_of, once, persist, together
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.messages import RowMeta


class Creator:
    """Creates samples for one client; see ``RowVerbs.create``. placement: chooses the units."""

    def __init__(self, *, placement: Placement, worker: str, attempt: int, clock: Clock) -> None:
        self._placement = placement
        self._worker = worker
        self._attempt = attempt
        self._clock = clock

    def create(
        self,
        metas: Sequence[RowMeta],
        columns: Mapping[str, Jagged],
        *,
        group_size: int,
        outputs: Mapping[str, int],
        timeout: float,
    ) -> Verb[list[bool]]:
        """Create samples; give whether each is new."""
        _check_whole(metas, group_size)
        deadline, verdicts = self._clock() + timeout, dict.fromkeys(range(len(metas)), False)
        left = dict(parts_by((meta.serial, meta.partition) for meta in metas))
        columns = part_of(columns, range(len(metas)), len(metas))
        sizes = _bytes_of_rows(columns, len(metas), later=sum(outputs.values()))
        weights = {group: sum(sizes[index] for index in indices) for group, indices in left.items()}
        tried: set[int] = set()
        yield from self._placement.begin()

        def send(unit: int, groups: list[tuple[int, str]], others: bool) -> Verb[None]:
            nbytes = sum(weights[group] for group in groups)
            room_s, answer_s = patience(left_of(deadline, self._clock), nbytes=nbytes, others=others)
            indices = [index for group in groups for index in left[group]]
            header, frames = encode_batch(part_of(columns, indices, len(metas)))
            mine = [metas[i] for i in indices]
            request = unit_calls.CreateRows(
                mine, group_size, header, dict(outputs), room_s, self._attempt, producer=self._worker
            )
            try:
                answer, _ = yield from once(
                    unit, "unit.create", request, calls.Verdicts, timeout=answer_s, frames=frames
                )
            except Elsewhere:
                self._placement.avoid(unit)
                return
            except (PeerLost, DeadlineExceeded):
                tried.add(unit)
                raise
            verdicts.update(zip(indices, answer.ok, strict=True))
            for group in groups:
                del left[group]

        def attempt() -> Verb[None]:
            there = self._placement.there()
            if tried.issuperset(there):
                tried.clear()
            by_unit: dict[int, list[tuple[int, str]]] = {}
            for group in left:
                by_unit.setdefault(self._placement.choose(len(left[group]), but=tried), []).append(group)
            yield from together(
                send(unit, groups, len(there) > 1)
                for unit, mine in by_unit.items()
                for groups in weighed_batches(mine, weights.__getitem__, heaviest=LEAST_BYTES)
            )
            if left:
                raise PeerLost(f"units leave; {len(left)} groups go to others", where="queue client")

        yield from persist(attempt, what=f"creating {len(metas)} samples", timeout=timeout, clock=self._clock)
        return list(verdicts.values())


def _bytes_of_rows(columns: Mapping[str, Jagged], rows: int, *, later: int) -> list[int]:
    sizes = [later] * rows
    for column in columns.values():
        sizes = [size + more for size, more in zip(sizes, column.sizes, strict=True)]
    return sizes


def _check_whole(metas: Sequence[RowMeta], size: int) -> None:
    """Refuse samples named twice, or beyond the size of their group."""
    keys = {(meta.partition, *meta.key) for meta in metas}
    if len(keys) != len(metas) or any(not 0 <= meta.sample < size for meta in metas):
        hint = "Create all samples 0..group_size-1 of a prompt at once, each once"
        raise Refused(f"{len(metas)} samples do not make groups of {size}", where="queue client", hint=hint)
