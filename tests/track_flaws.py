"""The invariant of a track, checked by all tests that read or make one."""

from itertools import pairwise

from asyncflow.timeline.tracks import Track


def flaw_of(track: Track) -> str:
    """Return what breaks the invariant of a track, "" for nothing: the main spans are in order and leave no gap."""
    for span in track.main:
        if span.end < span.begin:
            return f"{span.kind} of {track.name} ends before it begins"
    for before, after in pairwise(track.main):
        if after.begin != before.end:
            return f"{after.kind} of {track.name} begins {after.begin - before.end:+.6f} s after {before.kind} ends"
    return "" if track.main else f"{track.name} has no span"
