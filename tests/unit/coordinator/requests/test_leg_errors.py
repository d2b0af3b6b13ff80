"""What clients are told when a node has failed: nothing of nodes, addresses or other requests."""

from __future__ import annotations

import pytest

from coordinator.api.server.errors import describe
from coordinator.requests.legs import error_of
from pdserve.protocol import LegFailed
from pdserve.shared import errors
from pdserve.shared.errors import PdserveError

INNER = "prefill-0 at ipv4:10.1.2.3:7001: no transport to 'decode-1@f00d'"
ABOUT_THE_REQUEST = (
    errors.RequestError,
    errors.DeadlineExceeded,
    errors.GrammarFailed,
    errors.NoTokenLeft,
)


def tree(root: type[PdserveError]) -> list[type[PdserveError]]:
    return [root, *(found for cls in root.__subclasses__() for found in tree(cls))]


def failed(code: str, message: str) -> PdserveError:
    return error_of(LegFailed(request_id="r", code=code, message=message))


@pytest.mark.parametrize("cls", tree(PdserveError))
def test_only_what_is_about_the_request_itself_is_passed_on(cls: type[PdserveError]) -> None:
    error = failed(cls.code, INNER)
    assert error.code == cls.code
    reply = describe(error, "req-1", 1)
    is_shown = INNER in reply.body.decode()
    assert is_shown == issubclass(cls, ABOUT_THE_REQUEST)
    for name in ("prefill-0", "10.1.2.3", "decode-1"):
        assert (name in reply.detail.message) == is_shown


def test_an_unknown_code_is_an_internal_error() -> None:
    assert describe(failed("of a newer node", INNER), "req-1", 1).status == 500


def test_what_can_be_tried_again_says_so() -> None:
    for cls in (errors.PeerLost, errors.StaleTicket, errors.NoNodeAvailable):
        assert "again" in describe(failed(cls.code, INNER), "req-1", 1).detail.message
