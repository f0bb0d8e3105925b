"""An imitation of vLLM's OpenAI server, on loopback: what a client sees of one, with known tokens and known counts.

`install` puts it where `python -m vllm.entrypoints.openai.api_server` finds it. Its own argument --imitate NAME picks
what goes wrong. It starts an "engine" that does not end by itself, as vLLM does, and writes both processes' numbers to
the file that IMITATION_PIDS names; requests are appended to that of IMITATION_REQUESTS.

Its target says, after a prompt, sum(prompt), sum(prompt) + 1, … modulo 97. Its drafter has 0, 1, 2, … tokens accepted
in turns, as far as it drafts. Like vLLM it counts what is cut off, and only some time after the answer.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

from answering import Quiet

WORDS = 97
# What `python -m` runs: this module, from here.
SERVER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import imitating
imitating.main(sys.argv[1:])
"""


def target(prompt, limit, end_ids):
    """The tokens of an answer."""
    tokens = []
    while len(tokens) < limit and not (tokens and tokens[-1] in end_ids):
        tokens.append((sum(prompt) + len(tokens)) % WORDS)
    return tokens


def verifications(length, depth):
    """Accepted tokens of each verification of an answer of so many tokens; the last may reach beyond its end."""
    accepted, at = [], 1
    while at < length:
        accepted.append(len(accepted) % (depth + 1))
        at += accepted[-1] + 1
    return accepted


def install(folder):
    """Make `vllm` importable from a folder."""
    package = Path(folder) / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    (Path(folder) / "vllm" / "version.py").write_text('__version__ = "0.0"\n', encoding="utf-8")
    (package / "api_server.py").write_text(SERVER, encoding="utf-8")
    return str(folder)


class Imitation(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, arguments):
        self.imitate = arguments.get("imitate", "")
        self.model = arguments["model"]
        self.speculative = json.loads(arguments.get("speculative-config", "null"))
        self.depth = self.speculative["num_speculative_tokens"] if self.speculative else 0
        self.lock = threading.Lock()
        self.answered = 0
        self.late = 0  # readings of the counters in which the last answers are still missing
        self.counts = {"finished": 0, "tokens": 0, "drafts": 0}
        self.positions = [0] * self.depth
        self.told = self.text()
        super().__init__(("127.0.0.1", int(arguments["port"])), Handler)

    def count(self, tokens):
        with self.lock:
            self.counts["finished"] += 1
            self.counts["tokens"] += len(tokens)
            for accepted in verifications(len(tokens), self.depth) if self.depth else ():
                self.counts["drafts"] += 1
                self.positions[:accepted] = [count + 1 for count in self.positions[:accepted]]
            self.late = 2

    def text(self):
        """/metrics as two engines have it, of which the second did nothing."""
        c, labels = self.counts, f'engine="0",model_name="{self.model}, \\"x\\""'
        lines = [
            "# TYPE vllm:request_success_total counter",
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {c["finished"] - 1}.0',
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} 1.0',
            f"vllm:generation_tokens_total{{{labels}}} {c['tokens']:e}",
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.25"}} 1.0',
            "process_resident_memory_bytes 1.5e+09",
        ]
        name = "vllm:spec_decode_num_"
        if self.depth and self.imitate != "uncounted":
            lines += [f"{name}drafts_total{{{labels}}} {c['drafts']}.0", f'{name}drafts_total{{engine="1"}} 0.0']
            for i, count in enumerate(self.positions):
                lines.append(f'{name}accepted_tokens_per_pos_total{{{labels},position="{i}"}} {count}.0')
        return "\n".join(lines) + "\n"


class Handler(Quiet):
    def do_GET(self):
        if self.path == "/metrics":
            if self.server.imitate == "dies uncounted" and self.server.answered > 2:
                os._exit(3)
            with self.server.lock:
                self.server.late -= 1
                if self.server.late < 0:
                    self.server.told = self.server.text()
                return self.reply(self.server.told.encode())
        pages = {"/health": "", "/v1/models": json.dumps({"data": [{"id": self.server.model}]})}
        return self.reply(pages[self.path].encode())

    def do_POST(self):
        body, server = json.loads(self.body()), self.server
        with server.lock:
            server.answered += 1
            number = server.answered
            with Path(os.environ["IMITATION_REQUESTS"]).open("a") as file:
                file.write(json.dumps(body) + "\n")
        tokens = target(body["prompt"], body["max_tokens"], body["stop_token_ids"])
        if not body.get("stream"):
            assert body["model"] == server.model
            if server.imitate == "dies" and number > 2:
                print("ERROR 01-01 [core.py:1] MemoryError: no room", flush=True)
                os._exit(3)
            reason = "stop" if tokens[-1] in body["stop_token_ids"] else "length"
            self.reply(json.dumps({"choices": [{"text": "", "token_ids": tokens, "finish_reason": reason}]}).encode())
            return
        pieces, at = [tokens[:1]], 1
        for accepted in verifications(len(tokens), server.depth):
            pieces.append(tokens[at : at + accepted + 1])
            at += accepted + 1
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i, piece in enumerate(pieces):
            if i == 1 and number > 2:
                if server.imitate == "dies":
                    said = "(EngineCore pid=1) ERROR 01-01 [core.py:1]"
                    print(f"{said} MemoryError: no room\n{said}     raise RuntimeError(\nEngineDeadError: dead")
                    sys.stdout.flush()
                    os._exit(3)
                if server.imitate == "breaks off":
                    self.close_connection = True
                    return
                if server.imitate == "silent":
                    time.sleep(3)
                    return
            self.event({"choices": [{"index": 0, "text": "", "token_ids": piece, "finish_reason": None}]})
        ended = "abort" if server.imitate == "aborts" else "length"
        self.event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": ended}]})
        self.write(b"data: [DONE]\n\n")
        server.count(tokens)
        self.wfile.write(b"0\r\n\r\n")

    def event(self, value):
        self.write(f"data: {json.dumps(value)}\n\n".encode())

    def write(self, data):
        half = len(data) // 2  # an event need not come in one piece
        for piece in (data[:half], data[half:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()


ENGINE = 'trap "" TERM; echo ready; exec sleep 3600'


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left(tmp_path) -> list[int]:
    """Processes of the server that still run."""
    if not (tmp_path / "pids").is_file():
        return []
    return [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if alive(pid)]


def main(argv):
    arguments = {name[2:]: value for name, value in pairwise(argv) if name.startswith("--")}
    with subprocess.Popen(["sh", "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        engine.stdout.readline()
        Path(os.environ["IMITATION_PIDS"]).write_text(f"{os.getpid()} {engine.pid}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Imitation(arguments).serve_forever()
