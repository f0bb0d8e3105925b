"""A server on loopback that answers as a test has it."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        self.server.bodies.append(body)
        with suppress(OSError):
            self.server.answer(self, body)
        self.close_connection = True

    do_GET = do_POST

    def log_message(self, *_):
        pass

    def send(self, status, content, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def answering(answer):
    """Gives the server: its `url`, and the `bodies` that it was sent. `answer` takes the handler and a body."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.bodies, server.answer = f"http://127.0.0.1:{server.server_address[1]}/v1", [], answer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
