"""Tracks of spans, and what their invariant is."""

from track_flaws import flaw_of

from asyncflow.timeline.tracks import CAUSES, KINDS, Span, Track


def track(*spans: tuple[str, float, float]) -> Track:
    main = [Span(kind=kind, begin=begin, end=end) for kind, begin, end in spans]
    return Track(role="rollout", index=0, attempt=1, main=main)


def test_main_spans_fill_the_life_of_a_process():
    sound = track(("starting", 0, 1), ("generate", 1, 3), ("idle", 3, 3.5))
    assert not flaw_of(sound)
    assert (sound.name, sound.begin, sound.end) == ("rollout-0", 0, 3.5)
    assert sum(span.seconds for span in sound.main) == sound.end - sound.begin


def test_what_breaks_the_invariant_is_named():
    assert (
        flaw_of(track(("generate", 0, 1), ("idle", 2, 3))) == "idle of rollout-0 begins +1.000000 s after generate ends"
    )
    assert "begins -0.500000 s" in flaw_of(track(("generate", 0, 1), ("idle", 0.5, 3)))
    assert "ends before it begins" in flaw_of(track(("generate", 1, 0)))
    assert flaw_of(track()) == "rollout-0 has no span"


def test_the_words_are_those_of_the_types():
    assert "generate" in KINDS
    assert "back-pressure" in CAUSES
