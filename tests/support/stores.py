"""An object store of this process that speaks S3, on a port of its own."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from urllib.request import urlopen

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


class Store:
    """Counts what it sends, and may fail requests.

    fails_every: one request of how many is refused, or its answer is cut; 0: none.
    sent: bytes of objects that were asked for with a range, by name.
    odd: what the next such requests get: "missing", or the "whole" object.
    """

    def __init__(self) -> None:
        self.fails_every, self._requests, self.failed = 0, 0, 0
        self.sent: Counter[str] = Counter()
        self.odd: list[str] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        options = {"threaded": True, "request_handler": Quiet}
        self._server = make_server("127.0.0.1", 0, self._answer, **options)
        self.address = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        urlopen(f"{self.address}/moto-api/reset", data=b"").close()

    def _answer(
        self, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        self._requests += 1
        fails = self.fails_every and self._requests % self.fails_every == 0
        self.failed += bool(fails)
        if fails and self.failed % 2:
            start("503 Slow Down", [("Content-Length", "0")])
            return []
        if self.odd and environ.get("HTTP_RANGE"):
            if self.odd.pop(0) == "missing":
                start("404 Not Found", [("Content-Length", "0")])
                return []
            del environ["HTTP_RANGE"]
        content = b"".join(self._moto(environ, start))
        content = content[: len(content) // 2] if fails else content
        if environ.get("HTTP_RANGE"):
            self.sent[environ["PATH_INFO"].rsplit("/")[-1]] += len(content)
        return [content]

    def stop(self) -> None:
        """Ends it; nothing answers at its address then."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
