"""Reads what the nodes of a cluster have measured: GET /samples of each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import aiohttp
import msgspec

from pdserve.commands.cluster.coordinator_http import key_headers
from pdserve.measured.calibration import Drafts
from pdserve.measured.samples import DraftTally, NodeKind, NodeSamples, PullSample, StepSample
from pdserve.protocol import StepCosts
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.shared.errors import CalibrationError, ClusterError
from pdserve.shared.process.certificates import role_name

READ_S = 10.0  # between two reads of a run: a step of 1 ms is kept for thrice as long
_REPLY_S = 10.0
_ADVICE = (
    f" (if the cluster has keys, {API_KEY_VARIABLE} is one; if nodes have certificates, --tls-dir "
    "has one)"
)

T = TypeVar("T")


@dataclass(slots=True)
class Recording:
    """What some nodes measured in some time."""

    steps: dict[str, list[StepSample]] = field(default_factory=dict)  # by node, in order of time
    hosts: dict[str, str] = field(default_factory=dict)  # node |-> host id
    pulls: list[PullSample] = field(default_factory=list)
    believed: StepCosts | None = None  # by one of them, as all are alike
    tallies: dict[str, DraftTally] = field(default_factory=dict)  # of drafts, by node

    def add(self, samples: NodeSamples) -> None:
        """Add what a node has told."""
        self.steps.setdefault(samples.node_id, []).extend(samples.steps)
        self.hosts[samples.node_id] = samples.host_id
        self.pulls.extend(samples.pulls)
        self.believed = samples.believed
        self._add_drafts(samples.node_id, samples.drafts)

    def extend(self, other: Recording) -> None:
        """Add what was recorded of the same nodes later, or of others."""
        for node_id, steps in other.steps.items():
            self.steps.setdefault(node_id, []).extend(steps)
        self.hosts.update(other.hosts)
        self.pulls.extend(other.pulls)
        self.believed = other.believed
        for node_id, drafts in other.tallies.items():
            self._add_drafts(node_id, drafts)

    def right_share(self, node_id: str) -> float:
        """Return which share of a node's sampled tokens went to requests: not wrong guesses."""
        drafts = self.tallies.get(node_id, DraftTally())
        sampled = sum(step.sampled for step in self.steps.get(node_id, ()))
        return max(0.0, 1 - (drafts.drafted - drafts.accepted) / sampled) if sampled else 1.0

    @property
    def drafts(self) -> Drafts:
        """How often streams had drafts, and how often these were right."""
        tally = reduce(DraftTally.plus, self.tallies.values(), DraftTally())
        decodes = (step for steps in self.steps.values() for step in steps if step.shape.is_decode)
        num_asked = sum(step.sampled for step in decodes) - tally.drafted
        num_compared = tally.accepted + tally.wrong
        if num_asked <= 0 or not num_compared:
            return Drafts()
        return Drafts(min(1.0, tally.tried / num_asked), tally.accepted / num_compared)

    def _add_drafts(self, node_id: str, drafts: DraftTally) -> None:
        self.tallies[node_id] = self.tallies.get(node_id, DraftTally()).plus(drafts)


class NodeReader:
    """Reads the samples of the same nodes again and again, each only once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        addresses: Sequence[str],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` shows a certificate of the cluster's CA; None: its nodes have none."""
        self._session = session
        self._tls = tls
        self._newest = dict.fromkeys(addresses, 0)
        self._tallies = dict.fromkeys(addresses, DraftTally())  # of nodes, as far as was read
        self.kind: NodeKind | None = None  # of all nodes; None before the first `read`

    async def read(self) -> Recording:
        """Return what is new.

        Raises:
            ClusterError: a node does not answer.
            CalibrationError: the nodes are of several kinds.
        """
        recording = Recording()
        for read in await asyncio.gather(*map(self._read, self._newest)):
            for samples in read:
                recording.add(samples)
                self.kind = self.kind or samples.kind
                if samples.kind != self.kind:
                    raise CalibrationError(
                        f"{samples.node_id} is another kind of node than the others: calibrate "
                        "clusters of equal nodes, one after another"
                    )
        return recording

    async def during(self, run: Coroutine[None, None, T], every_s: float) -> tuple[T, Recording]:
        """Return the result of a run, and what was measured meanwhile.

        Reads every `every_s` seconds, as nodes keep only the newest steps (`SampleLog`). Raises as
        `read`, after cancelling the run.
        """
        recording, running = Recording(), asyncio.ensure_future(run)
        try:
            while not running.done():
                await asyncio.wait([running], timeout=every_s)
                recording.extend(await self.read())
            return running.result(), recording
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _read(self, address: str) -> list[NodeSamples]:
        url = f"{'https' if self._tls else 'http'}://{address}/samples"
        read: list[NodeSamples] = []
        limit = aiohttp.ClientTimeout(total=_REPLY_S)
        while True:
            after = self._newest[address]
            try:
                async with self._session.get(
                    url,
                    params={"after": after},
                    headers=key_headers(),
                    timeout=limit,
                    raise_for_status=True,
                    ssl=self._tls or True,
                    server_hostname=role_name("node") if self._tls else None,
                ) as response:
                    samples = msgspec.json.decode(await response.read(), type=NodeSamples)
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
                advice = "" if self._tls else _ADVICE
                raise ClusterError(f"cannot read {url}: {error!r}{advice}") from error
            self._newest[address] = samples.newest
            is_last = not (samples.steps or samples.pulls)
            if not (is_last and read):
                read.append(self._since_last(address, samples))
            if is_last:
                return read

    def _since_last(self, address: str, samples: NodeSamples) -> NodeSamples:
        """Return them with the drafts of this time, where nodes tell those of their lives."""
        before, self._tallies[address] = self._tallies[address], samples.drafts
        return msgspec.structs.replace(samples, drafts=samples.drafts.since(before))
