"""Runs the agent of a later host in a thread, beside the one in which steps come."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from concurrent.futures import Future

from kv_transfer.hosts.agent import Agent
from pdserve.shared.errors import PeerLost

log = logging.getLogger(__name__)


class AgentThread:
    """From the order to the end of the node."""

    def __init__(self, agent: Agent, kv: Future[socket.socket]) -> None:
        """Wait for `kv`, the node's connection for it. The agent runs only here."""
        self.failed = ""  # why it ended, though the connection did not break; empty: it has not
        self._agent = agent
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] = self._loop.create_task(self._serve(kv))
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)
        self._thread.start()

    def wait_bumps(self, num_bumps: int) -> None:
        """As Agent.wait_bumps."""
        self._agent.wait_bumps(num_bumps)

    def close(self) -> None:
        """End it: nothing here touches the pool any more."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    async def _serve(self, kv: Future[socket.socket]) -> None:
        await self._agent.serve(await asyncio.wrap_future(kv))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except PeerLost as error:
            log.info("the connection for KV has ended: %s", error)
        except Exception as error:
            log.exception("the agent for KV has failed")
            self.failed = f"its agent for KV has failed: {error!r}"
        finally:
            self._agent.over()
