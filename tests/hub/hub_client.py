"""A separate process with the unmodified client of the Hub, which reads its endpoint at import.

As a script, it executes code from lines of JSON in one namespace, and answers with the variable
`result`.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

TOKEN = "hf_writesWritesWritesWrites"
READER = "hf_readsReadsReadsReads"
TESTS = Path(__file__).parents[1]
# without Xet, which the server does not implement, without proxies, and without settings of another
# run
LEFT_OUT = {
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
}


class FailedError(Exception):
    """Exception raised by the code: type, message and traceback."""

    def __init__(self, kind, message, trace):
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message
        self.trace = trace


class Client:
    """Run code in the other process.

    Args:
        url (`str`): The server.
        home (`Path`): Its working directory, with its cache and its output.
        variables (`dict`): Further environment variables.
    """

    def __init__(self, url, home, **variables):
        self.home = Path(home)
        self.output = Path(home) / "output.txt"
        self.home.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        environment |= {
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(self.home / "hf_home"),
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")]
            ),
        }
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=self.home,
                env=environment | variables,
            )

    def run(self, code):
        """Execute code, and return its variable `result`."""
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process ended: {self.output.read_text()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(*answer["error"])
        return answer["result"]

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text goes to the output, not to the answers
    namespace = {}
    for line in sys.stdin:
        namespace.pop("result", None)
        try:
            exec(json.loads(line), namespace)
            answer = {"result": namespace.get("result")}
        except BaseException as error:
            answer = {"error": [type(error).__name__, str(error), traceback.format_exc()]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
