"""A server with the Hub's endpoints: repositories, commits, large files, downloads.

It keeps everything in memory, and fails on request of a test. It implements what the client uses
with `HF_HUB_DISABLE_XET=1`, Git LFS over HTTP, and not the Xet protocol, whose client is not
Python.
"""

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

LARGE = re.compile(r"\.(safetensors|bin|pt)$")
NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Commit:
    oid: str
    message: str
    files: dict  # path -> bytes
    large: frozenset  # paths that came as large files


@dataclass
class Repository:
    commits: list = field(default_factory=list)

    @property
    def files(self):
        return self.commits[-1].files

    @property
    def messages(self):
        return [commit.message for commit in self.commits]

    def at(self, revision):
        found = [commit for commit in self.commits if revision in (commit.oid, "main")]
        if found:
            return found[-1]
        return None


class RefusedError(Exception):
    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status = status
        self.code = code


class Hub:
    """The server, its repositories and the requests it got.

    `tokens` maps a token to its user and its write access.
    """

    def __init__(self):
        self.tokens = {}
        self.repositories = {}
        self.objects = {}  # sha256 -> bytes
        self.uploads = []  # the sha256 of each
        self.expired = set()  # the sha256 of files whose addresses have expired
        self.hold = None  # pushes wait until it returns true
        self.echo = False  # errors repeat the token, which no server should do

    def __enter__(self):
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self})
        )
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    # ---- users and repositories ----

    def user(self, header):
        token = (header or "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise RefusedError(
                401, "Invalid credentials in Authorization header" + f" {token}" * self.echo
            )
        return self.tokens[token]

    def may_write(self, header, repo):
        name, writes = self.user(header)
        if not writes or repo.split("/")[0] != name:
            token = (header or "").removeprefix("Bearer ")
            raise RefusedError(
                403, f"You don't have the rights to write to {repo}" + f" with {token}" * self.echo
            )

    def repository(self, name):
        if name not in self.repositories:
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        return self.repositories[name]

    def commit_at(self, name, revision):
        commit = self.repository(name).at(unquote(revision))
        if commit is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # ---- endpoints ----

    def create(self, ask):
        given = json.loads(ask.body)
        name, _ = self.user(ask.authorization)
        repo = f"{given.get('organization') or name}/{given['name']}"
        if repo in self.repositories:
            return {
                "error": "You already created this model repo",
                "url": f"{self.url}/{repo}",
            }, 409
        self.may_write(ask.authorization, repo)
        self.repositories[repo] = Repository(
            [Commit("0" * 40, "initial commit", {".gitattributes": b""}, frozenset())]
        )
        return {"url": f"{self.url}/{repo}", "name": repo, "id": "1"}

    def validate_card(self, ask):
        return {"errors": [], "warnings": []}

    def preupload(self, ask, repo, revision):
        self.repository(repo)
        self.may_write(ask.authorization, repo)
        began = time.monotonic()
        while self.hold is not None and not self.hold():
            time.sleep(0.02)
            if time.monotonic() - began > 60:
                raise RefusedError(500, "The event that the test waits for did not happen")
        commit = self.commit_at(repo, revision)
        answers = []
        for entry in json.loads(ask.body)["files"]:
            path = entry["path"]
            large = LARGE.search(entry["path"]) or entry["size"] > 10 * 2**20
            held = commit.files.get(path)
            oid = None if held is None else (sha256(held) if large else git_sha1(held))
            if large:
                mode = "lfs"
            else:
                mode = "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def batch(self, ask, repo):
        self.may_write(ask.authorization, repo)
        objects = []
        for entry in json.loads(ask.body)["objects"]:
            oid = entry["oid"]
            size = entry["size"]
            upload = {"href": f"{self.url}/_lfs/upload/{oid}?sign=s"}
            if oid in self.objects:
                new = {}
            else:
                new = {"actions": {"upload": upload}}
            objects.append({"oid": oid, "size": size} | new)
        return {"transfer": "basic", "objects": objects}

    def upload(self, ask, oid):
        self.uploads.append(oid)
        if oid in self.expired:
            raise RefusedError(403, "Request has expired")
        if sha256(ask.body) != oid:
            raise RefusedError(400, "The body is not the file")
        self.objects[oid] = ask.body
        return {}

    def commit(self, ask, repo, revision):
        self.may_write(ask.authorization, repo)
        before = self.commit_at(repo, revision)
        files = dict(before.files)
        large = set(before.large)
        header = {}
        for line in filter(None, ask.body.split(b"\n")):
            entry = json.loads(line)
            key = entry["key"]
            value = entry["value"]
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.objects:
                    raise RefusedError(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.objects[value["oid"]]
                large.add(value["path"])
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise RefusedError(400, f"unknown operation {key}")
        repository = self.repository(repo)
        oid = hashlib.sha1(f"{repo}{len(repository.commits)}".encode()).hexdigest()
        repository.commits.append(
            Commit(oid, header["summary"], files, frozenset(large & files.keys()))
        )
        return {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}

    def information(self, ask, repo, revision="main"):
        commit = self.commit_at(repo, revision)
        return {
            "id": repo,
            "modelId": repo,
            "sha": commit.oid,
            "private": False,
            "tags": [],
            "downloads": 0,
        }

    def tree(self, ask, repo, revision, folder=None):
        commit = self.commit_at(repo, revision)
        entries = []
        for path, data in sorted(commit.files.items()):
            if folder is None or path.startswith(f"{folder}/"):
                entry = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
                if path in commit.large:
                    entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
                entries.append(entry)
        if folder is not None and not entries:
            raise RefusedError(404, f"{folder} does not exist", "EntryNotFound")
        return entries

    def resolve(self, ask, repo, revision, path):
        commit = self.commit_at(repo, revision)
        path = unquote(path)
        if path not in commit.files:
            raise RefusedError(404, "Entry not found", "EntryNotFound")
        data = commit.files[path]
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{git_sha1(data)}"'}
        if path in commit.large:
            headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        return data, 200, headers


ROUTES = [
    ("POST", "/api/repos/create", Hub.create),
    ("POST", "/api/validate-yaml", Hub.validate_card),
    ("POST", f"/api/models/{NAME}/preupload/(?P<revision>[^/]+)", Hub.preupload),
    ("POST", f"/api/models/{NAME}/commit/(?P<revision>[^/]+)", Hub.commit),
    ("POST", f"/{NAME}[.]git/info/lfs/objects/batch", Hub.batch),
    ("PUT", "/_lfs/upload/(?P<oid>[0-9a-f]+)", Hub.upload),
    ("GET", f"/api/models/{NAME}(/revision/(?P<revision>[^/]+))?", Hub.information),
    ("GET", f"/api/models/{NAME}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", Hub.tree),
    ("GET", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Hub.resolve),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self):
        path = urlsplit(self.path).path
        self.authorization = self.headers.get("Authorization")
        status = 200
        headers = {}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            result = self._route("GET" if self.command == "HEAD" else self.command, path)
            if isinstance(result, tuple):
                result, status, *more = result
                if more:
                    headers = more[0]
                else:
                    headers = {}
        except RefusedError as error:
            status = error.status
            result = {"error": str(error)}
            headers = {"X-Error-Message": str(error)} | (
                {"X-Error-Code": error.code} if error.code else {}
            )
        if isinstance(result, bytes):
            data = result
        else:
            data = json.dumps(result).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header(
            "Content-Type", "application/octet-stream" if data is result else "application/json"
        )
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815, names of the standard library

    def _route(self, method, path):
        for verb, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                return function(
                    self.hub, self, **{k: v for k, v in match.groupdict().items() if v is not None}
                )
        raise RefusedError(404, f"{method} {path} is not implemented")
