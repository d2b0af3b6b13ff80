"""What can be wrong with a server elsewhere."""

from __future__ import annotations

from pdserve.shared.errors import ClusterError, Overloaded


class EndpointUnavailable(Overloaded):
    """It has failed too often lately, so it is not asked for a while."""

    code = "endpoint_unavailable"


class EndpointFailed(ClusterError):
    """It did not answer as it should; says what it did."""

    code = "endpoint_failed"
