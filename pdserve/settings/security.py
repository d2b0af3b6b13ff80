"""Who may join a cluster."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct


class SecurityConfig(ConfigStruct, frozen=True):
    """Who may join the cluster, and what keeps others from listening."""

    tls_dir: Annotated[
        str,
        Meta(description="directory of ca.crt, tls.crt and tls.key, for mTLS between processes"),
    ] = ""
    join_token_file: Annotated[
        str, Meta(description="file with the secret that all processes of the cluster share")
    ] = ""
    insecure: Annotated[
        bool, Meta(description="listen beyond this machine though neither of these is set")
    ] = False
