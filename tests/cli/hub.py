"""A Hugging Face Hub of the test's own, over HTTP: one repository, whole or cut files, ranges, hashes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """`files` of the repository `name`. `cut`: the first answer with this file ends after so many bytes. `wrong`: files
    whose bytes arrive changed. `served` lists (file, first byte) of every download."""

    name: str
    files: dict[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    served: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    def about(self) -> bytes:
        siblings = [
            {
                "rfilename": name,
                "size": self.sizes.get(name, len(data)),
                "blobId": _git(data),
                **({"lfs": {"sha256": _sha(data), "size": len(data), "pointerSize": 1}} if _is_lfs(name) else {}),
            }
            for name, data in self.files.items()
        ]
        return json.dumps({"id": self.name, "sha": COMMIT, "siblings": siblings, "private": False}).encode()

    def tree(self) -> bytes:
        entries = [
            {
                "type": "file",
                "path": name,
                "size": self.sizes.get(name, len(data)),
                "oid": _git(data),
                **({"lfs": {"oid": _sha(data), "size": len(data), "pointerSize": 1}} if _is_lfs(name) else {}),
            }
            for name, data in self.files.items()
        ]
        return json.dumps(entries).encode()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """`hub.url` answers inside."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{hub.name}/tree/"):
                self._send(200, {"Content-Type": "application/json"}, hub.tree() if body else b"")
            elif path.startswith(f"/api/models/{hub.name}"):
                self._send(200, {"Content-Type": "application/json"}, hub.about() if body else b"")
            elif match := re.fullmatch(rf"/{hub.name}/resolve/[^/]+/(.+)", path):
                self._file(match[1], body)
            else:
                self._send(404, {"X-Error-Code": "RepoNotFound"}, b"")

        def _file(self, name: str, body: bool) -> None:
            if name not in hub.files:
                self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
                return
            data = hub.files[name]
            etag = _sha(data) if _is_lfs(name) else _git(data)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if _is_lfs(name):
                headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            sent = bytes(len(data)) if name in hub.wrong else data
            if body:
                hub.served.append((name, start))
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if asked else 200, headers, sent[start:], body, hub.cut.pop(name, None) if body else None)

        def _send(
            self, status: int, headers: dict[str, str], data: bytes, body: bool = True, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
