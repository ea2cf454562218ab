"""A stand-in of the hub's HTTP API on this machine, with what is needed to make commits and to read them."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a" * 34


class Hub:
    """Repositories by name: commits in their order, each with the bytes of all its files."""

    def __init__(self) -> None:
        self.repositories: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.private: set[str] = set()
        self.refusal: int | None = None  # a status that every request is answered with
        self.silent = threading.Event()  # set, nothing is answered until it is cleared
        self.before_commit: Any = None
        self.address = ""

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Make a commit of a repository, and the repository where it is not there."""
        commits = self.repositories.setdefault(name, [])
        whole = {**(commits[-1][1] if commits else {}), **files}
        commit = hashlib.sha1(f"{name}{len(commits)}{sorted(whole)}".encode()).hexdigest()
        commits.append((commit, whole))
        return commit

    def at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories[name]
        if revision == "main":
            return commits[-1]
        return next((commit for commit in commits if commit[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Tests print nothing."""

    def _answer(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def _serve(self) -> Any:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        hub.asked.append((self.command, path))
        while hub.silent.is_set():
            threading.Event().wait(0.02)
        if hub.refusal is not None:
            return self._answer(hub.refusal, {"error": "no"}, X_Error_Message="no")
        if path == "/api/validate-yaml":
            return self._answer(200, {"warnings": [], "errors": []})
        if path.startswith("/large/"):
            hub.large[path.rpartition("/")[2]] = body
            return self._answer(200)
        writes = self.command == "POST"
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403, "", "Forbidden: pass a token that may write.")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization')}/{asked['name']}"
            if name in hub.repositories:
                message = "You already created this model repo."
                return self._answer(
                    409, {"error": message, "url": f"{hub.address}/{name}"}, X_Error_Message=message
                )
            if asked.get("visibility") == "private" or asked.get("private"):
                hub.private.add(name)
            hub.add(name, {".gitattributes": b""})
            return self._answer(200, {"url": f"{hub.address}/{name}", "name": name, "id": "0"})
        return self._of_repository(path, body)

    def _of_repository(self, path: str, body: bytes) -> Any:
        parts = path.strip("/").split("/")
        named = parts[2:4] if parts[0] == "api" else parts[:2]
        name, rest = "/".join(named).removesuffix(".git"), parts[4 if parts[0] == "api" else 2 :]
        if name not in self.hub.repositories:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        what = rest[0] if rest else "revision"
        if what == "info":
            return self._batch(json.loads(body))
        commit = self.hub.at(name, rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if what == "revision":
            files = [{"rfilename": file} for file in commit[1]]
            return self._answer(200, {"id": name, "modelId": name, "sha": commit[0], "siblings": files})
        if what == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": modes})
        if what == "commit":
            return self._commit(name, body)
        return self._file(commit, "/".join(rest[2:]))

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {**file, "actions": {"upload": {"href": f"{self.hub.address}/large/{file['oid']}"}}}
            for file in asked["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> Any:
        header, *lines = (json.loads(line) for line in body.splitlines())
        if self.hub.before_commit is not None:
            self.hub.before_commit()
        parent = header["value"].get("parentCommit")
        if parent is not None and parent != self.hub.repositories[name][-1][0]:
            return self._refuse(412, "", "A commit has happened since.")
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.large[value["oid"]]
        commit = self.hub.add(name, files)
        return self._answer(
            200, {"commitOid": commit, "commitUrl": f"{self.hub.address}/{name}/commit/{commit}"}
        )

    def _file(self, commit: tuple[str, dict[str, bytes]], path: str) -> Any:
        if path not in commit[1]:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content = commit[1][path]
        etag = hashlib.sha256(content).hexdigest()
        return self._answer(200, content, ETag=f'"{etag}"', X_Repo_Commit=commit[0])

    do_GET = do_HEAD = do_POST = do_PUT = _serve


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens on this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.silent.clear()
        server.shutdown()
        thread.join()
        server.server_close()
