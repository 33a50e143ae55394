"""A server on this machine that speaks the Hugging Face Hub's protocol: model repositories made of folders.

It answers what huggingface_hub asks for: a repository at a revision, its files with sizes and hashes, heads and bytes
of files, the latter by range. `HF_ENDPOINT` points to it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass(slots=True, kw_only=True)
class Repo:
    """A repository.

    Attributes:
        files: Contents by name.
        gated: Files are for bearers of `TOKEN` only.
        cut_after: Of weight files, the first answer breaks off after so many bytes; 0: none does.
        spoil: Weight files arrive with other bytes, of the right number.
    """

    files: dict[str, bytes]
    gated: bool = False
    cut_after: int = 0
    spoil: bool = False

    @classmethod
    def of(cls, folder: Path, **settings: Any) -> Repo:
        """Takes the files of a folder."""
        return cls(files={path.name: path.read_bytes() for path in folder.iterdir()}, **settings)

    @property
    def commit(self) -> str:
        """Names what is in it."""
        return hashlib.sha1(b"".join(name.encode() + body for name, body in sorted(self.files.items()))).hexdigest()

    def described(self, name: str) -> dict[str, Any]:
        """One file as the listing has it: weights are in large file storage."""
        body = self.files[name]
        told = {"path": name, "rfilename": name, "type": "file", "size": len(body), "oid": _blob_id(body)}
        lfs = {"oid": sha256(body), "sha256": sha256(body), "size": len(body), "pointerSize": 134}
        return told | {"blobId": told["oid"]} | ({"lfs": lfs} if _is_large(name) else {})


@dataclass(slots=True, kw_only=True)
class Hub:
    """The server: what it has, where it is and what it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    url: str = ""
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        return {
            request.rpartition("/")[2]
            for request in self.requests
            if request.startswith("GET") and "/resolve/" in request
        }


def sha256(body: bytes) -> str:
    """The hash by which large files are known."""
    return hashlib.sha256(body).hexdigest()


@contextmanager
def serving(**repos: Repo) -> Iterator[Hub]:
    """Runs a server until the block ends; it has repositories `org/<keyword>`, with `-` for `_`."""
    hub = Hub(repos={f"org/{name.replace('_', '-')}": repo for name, repo in repos.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _blob_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Nothing on the test's own output."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name, asked = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        self.hub.requests.append(f"{self.command} {self.path}")
        if len(asked) < 2:
            self._json({"error": "no such page"}, HTTPStatus.NOT_FOUND)
        elif (repo := self.hub.repos.get(name)) is None:
            # The Hub tells nobody which private repositories there are.
            self._json({"error": "Repository not found"}, HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif asked[1] not in ("main", repo.commit):
            self._json({"error": "Revision not found"}, HTTPStatus.NOT_FOUND, "RevisionNotFound")
        elif api:
            files = [repo.described(each) for each in repo.files]
            self._json(files if asked[0] == "tree" else {"id": name, "sha": repo.commit, "siblings": files})
        elif repo.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "gated"}, HTTPStatus.UNAUTHORIZED, "GatedRepo")
        else:
            self._file(repo, "/".join(asked[2:]))

    def _file(self, repo: Repo, name: str) -> None:
        if name not in repo.files:
            self._json({"error": "Entry not found"}, HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        body, total = repo.files[name], len(repo.files[name])
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        self.send_header("ETag", f'"{sha256(body) if _is_large(name) else _blob_id(body)}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.hub.ranges.append(asked)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        if self.command == "GET":
            self._send(repo, name, start)

    def _send(self, repo: Repo, name: str, start: int) -> None:
        body = repo.files[name]
        if _is_large(name) and repo.spoil:
            body = bytes(len(body))
        if _is_large(name) and repo.cut_after:
            self.wfile.write(body[start : repo.cut_after])
            repo.cut_after = 0
            self.close_connection = True
        else:
            self.wfile.write(body[start:])

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK, error: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
