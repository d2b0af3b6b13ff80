#!/usr/bin/env bash
# sglang-router 0.3.2 does not forward a chat as it came: it drops what it does not know (here
# `prediction`, `cache_salt`), renames `max_tokens` to `max_completion_tokens`, which a back end with
# only the older name takes for no limit, and adds fields of SGLang. A completion keeps what it has.
# Fails once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile sglang-router==0.3.2
cd "$folder"
read -r back front metrics < <("$folder/venv/bin/python" - <<'PY'
import socket

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))
PY
)
"$folder/venv/bin/python" - "$back" <<'PY' &
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Back(BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = answer

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Path(self.path.split("/")[2] + ".json").write_bytes(body)
        self.answer()


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Back).serve_forever()
PY
"$folder/venv/bin/python" -m sglang_router.launch_router --host 127.0.0.1 --port "$front" \
  --worker-urls "http://127.0.0.1:$back" --policy round_robin --log-level error \
  --prometheus-port "$metrics" --worker-startup-check-interval 1 >log 2>&1 &
timeout 120 "$folder/venv/bin/python" - "$front" <<'PY' || { cat log; exit 1; }
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def forwarded(path, **own):
    sent = {"model": "m", "max_tokens": 7, "cache_salt": "s", **own}
    request = urllib.request.Request(
        f"http://127.0.0.1:{sys.argv[1]}/v1/{path}",
        json.dumps(sent).encode(),
        {"Content-Type": "application/json"},
    )
    while True:  # until the router has found the back end
        try:
            urllib.request.urlopen(request, timeout=10).read()
            return json.loads(Path(path.split("/")[0] + ".json").read_text())
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


guess = {"type": "content", "content": "a"}
chat = forwarded("chat/completions", messages=[{"role": "user", "content": "a"}], prediction=guess)
completion = forwarded("completions", prompt="a")
print("sglang-router 0.3.2 forwards the chat as", json.dumps(chat))
print("and the completion as", json.dumps(completion))
assert not {"prediction", "cache_salt", "max_tokens"} & chat.keys(), "it behaves otherwise now"
assert chat["max_completion_tokens"] == 7, "it behaves otherwise now"
assert "separate_reasoning" in chat, "it behaves otherwise now"
assert completion["cache_salt"] == "s" and completion["max_tokens"] == 7, "it behaves otherwise now"
PY
