"""A server for objects on this machine that answers late or with errors as a test wants."""

from __future__ import annotations

import http.server
import random
import threading
import zlib


class ObjectServer:
    """Serves objects over HTTP from a process of its own thread.

    ``fail_share``, ``slow_share``, ``needs_at_once`` and ``most_allowed`` may be changed while it
    runs. No answer comes before ``needs_at_once`` requests were there at the same time. A share of
    the answers, ``slow_share``, comes only after eight other requests, or when nothing else is left
    to answer. With ``most_allowed`` it refuses what comes while so many others are answered.
    """

    def __init__(self, objects):
        self.objects = dict(objects)
        self.fail_share = 0.0
        self.slow_share = 0.0
        self.needs_at_once = 0
        self.most_allowed = None
        self.throttle_status = 503
        self.throttled = 0
        self.requests = 0
        self.at_once = 0
        self.most_at_once = 0
        self.slow_now = 0
        self._lock = threading.Condition()
        self._random = random.Random(0)
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        # A client that has its answer from another request hangs up.
        self._server.handle_error = lambda *_: None
        self._server.request_queue_size = 256
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: ObjectServer

    def log_message(self, *_args):
        pass

    def do_HEAD(self):
        self._answer(*self._found())

    def _found(self):
        data = self.owner.objects.get(self.path.lstrip("/"))
        return (404, b"") if data is None else (200, data)

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{zlib.crc32(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        owner = self.owner
        with owner._lock:
            owner.requests += 1
            until = owner.requests + 8
            owner.at_once += 1
            owner._lock.notify_all()
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
            fails = owner._random.random() < owner.fail_share
            slow = owner._random.random() < owner.slow_share
            throttled = owner.most_allowed is not None and owner.at_once > owner.most_allowed
            owner.throttled += throttled
        try:
            with owner._lock:
                if not throttled:
                    owner._lock.wait_for(lambda: owner.most_at_once >= owner.needs_at_once, 100)
                if slow and not throttled:
                    owner.slow_now += 1
                    owner._lock.wait_for(
                        lambda: owner.requests >= until or owner.slow_now == owner.at_once, 100
                    )
                    owner.slow_now -= 1
            if throttled or fails:
                self._answer(owner.throttle_status if throttled else 503, b"")
            else:
                self._answer(*self._found())
        finally:
            with owner._lock:
                owner.at_once -= 1
                owner._lock.notify_all()
