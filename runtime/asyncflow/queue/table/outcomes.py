"""The outcomes of finished groups, four bytes a group, for the driver's snapshot and for trainers that begin anew.

Serials lie in pages; a group's place in its page holds the number of its outcome, and equal outcomes have one number.

Invariant: a serial has at most one outcome; pages without any do not exist.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from asyncflow.queue.table.state import Finished

_PAGE = 1024
_EMPTY = bytes(4 * _PAGE)


class Outcomes:
    """What became of each finished group, by serial."""

    def __init__(self) -> None:
        self._pages: dict[int, array[int]] = {}
        self._used: dict[int, int] = {}
        self._numbers: dict[Finished, int] = {}
        self._kinds: list[Finished | None] = [None]

    def __len__(self) -> int:
        return sum(self._used.values())

    def __contains__(self, serial: int) -> bool:
        page = self._pages.get(serial // _PAGE)
        return page is not None and page[serial % _PAGE] > 0

    def __setitem__(self, serial: int, finished: Finished) -> None:
        number = self._numbers.get(finished)
        if number is None:
            number = self._numbers[finished] = len(self._kinds)
            self._kinds.append(finished)
        page = self._pages.get(serial // _PAGE)
        if page is None:
            page = self._pages[serial // _PAGE] = array("I", _EMPTY)
        self._used[serial // _PAGE] = self._used.get(serial // _PAGE, 0) + (page[serial % _PAGE] == 0)
        page[serial % _PAGE] = number

    def __delitem__(self, serial: int) -> None:
        page = self._pages[serial // _PAGE]
        self._used[serial // _PAGE] -= page[serial % _PAGE] > 0
        page[serial % _PAGE] = 0
        if not self._used[serial // _PAGE]:
            del self._pages[serial // _PAGE], self._used[serial // _PAGE]

    def __iter__(self) -> Iterator[int]:
        return (serial for serial, _ in self.items())

    def items(self) -> Iterator[tuple[int, Finished]]:
        """Yield serials and outcomes, by serial."""
        for number in sorted(self._pages):
            for place, kind in enumerate(self._pages[number]):
                finished = self._kinds[kind]
                if finished is not None:
                    yield number * _PAGE + place, finished
