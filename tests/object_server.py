"""A web server of files, or before an S3 server, that is slow, breaks off, or does damage."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import pytest

BUCKET = "bucket"
_CREDENTIAL = "AWS4-HMAC-SHA256 Credential=key/20261129/us-east-1/s3/aws4_request"
Answer: TypeAlias = tuple[int, dict[str, str], bytes]


class BadServer(ThreadingHTTPServer):
    """Counts requests, and does to answers what a test says. Serves what is in `files`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https"  # of addresses by which a test asks for what is here
        self.files: dict[str, bytes] = {}  # by path
        self.requests: list[tuple[str, str]] = []
        self.starts: list[int] = []  # of answers that begin within a file
        self.most_bytes: int | None = None  # of an answer's body; then the connection breaks
        self.most_gets: int | None = None  # of one file; later ones break before they answer
        self.num_silent = 0  # first answers of a file that say no more after `most_bytes`
        self.is_over = threading.Event()  # what they wait for
        self.is_down = False
        self.gate = threading.Event()  # what answers wait for
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def num_gets(self, name: str) -> int:
        return sum(method == "GET" and name in path for method, path in self.requests)

    def put(self, name: str, data: bytes) -> None:
        self.files[f"/{BUCKET}/{name}"] = data

    def put_folder(self, folder: Path, name: str) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{name}/{file.relative_to(folder)}", file.read_bytes())

    def answer(self, method: str, path: str, headers: dict[str, str], _: bytes) -> Answer:
        data = self.files.get(path)
        if data is None:
            return 404, {}, b""
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        if headers.get("if-match", etag) != etag:
            return 412, {}, b""
        found = {"etag": etag, "last-modified": "Sun, 29 Nov 2026 00:00:00 GMT"}
        start = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        if int(start) == 0:
            return 200, found, data
        found["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return 206, found, data[int(start) :]


class S3(BadServer):
    """Passes everything on to an S3 server."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def put(self, name: str, data: bytes) -> None:
        import obstore

        from pdserve.model_files.objects.opening import open_store

        obstore.put(open_store(f"s3://{BUCKET}"), name, data)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        upstream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        if method in ("GET", "HEAD"):  # who asks as of Google's has no credentials here
            headers = {"authorization": _CREDENTIAL} | headers
        upstream.request(method, path, body, headers)
        found = upstream.getresponse()
        data = found.read()
        kept = {key.lower(): value for key, value in found.getheaders()}
        upstream.close()
        if method == "HEAD":
            data = bytes(int(kept.get("content-length", 0)))
        return found.status, kept, data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BadServer

    def _answer(self) -> None:
        server = self.server
        asked = self.command, unquote(self.path)
        server.requests.append(asked)
        assert server.gate.wait(20)
        num_gets, most = server.requests.count(("GET", asked[1])), server.most_gets
        if server.is_down or (most is not None and num_gets > most):
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {key.lower(): value for key, value in self.headers.items()}
        status, found, data = server.answer(self.command, self.path, headers, body)
        if status == 206:
            server.starts.append(int(found["content-range"].split()[1].partition("-")[0]))
        self.send_response(status)
        for key, value in found.items():
            if key not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(key, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        is_file = self.command == "GET" and "list-type" not in self.path and status < 300
        if is_file and server.most_bytes is not None and len(data) > server.most_bytes:
            self.wfile.write(data[: server.most_bytes])
            if num_gets <= server.num_silent:
                server.is_over.wait(60)
            self.close_connection = True
        else:
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def running(server: BadServer) -> Iterator[BadServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadServer]:
    """A server with an empty bucket, which the environment names: for s3://, and for gs://.

    Google's XML API is that of S3, as far as models and prefixes go.
    """
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    try:
        with running(S3(port)) as server:
            environment = {
                "AWS_ENDPOINT_URL": server.url,
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1",
                "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(
                    {
                        "gcs_base_url": server.url,
                        "disable_oauth": True,
                        "client_email": "",
                        "private_key": "",
                        "private_key_id": "",
                    }
                ),
            }
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            server.answer("POST", "/moto-api/reset", {}, b"")  # one process has one state
            server.answer("PUT", f"/{BUCKET}", {}, b"")
            yield server
    finally:
        moto.stop()
