#!/usr/bin/env bash
# grpcio 1.85.3: where a server ends a stream with a status while the client's asyncio stub writes,
# the client reads INTERNAL, "Internal error from Core", with no trailing metadata, and it stays so.
# The same client with nothing to write reads what the server said. So a refusal that has to be
# understood must be a message of the stream, or come before anything is written.
# Fails once no status is lost any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.3
timeout 300 "$folder/venv/bin/python" - <<'PY'
import asyncio
from collections import Counter
from contextlib import suppress

import grpc
import grpc.aio

TRIES = 100


class Refusing(grpc.GenericRpcHandler):
    def service(self, _):
        async def talk(requests, context):
            async for request in requests:
                if request == b"last":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "moved", (("to", "b"),))

        return grpc.stream_stream_rpc_method_handler(talk)


async def ending(channel, is_writing):
    """The status of a stream that the server ends, as its client sees it for good."""
    stream = channel.stream_stream("/test/Talk")()
    await stream.write(b"last")

    async def write_on():
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while is_writing:
                await stream.write(b"more")

    writer = asyncio.create_task(write_on())
    with suppress(grpc.aio.AioRpcError):
        await stream.read()
    await writer
    return (await stream.code()).name, await stream.details(), dict(await stream.trailing_metadata())


async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        seen = {
            is_writing: Counter([str(await ending(channel, is_writing)) for _ in range(TRIES)])
            for is_writing in (False, True)
        }
    await server.stop(None)
    print("grpcio", grpc.__version__)
    for is_writing, counts in seen.items():
        print("the client writes:" if is_writing else "the client waits:", dict(counts))
    said, lost = str(("UNAVAILABLE", "moved", {"to": "b"})), str(
        ("INTERNAL", "Internal error from Core", {})
    )
    assert seen[False] == {said: TRIES}, "it behaves otherwise now"
    assert seen[True][lost] > 0, "it behaves otherwise now"


asyncio.run(main())
PY
