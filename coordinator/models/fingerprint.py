"""What answers are computed by, in one word that clients can compare: `system_fingerprint`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pdserve import __version__

_NAMED_CHARACTERS = 8  # of a revision: as many as tell them apart, and as `pdserve revisions` takes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprints of one served model."""

    model: str

    def of(self, revision: str) -> str:
        """Return that of one revision, whose first characters it has; empty: not known yet."""
        parts = (self.model, __version__, revision)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
        return f"fp_{revision[:_NAMED_CHARACTERS]}_{digest}" if revision else f"fp_{digest}"
