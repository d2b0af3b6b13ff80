"""TCP as it is with a codec for every read, however small: no choice is made by measuring."""

from __future__ import annotations

import msgspec

from kv_transfer.codecs.choice import Sending
from kv_transfer.transports.catalog import TransportKind
from kv_transfer.transports.interface import Channel, Read
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tcp_server import TcpServer
from pdserve.protocol import ExporterWelcome, TransportOffer


def coded_tcp(codec: str) -> TransportKind:
    """A kind of transport, named "coded"."""

    class CodedTransport(TcpTransport):
        name = "coded"

        async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> Channel:  # type: ignore[override]
            return CodedChannel(await super().connect(offer, welcome), codec)

    return TransportKind("coded", CodedServer, CodedTransport, frozenset({"cpu"}))


class CodedServer(TcpServer):
    """Differs in its name alone."""

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """As TransportServer.start."""
        offer = await super().start(host, advertised_host, port)
        return msgspec.structs.replace(offer, name="coded")


class CodedChannel:
    """Asks for the codec in every read."""

    def __init__(self, tcp: Channel, codec: str) -> None:
        self._tcp = tcp
        self._codec = codec

    async def read(self, read: Read) -> None:
        """As Channel.read."""
        sending = read.sending or Sending()
        sending.codec = self._codec
        await self._tcp.read(msgspec.structs.replace(read, sending=sending))

    async def close(self) -> None:
        """As Channel.close."""
        await self._tcp.close()
