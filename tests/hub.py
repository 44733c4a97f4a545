"""A Hub on this machine: serves repositories over HTTP, takes uploads, and counts what is asked of it."""

import base64
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
from huggingface_hub import constants

TOKEN = "hf_of_the_test"


class Hub:
    """Repositories by id, each with revisions, each a mapping of paths to contents; `private` ones need the token."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.downloads: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.commits: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, directory: Path, revision: str = "main", under: str = "") -> None:
        """Publish the files of `directory`, in the folder `under`."""
        files = self.repositories.setdefault(name, {}).setdefault(revision, {})
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                files[f"{under}/{path.relative_to(directory)}".lstrip("/")] = path.read_bytes()

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def commit_of(files: dict[str, bytes]) -> str:
        """The hash that stands for the contents of a revision."""
        return hashlib.sha1(
            repr(sorted((path, hashlib.sha1(data).digest()) for path, data in files.items())).encode()
        ).hexdigest()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def json(self, value: Any) -> None:
                self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

            def files(self, name: str, revision: str) -> dict[str, bytes] | None:
                """The files of a revision, or an answer that says why there are none."""
                repository = hub.repositories.get(name)
                if repository is None or (
                    name in hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"
                ):
                    self.answer(401, X_Error_Code="RepoNotFound")
                    return None
                for branch, files in repository.items():
                    if revision in (branch, hub.commit_of(files)):
                        return files
                self.answer(404, X_Error_Code="RevisionNotFound")
                return None

            def do_GET(self) -> None:
                with hub.lock:
                    hub.requests[self.command] += 1
                if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(/revision/([^/?]+))?(\?.*)?", self.path):
                    files = self.files(match[1], match[3] or "main")
                    if files is not None:
                        siblings = [{"rfilename": path} for path in files]
                        self.json({"id": match[1], "sha": hub.commit_of(files), "siblings": siblings})
                elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+).*", self.path):
                    files = self.files(match[1], match[2])
                    if files is not None:
                        self.json(
                            [
                                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                                for path, data in files.items()
                            ]
                        )
                elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
                    files = self.files(match[1], match[2])
                    if files is None:
                        return
                    headers = {"X_Repo_Commit": hub.commit_of(files)}
                    if match[3] not in files:
                        self.answer(404, X_Error_Code="EntryNotFound", **headers)
                        return
                    body = files[match[3]]
                    if self.command == "GET":
                        with hub.lock:
                            hub.downloads[match[3]] += 1
                    self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', **headers)
                else:
                    self.answer(404, X_Error_Code="EntryNotFound")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer(401)
                elif self.path == "/api/repos/create":
                    name = json.loads(body)["name"]
                    name = name if "/" in name else f"somebody/{name}"
                    organization = json.loads(body).get("organization")
                    name = f"{organization}/{name.split('/')[-1]}" if organization else name
                    hub.repositories.setdefault(name, {}).setdefault("main", {})
                    self.json({"url": f"{hub.endpoint}/{name}"})
                elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", self.path):
                    files = json.loads(body)["files"]
                    self.json(
                        {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
                    )
                elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/?]+)(\?.*)?", self.path):
                    lines = [json.loads(line) for line in body.splitlines() if line]
                    files = hub.repositories[match[1]].setdefault(match[2], {})
                    with hub.lock:
                        for line in lines:
                            if line["key"] == "file":
                                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                        summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
                        hub.commits.append({"repository": match[1], "revision": match[2], "summary": summary})
                    sha = hub.commit_of(files)
                    self.json({"commitUrl": f"{hub.endpoint}/{match[1]}/commit/{sha}", "commitOid": sha})
                elif self.path.startswith("/api/validate-yaml"):
                    self.json({"errors": [], "warnings": []})
                else:
                    self.answer(404)

        return Handler


@contextmanager
def online(endpoint: str) -> Iterator[None]:
    """Within, this process talks to that endpoint, as a process does that is started with HF_ENDPOINT.

    It does not ask for pickles to be converted, which a service beside the Hub does.
    """
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    names = {
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    with (
        mock.patch.multiple(constants, **names),
        mock.patch.object(huggingface_hub.hf_api.api, "endpoint", endpoint),
        mock.patch.dict(os.environ, {"DISABLE_SAFETENSORS_CONVERSION": "1"}),
    ):
        huggingface_hub.utils._http.close_session()
        try:
            yield
        finally:
            huggingface_hub.utils._http.close_session()
