"""A server of rewards and chat completions that does what the first part of the path says; prints
its port.

`/MODE/ANYTHING/chat/completions` is a judge, `/MODE/ANYTHING/classify` a classifier of vLLM. The
right score is the length of the completion; a judge finds it after "COMPLETION ", a classifier
between "p" and "<eos>". `/classifier-of-two/...` has a second output, minus the first.
"""

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

attempts: Counter[str] = Counter()
counting = threading.Lock()


class Misbehaving(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # headers and body in one packet: else each answer waits 40 ms for an acknowledgement
    wbufsize = -1

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(json.dumps(attempts).encode())

    def do_POST(self):
        self.request_body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with counting:
            attempts[self.path] += 1
            self.attempt = attempts[self.path]
        mode = self.path.split("/")[1]
        getattr(self, mode.replace("-", "_"))()

    # ---- answers ----

    def reply(self, content, status=200, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def completion(self):
        body = self.request_body
        if self.path.endswith("/classify"):
            assert body.keys() == {"input", "use_activation"} and body["use_activation"] is False
            # a token per character, and EOS
            return "".join(map(chr, body["input"][:-1])).removeprefix("p")
        return body["messages"][-1]["content"].rpartition("COMPLETION ")[2]

    def answer(self, text=None, score=None, **choice):
        """A right answer, unless text or a score is given."""
        right = len(self.completion())
        if self.path.endswith("/classify"):
            if self.path.startswith("/classifier-of-two"):
                outputs = [right, -right]
            else:
                outputs = [score or right]
            data = [{"index": 0, "label": "GOOD", "probs": outputs, "num_classes": len(outputs)}]
            return json.dumps(
                {"id": "classify-1", "object": "list", "model": "m", "data": data}
            ).encode()
        text = f"There are 3 points to make. Score: {right}/1000" if text is None else text
        return json.dumps(
            {"choices": [{"message": {"content": text}, "finish_reason": "stop"} | choice]}
        ).encode()

    # ---- modes ----

    def ok(self):
        self.reply(self.answer())

    classifier_of_two = ok

    def slow(self):
        time.sleep(0.2)
        self.ok()

    def broken_twice(self):
        self.reply(b"busy", 503) if self.attempt <= 2 else self.ok()

    def broken(self):
        self.reply(b"CUDA out of memory", 500)

    def broken_for_x(self):
        self.broken() if "x" in self.completion() else self.ok()

    def limited_for_an_hour(self):
        self.reply(b"slow down", 429, [("Retry-After", "3600")])

    def silent(self):
        time.sleep(30)

    def half_json(self):
        content = self.answer()
        self.reply(content[: len(content) // 2])

    def hangs_up(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{")
        self.close_connection = True

    def drips(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(1000):
            self.wfile.write(b" ")
            time.sleep(0.05)

    def floods(self):
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        for _ in range(750):
            self.wfile.write(b" " * 2**20)

    def numberless(self):
        self.reply(self.answer("I would rather not say."))

    def nan(self):
        self.reply(self.answer("Score: nan", float("nan")))

    def cut_off(self):
        self.reply(self.answer("Of 10 points,", finish_reason="length"))

    def shuts_down(self):
        self.reply(self.answer("First, 2 + 2 = 4, and", finish_reason="abort"))

    def far_off(self):
        self.reply(self.answer("Score: 99999"))

    def another_shape(self):
        self.reply(b'["hello"]')

    def redirect(self):
        self.reply(b"", 307, [("Location", self.path.replace("redirect", "ok"))])

    def wrong_key(self):
        self.reply(f"no such key: {self.headers['Authorization']}".encode(), 401)

    def echo_body(self):
        key = self.headers["Authorization"].split()[-1]
        shapes = [
            key[:9],
            " ".join(key),
            key.upper(),
            key[3:].replace("-", "%2D%2d"),
            "\u200b".join(key),
            key[-8:],
        ]
        self.reply(("; ".join(shapes) + " " + key[:-1]).encode(), 401)

    def echo_score(self):
        key = self.headers["Authorization"].split()[-1]
        self.reply(self.answer(f"Score: {key[:-1]}", key[:-1]))

    def colored(self):
        self.reply(b"\x1b[31mred\x07", 401)

    def needs_key(self):  # its address has the key backwards
        key = self.path.split("/")[2][::-1]
        self.ok() if self.headers["Authorization"] == f"Bearer {key}" else self.reply(b"", 401)


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *args):
        pass  # clients hang up on purpose


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Misbehaving)
    print(server.server_port, flush=True)
    server.serve_forever()
