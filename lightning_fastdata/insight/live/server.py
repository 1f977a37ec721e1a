"""Serves one page to the browsers of this machine that know its secret address."""

from __future__ import annotations

import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable

_HOST: Final = "127.0.0.1"
_PATIENCE_S: Final = 5.0
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


class PageServer(ThreadingHTTPServer):
    """A server of one page, on the loopback interface only.

    Other users of the machine can reach it, too: only those who know the token in the address get
    the page, and only by its name for itself, so that no page of another site can ask in a
    browser's place.

    Args:
        page: Returns the page, as HTML.
        port: To listen on; 0: a free one.

    Raises:
        OptionsError: The port cannot be had.
    """

    daemon_threads = True

    def __init__(self, page: Callable[[], str], port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OptionsError(f"Port {port} cannot be had: {error}. Leave --port out.") from error
        self.names = {f"{name}:{self.server_address[1]}" for name in (_HOST, "localhost")}

    @property
    def address(self) -> str:
        """Where the page is, with the token."""
        return f"http://{_HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Say nothing of browsers that go away; other errors are told in a line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            sys.stderr.write(f"fastdata: the page cannot be shown: {error!r}\n")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the one page; other methods have no function here, and are refused."""

    server: PageServer
    timeout = _PATIENCE_S
    server_version, sys_version = "fastdata", ""

    def do_GET(self) -> None:  # the name that the library asks for
        """Send the page, or refuse."""
        given = self.path.encode("utf-8", "replace")
        wanted = f"/{self.server.token}/".encode()
        # In this order: who does not call the server by its name learns nothing of the token.
        known = self.headers.get("Host", "") in self.server.names
        if not known or not secrets.compare_digest(given, wanted):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        body = self.server.page().encode("utf-8", "backslashreplace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing: a log would hold the token."""
