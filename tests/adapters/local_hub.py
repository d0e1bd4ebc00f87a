"""A fake Hugging Face Hub on loopback: repositories, branches, commits, downloads.

It implements the part of the HTTP API that huggingface_hub uses to create a repository, to upload
a commit (small files inline, large files through LFS), and to download a snapshot.
`LocalHub.requests` records the requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

# Suffixes of files that are stored through LFS.
LARGE = (".safetensors",)


@dataclass
class Repository:
    """Repository of commits with all their files; a branch points to a commit."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        known = self.commits.get(self.branches.get(branch, ""), {})
        files = {**known, **files}
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None


class LocalHub:
    """State of the server.

    Attributes:
        token: required for writing and for private repositories.
        repositories: "owner/name" -> repository.
        requests: "METHOD path", in order.
    """

    def __init__(self, token: str):
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.url = ""


Reply = tuple[int, Any, dict[str, str]]


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, verb: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{verb} {unquote(path)}")
        status, content, headers = self._route(verb, path, body)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if verb != "HEAD":
            self.wfile.write(data)

    def _route(self, verb: str, path: str, body: bytes) -> Reply:
        routes: list[tuple[str, str, Callable[..., Reply]]] = [
            ("POST", r"/api/validate-yaml", self._validate),
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", self._branch),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._lfs_batch),
            ("PUT", r"/lfs/([0-9a-f]+)", self._lfs_put),
            ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            ("GET|HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ]
        for verbs, pattern, answer in routes:
            match = re.fullmatch(pattern, path)
            if match and verb in verbs.split("|"):
                parts = [None if part is None else unquote(part) for part in match.groups()]
                return answer(*parts, body)
        return 404, {"error": f"no such address: {path}"}, {}

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        return found if found is not None and (self._known or not found.private) else None

    def _missing(self, code: str = "RepoNotFound") -> Reply:
        return 404, {"error": code}, {"X-Error-Code": code}

    def _validate(self, body: bytes) -> Reply:
        return 200, {"errors": [], "warnings": []}, {}

    def _create(self, body: bytes) -> Reply:
        if not self._known:
            return 401, {"error": "a token that may write is needed"}, {}
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repositories:
            return 409, {"error": "You already created this model repo", **url}, {}
        # The field depends on the version of the client.
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        repository = Repository(private)
        repository.commit("main", {".gitattributes": b""})
        self.hub.repositories[name] = repository
        return 200, url, {}

    def _branch(self, name: str, branch: str, body: bytes) -> Reply:
        repository = self._repository(name)
        if repository is None or not self._known:
            return self._missing()
        if branch in repository.branches:
            return 409, {"error": "the branch exists"}, {}
        repository.branches[branch] = repository.branches["main"]
        return 200, {}, {}

    def _preupload(self, name: str, revision: str, body: bytes) -> Reply:
        if self._repository(name) is None or not self._known:
            return self._missing()
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": files}, {}

    def _lfs_batch(self, name: str, body: bytes) -> Reply:
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}
            # Stored objects need no upload.
            there = item["oid"] in self.hub.large
            objects.append(item if there else {**item, "actions": {"upload": upload}})
        answer = {"transfer": "basic", "objects": objects}
        return 200, answer, {"Content-Type": "application/vnd.git-lfs+json"}

    def _lfs_put(self, oid: str, body: bytes) -> Reply:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "other contents than announced"}, {}
        self.hub.large[oid] = body
        return 200, {}, {}

    def _commit(self, name: str, branch: str, body: bytes) -> Reply:
        repository = self._repository(name)
        if repository is None or not self._known:
            return self._missing()
        if branch not in repository.branches:
            return self._missing("RevisionNotFound")
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        oid = repository.commit(branch, files)
        url = f"{self.hub.url}/{name}/commit/{oid}"
        return 200, {"commitUrl": url, "commitOid": oid, "pullRequestUrl": None}, {}

    def _info(self, name: str, revision: str | None, body: bytes) -> Reply:
        repository = self._repository(name)
        if repository is None:
            return self._missing()
        found = repository.find(revision or "main")
        if found is None:
            return self._missing("RevisionNotFound")
        files = [{"rfilename": path} for path in sorted(repository.commits[found])]
        info = {"id": name, "modelId": name, "sha": found, "siblings": files}
        return 200, {**info, "private": repository.private, "tags": [], "downloads": 0}, {}

    def _tree(self, name: str, revision: str, body: bytes) -> Reply:
        repository = self._repository(name)
        if repository is None:
            return self._missing()
        found = repository.find(revision)
        if found is None:
            return self._missing("RevisionNotFound")
        entries = []
        for path, content in sorted(repository.commits[found].items()):
            oid = hashlib.sha256(content).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
            entry["oid"] = oid[:40]
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
            entries.append(entry)
        return 200, entries, {}

    def _resolve(self, name: str, revision: str, path: str, body: bytes) -> Reply:
        repository = self._repository(name)
        if repository is None:
            return self._missing()
        found = repository.find(revision)
        if found is None:
            return self._missing("RevisionNotFound")
        content = repository.commits[found].get(path)
        if content is None:
            status, error, headers = self._missing("EntryNotFound")
            return status, error, {**headers, "X-Repo-Commit": found}
        etag = hashlib.sha256(content).hexdigest()
        etag = etag if path.endswith(LARGE) else etag[:40]
        return 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": found}


def closed_port() -> str:
    """Return the URL of a loopback port that refuses connections, as of a Hub that is down."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@contextmanager
def local_hub(token: str = "hf_local") -> Iterator[LocalHub]:
    """Run a hub for the duration of the context."""
    hub = LocalHub(token)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
