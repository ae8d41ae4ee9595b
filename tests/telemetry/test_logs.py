import io
import logging
import re
from collections.abc import Iterator

import pytest

from asyncflow.telemetry.logs import setup_logging

LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ rollout-3 asyncflow\.\w+: ")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("asyncflow")
    before = (list(root.handlers), root.level, ours.level)
    made = io.StringIO()
    setup_logging("rollout", 3, stream=made)
    yield made
    logging.captureWarnings(capture=False)
    root.handlers[:], level, ours_level = before[0], before[1], before[2]
    root.setLevel(level)
    ours.setLevel(ours_level)


def test_a_record_is_one_line_with_utc_time_role_and_level(stream: io.StringIO) -> None:
    log = logging.getLogger("asyncflow.test")
    record = log.makeRecord(log.name, logging.WARNING, "f", 1, "100%% of\t%s\nlost", ("\x1b[2Jit\u2028\x85",), None)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    logging.getLogger().handle(record)
    line = r"2023-11-14T22:13:20.250Z WARNING rollout-3 asyncflow.test: 100% ofTAB\x1b[2Jit\u2028\x85\nlost"
    assert stream.getvalue() == line.replace("TAB", "\t") + "\n"


def test_a_traceback_stays_in_its_line(stream: io.StringIO) -> None:
    try:
        raise KeyError("inside")
    except KeyError:
        logging.getLogger("asyncflow.test").exception("it failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert LINE.match(lines[0])
    assert "Traceback" in lines[0]
    assert "KeyError: 'inside'" in lines[0]


def test_others_are_heard_from_warning_on(stream: io.StringIO) -> None:
    logging.getLogger("aiohttp.test").info("chatter")
    logging.getLogger("asyncflow.test").info("ours")
    logging.getLogger("asyncflow.test").debug("details")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["ours"]


def test_setting_up_again_replaces_and_does_not_repeat(stream: io.StringIO) -> None:
    second = io.StringIO()
    setup_logging("trainer", 0, stream=second)
    logging.getLogger("asyncflow.test").info("once")
    assert stream.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert "trainer-0" in second.getvalue()


def test_a_record_that_the_disk_does_not_take_is_dropped_without_a_word(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: str) -> int:
        raise OSError(28, "No space left on device")

    log = logging.getLogger("asyncflow.test")
    with monkeypatch.context() as patch:
        patch.setattr(stream, "write", full)
        log.warning("lost")
    log.warning("there")
    assert capsys.readouterr().err == ""
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["there"]


def test_a_record_for_a_stream_that_was_closed_is_dropped(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.close()
    logging.getLogger("asyncflow.test").warning("late")
    assert capsys.readouterr().err == ""
