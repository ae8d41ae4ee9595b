"""Whatever is at an address, or is none, asking there ends nobody."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from asyncflow.api.status import DriverStatus
from asyncflow.local import http_client
from asyncflow.local.http_client import ask, ask_at, ask_live, fetch

ANSWERS = {
    "/v1/status": b"HTTP/1.0 200 OK\r\n\r\n" + DriverStatus(desired_rollouts=3).model_dump_json(by_alias=True).encode(),
    "/v1/live": b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n{",
    "/refused": b"HTTP/1.0 403 Forbidden\r\n\r\nno",
    "/none": b"what?\r\n",
    "/cut": b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}",
    "/whole": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "/much": b"HTTP/1.0 200 OK\r\n\r\n" + bytes(100_000),
}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.wfile.write(ANSWERS[self.path])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_an_answer_is_returned_where_it_is_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MOST_BYTES", 99_999)
    status = ask(port, DriverStatus)
    assert status is not None
    assert status.desired_rollouts == 3
    assert ask_live(f"http://127.0.0.1:{port}") is None, "it is no JSON"
    assert [fetch(f"http://127.0.0.1:{port}", path) for path in ("/refused", "/none", "/much", "/cut")] == [None] * 4
    assert fetch(f"http://127.0.0.1:{port}", "/whole") == b"{}"
    monkeypatch.setattr(http_client, "MOST_BYTES", 100_000)
    assert fetch(f"http://127.0.0.1:{port}", "/much") == bytes(100_000)
    monkeypatch.setitem(ANSWERS, "/v1/status", b'HTTP/1.0 200 OK\r\n\r\n{"phase": 3}')
    assert ask(port, DriverStatus) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:99999", "http://[::1", "http://ü..:80"])
def test_an_address_of_nobody_is_no_answer(url: str) -> None:
    assert ask_at(url, DriverStatus) is None
