"""Runs the agent of a later host in a thread, beside the one in which steps come."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

from kv_transfer.hosts.agent import Agent
from pdserve.errors import PeerLost

log = logging.getLogger(__name__)


class AgentThread:
    """From the order to the end of the node."""

    def __init__(self, agent: Agent, listener: socket.socket, secret: bytes) -> None:
        """Wait for the node's connection for KV.

        Args:
            agent: which runs only here.
            listener: this host's, which nobody else uses meanwhile.
            secret: what the connection begins with.
        """
        self.failed = ""  # why it ended, though the connection did not break; empty: it has not
        self._agent = agent
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] = self._loop.create_task(agent.serve(listener, secret))
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)
        listener.setblocking(False)
        self._thread.start()

    def wait_bumps(self, num_bumps: int) -> None:
        """As Agent.wait_bumps."""
        self._agent.wait_bumps(num_bumps)

    def close(self) -> None:
        """End it: nothing here touches the pool any more, and the listener is as it was."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()
        self._listener.setblocking(True)

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
