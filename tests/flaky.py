"""A proxy before an HTTP server, of whose answers a seeded share fails in the ways that servers and networks have."""

import http.client
import random
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from answering import Quiet, serving

ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We encountered an error</Message></Error>'
# "lost": done, but the answer never comes; "short": cut, and its headers know nothing of it.
FAULTS = [*("refused", "refused", "dropped", "lost", "cut", "short") * 2, "silent"]


@contextmanager
def flaky(endpoint, share, seed=0):
    """Gives the proxy's address, and how often each fault came."""
    rng, lock, counts = random.Random(seed), threading.Lock(), Counter()
    host = urlsplit(endpoint).netloc

    class Handler(Quiet):
        def answer(self):
            body = self.body()
            with lock:
                fault = rng.choice(FAULTS) if rng.random() < share else None
            if fault == "silent":
                self.connection.recv(1)  # until the other side gives up
            if fault in ("silent", "dropped"):
                return self.end(fault)
            if fault == "refused":
                self.reply(ERROR, 500, Content_Type="application/xml")
                return self.end(fault)
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body, dict(self.headers))
            came = connection.getresponse()
            data = came.read()
            connection.close()
            if fault in ("cut", "short") and not data:
                fault = "lost"
            if fault == "lost":
                return self.end(fault)
            kept = {"Content-Length": str(len(data)), **dict(came.getheaders())}
            for name in ("Connection", "Transfer-Encoding", "Date", "Server"):
                kept.pop(name, None)
            half = data[: len(data) // 2]
            if fault == "short":
                kept["Content-Length"] = str(len(half))
            self.reply(half if fault in ("cut", "short") else data, came.status, **kept)
            return self.end(fault) if fault else None

        def end(self, fault):
            with lock:
                counts[fault] += 1
            self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}", counts
