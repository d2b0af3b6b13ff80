"""Other OpenAI servers in a comparison: on the same cores, with the same model and requests.

Those that are started here are stopped (SIGSTOP) while others are measured: an idle server may
poll, and its cores are theirs then.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec

from pdserve.commands.bench.compare.runner import Candidate, Launch, ModeServer
from pdserve.commands.bench.load.client import completion_body
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.bench.serve.backend_process import running
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import StartFailed

_START_S = 600.0
_SETTLE_S = 60.0
_USUAL_LEN = 4096  # tokens, of a server that does not say


class Contestants:
    """Launches what is named among `backends` itself, and everything else as `launch` does."""

    def __init__(
        self, backends: Sequence[Backend], places: Mapping[str, str], launch: Launch
    ) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._places = places
        self._launch = launch

    @asynccontextmanager
    async def launch(
        self, candidate: Candidate, promise: Promise | None
    ) -> AsyncIterator[ModeServer]:
        """A running candidate; see `runner.Launch`."""
        backend = self._backends.get(candidate.mode)
        if backend is None:
            async with self._launch(candidate, promise) as server:
                yield server
            return
        try:
            async with running(backend, self._places, _START_S) as started:
                model = await _model_of(started.url)
                server = OtherServer(started.url, model.id, model.max_model_len, started.pid)
                try:
                    yield server
                finally:
                    server.resume()  # what is stopped does not hear that it is to end
        except StartFailed as error:
            raise ClusterError(str(error)) from error


class OtherServer:
    """Implements runner.ModeServer."""

    def __init__(self, url: str, model: str, max_model_len: int, pid: int | None) -> None:
        """`pid`: of its process group; None: it was not started here."""
        self.url = url
        self.model = model
        self.max_model_len = max_model_len or _USUAL_LEN
        self._pid = pid

    async def settle(self) -> None:
        """Wait until it answers one more request: those whose clients have left are gone then.

        Raises:
            ClusterError: it does not, for a while.
        """
        body = {**completion_body(self.model, [1], 1), "stream": False}
        body.pop("stream_options", None)
        limit = aiohttp.ClientTimeout(total=_SETTLE_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.post(f"{self.url}/v1/completions", json=body) as response,
            ):
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClusterError(f"{self.url} does not answer after a run: {error!r}") from error

    def pause(self) -> None:
        """Stop its processes while others are measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, number)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int = 0


class _Models(msgspec.Struct):
    data: list[_Model]


async def _model_of(url: str) -> _Model:
    """The first model that a server lists. Raises ClusterError."""
    try:
        async with (
            asyncio.timeout(_SETTLE_S),
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            listed = msgspec.json.decode(await response.read(), type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise ClusterError(f"cannot read the models from {url}/v1/models: {error!r}") from error
    if not listed:
        raise ClusterError(f"{url}/v1/models lists no model")
    return listed[0]
