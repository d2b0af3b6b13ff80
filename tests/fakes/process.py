"""A stand-in for `pdserve coordinator|prefill|decode`: same flags, same /status, no model.

A node attaches to the coordinator's "gRPC" port by a connection on which it sends its status as
JSON lines. What `--model` names decides how a node behaves; see `Node.run`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys

from pdserve.protocol.status import STATUS_VERSION
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.flags import FlagParser, add_flags, config_from
from pdserve.shared.process.limited_child import die_with_parent

COUNTS = (
    "num_blocks",
    "free_blocks",
    "cached_blocks",
    "pinned_blocks",
    "queued_tokens",
    "running_requests",
    "waiting_requests",
    "step_time_ms",
)
METRICS = """\
# TYPE pdserve_pulls_total gauge
pdserve_pulls_total 3.0
# TYPE pdserve_pulled_bytes_total gauge
pdserve_pulled_bytes_total 2097152.0
# TYPE pdserve_pull_seconds_total gauge
pdserve_pull_seconds_total 0.0015
"""


class Coordinator:
    def __init__(self, config):
        self.config = config
        self.nodes = {}  # writer |-> status

    async def run(self):
        await asyncio.start_server(
            self.http, self.config.host, self.config.port, ssl=https(self.config.access.https_dir)
        )
        await asyncio.start_server(self.attach, self.config.nodes_host, self.config.grpc_port)
        print("the fake coordinator listens")  # noqa: T201
        await asyncio.Event().wait()

    async def attach(self, reader, writer):
        while line := await reader.readline():
            self.nodes[writer] = json.loads(line)
        self.nodes.pop(writer, None)
        writer.close()

    def status(self):
        ready = {node["role"] for node in self.nodes.values() if node["state"] == "ready"}
        needed = {"decode"} if self.config.mode == "colocated" else {"prefill", "decode"}
        return {
            "version": STATUS_VERSION,
            "model": "fake-model",
            "mode": self.config.mode,
            "ready": needed <= ready,
            "inflight": 0,
            "nodes": list(self.nodes.values()),
        }

    async def http(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /status "):
            reply(writer, json.dumps(self.status()), "application/json")
        elif head.startswith("POST /v1/chat/completions "):
            names = {node["role"]: node["node_id"] for node in self.nodes.values()}
            extra = "".join(
                f"x-pdserve-{role}-node: {name}\r\n" for role, name in sorted(names.items())
            )
            reply(writer, sse(["A ", "fake ", "answer."]), "text/event-stream", extra)
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()


def https(directory):
    if not directory:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{directory}/tls.crt", f"{directory}/tls.key")
    return context


def sse(words):
    chunks = [{"choices": [{"delta": {"content": word}, "finish_reason": None}]} for word in words]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(words)}})
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events)


def reply(writer, text, content_type, extra=""):
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nConnection: close\r\n{extra}"
        f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    )


class Node:
    def __init__(self, role, config):
        self.role = role
        self.config = config

    async def run(self):
        behaviour = self.config.checkpoint.model
        if behaviour == "bad":
            await self.dial()  # the coordinator has been heard by then
            print(f"pdserve {self.role}: error: no checkpoint at bad", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        if behaviour == "unprepared":  # as a process is at first
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if behaviour == "deaf":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "what?")
        metrics = await asyncio.start_server(self.metrics, "127.0.0.1", 0)
        port = metrics.sockets[0].getsockname()[1]
        while True:
            reader, writer = await self.dial()
            self.send(writer, port, "loading", 0.4)
            if behaviour != "stuck":
                self.send(writer, port, "ready", 1.0)
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the coordinator is gone

    async def dial(self):
        host, port = self.config.coordinators[0].rsplit(":", 1)
        while True:
            try:
                return await asyncio.open_connection(host, int(port))
            except ConnectionError:  # refused; or reset: it was the last one that it let in
                await asyncio.sleep(0.02)

    def send(self, writer, metrics_port, state, progress):
        status = dict.fromkeys(COUNTS, 0)
        status |= {
            "node_id": self.config.node_id,
            "role": self.role,
            "state": state,
            "loading_progress": progress,
            "incarnation": str(os.getpid()),
            "session_address": "127.0.0.1:1",
            "metrics_address": f"127.0.0.1:{metrics_port}",
        }
        writer.write(json.dumps(status).encode() + b"\n")

    async def metrics(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        reply(writer, METRICS if self.role == "decode" else "", "text/plain")
        await writer.drain()
        writer.close()


def main():
    kind, *flags = sys.argv[1:]
    struct = CoordinatorConfig if kind == "coordinator" else NodeConfig
    parser = FlagParser(prog=f"fake {kind}")
    add_flags(parser, struct)
    parser.add_argument("--die-with-parent", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(flags)
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    config = config_from(struct, arguments)
    process = Coordinator(config) if kind == "coordinator" else Node(kind, config)
    asyncio.run(process.run())


if __name__ == "__main__":
    main()
