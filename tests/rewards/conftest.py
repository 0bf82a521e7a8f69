"""Shared by the tests of rewards: a real HTTP server on loopback whose behaviour a test scripts."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Scripted(ThreadingHTTPServer):
    """``script[path](handler, content, number)`` answers request ``number`` (from 0) at ``path``; ``seen`` has (path, headers, content)."""

    daemon_threads = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.seen, self.lock = script, [], threading.Lock()
        self.ended = threading.Event()  # a handler that waits or writes without end stops when this is set

    def url(self, path=""):
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def num_seen(self, path):
        return sum(seen == path for seen, _, _ in self.seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = self.server.num_seen(self.path)
            self.server.seen.append((self.path, dict(self.headers), content))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.script[self.path](self, content, number)

    def reply(self, content, code=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": len(body), "Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def serving():
    """``with serving(script) as server``."""
    return _serving


@contextlib.contextmanager
def _serving(script):
    server = Scripted(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
