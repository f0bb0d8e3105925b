"""Servers on loopback, and one that answers as a test has it."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing is printed."""

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, content=b"", status=200, **headers):
        """With the length of the content, unless the headers give one."""
        headers = {"Content-Length": str(len(content)), **headers}
        self.send(status, b"" if self.command == "HEAD" else content, **headers)

    def send(self, status, content, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(server):
    """Gives an HTTP server that answers as long as the block lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(Quiet):
    def do_POST(self):
        body = json.loads(self.body() or "null")
        self.server.bodies.append(body)
        with suppress(OSError):
            self.server.answer(self, body)
        self.close_connection = True

    do_GET = do_POST


def answering(answer):
    """Serves with `url`, and the `bodies` that it was sent. `answer` takes the handler and a body."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.bodies, server.answer = f"http://127.0.0.1:{server.server_address[1]}/v1", [], answer
    return serving(server)


def completion(ids, reason="stop", **more):
    """A completion of token ids: status and bytes."""
    choice = {"text": "for nobody", "token_ids": ids, "finish_reason": reason}
    return 200, json.dumps({"choices": [choice], **more}).encode()
