"""JSON requests to the API server as one user, with only the standard library.

Tests send hundreds of such requests; a kubectl call takes 0.1 to 0.2 s. Invariant: an answer without success raises
``Refused`` with the server's message.
"""

from __future__ import annotations

import http.client
import json
import select
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

Json = dict[str, Any]

MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
STRICT: Final = {"fieldValidation": "Strict"}
DRY_RUN: Final = STRICT | {"dryRun": "All"}
_SUCCESS: Final = range(200, 300)
_LATER_S: Final = 0.2


class Refused(Exception):
    """The API server refused a request. status: the HTTP status; causes: (field, message) of each error."""

    def __init__(self, status: int, answer: Json) -> None:
        super().__init__(f"{status}: {answer.get('message', answer)}")
        self.status = status
        self.reason = str(answer.get("reason", ""))
        self.message = str(answer.get("message", ""))
        causes = (answer.get("details") or {}).get("causes") or []
        self.causes = [(str(cause.get("field", "")), str(cause.get("message", ""))) for cause in causes]


class Api:
    """A client for one user. Each thread keeps its connection, because a TLS handshake costs as much as a request."""

    def __init__(self, server: str, *, ca: Path, certificate: Path, key: Path) -> None:
        self._address = urlsplit(server).netloc
        self._tls = ssl.create_default_context(cafile=ca)
        self._tls.load_cert_chain(certificate, key)
        self._kept = threading.local()

    def get(self, path: str, **query: str) -> Json:
        """Read an object or a list: ``get("/api/v1/nodes", labelSelector="a=b")``."""
        return self.request("GET", path, query=query)

    def create(self, path: str, body: Json, *, query: Mapping[str, str] = STRICT) -> Json:
        """Create an object in the collection at ``path``; with ``query=DRY_RUN``, only validate it."""
        return self.request("POST", path, body, query=query)

    def replace(self, path: str, body: Json, *, query: Mapping[str, str] = STRICT) -> Json:
        """Replace the object at ``path``."""
        return self.request("PUT", path, body, query=query)

    def patch(self, path: str, body: Json, *, form: str = MERGE, query: Mapping[str, str] = STRICT) -> Json:
        """Change the object at ``path``; ``form=APPLY`` is server-side apply and needs a fieldManager in the query."""
        return self.request("PATCH", path, body, query=query, form=form)

    def delete(self, path: str, **query: str) -> Json:
        """Delete the object, or with a selector the objects of the collection, at ``path``."""
        return self.request("DELETE", path, query=query)

    def find(self, path: str) -> Json | None:
        """Return the object at ``path``, None if there is none."""
        try:
            return self.get(path)
        except Refused as refused:
            if refused.status != http.client.NOT_FOUND:
                raise
            return None

    def exists(self, path: str) -> bool:
        """Return whether an object exists at ``path``."""
        return self.find(path) is not None

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Mapping[str, str] | None = None,
        form: str = "application/json",
        timeout_s: float = 30.0,
    ) -> Json:
        """Send one request, and repeat it while the server answers 429, as it does while a new kind is initialised.

        Raises Refused if the server refuses the request, and OSError if it does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status, text = self.raw(method, path, body, query=query, form=form, timeout_s=timeout_s)
            if status != http.client.TOO_MANY_REQUESTS or time.monotonic() > deadline:
                break
            time.sleep(_LATER_S)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"message": text.decode(errors="replace")}
        if status not in _SUCCESS:
            raise Refused(status, answer)
        return dict(answer)

    def raw(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Mapping[str, str] | None = None,
        form: str = "application/json",
        timeout_s: float = 30.0,
    ) -> tuple[int, bytes]:
        """Send one request and return the status and the body, also of a refusal."""
        connection = self._connection(timeout_s)
        try:
            connection.request(
                method,
                f"{path}?{urlencode(query)}" if query else path,
                body=None if body is None else json.dumps(body),
                headers={"Content-Type": form, "Accept": "application/json"},
            )
            answer = connection.getresponse()
            response = answer.status, answer.read()
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:
            self._kept.connection = connection
        return response

    def _connection(self, timeout_s: float) -> http.client.HTTPSConnection:
        """Return this thread's connection, or a new one if the server closed it, which makes its socket readable."""
        kept: http.client.HTTPSConnection | None = self._kept.__dict__.pop("connection", None)
        if kept is not None and not select.select([kept.sock], [], [], 0)[0]:
            kept.sock.settimeout(timeout_s)
            return kept
        if kept is not None:
            kept.close()
        return http.client.HTTPSConnection(self._address, context=self._tls, timeout=timeout_s)
