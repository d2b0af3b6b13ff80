"""The table of all operations: one row per route."""

from __future__ import annotations

from coordinator.api.openapi.generating import GENERATING
from coordinator.api.openapi.informing import INFORMING
from coordinator.stateful.operations import STORED

OPERATIONS = (*GENERATING, *STORED, *INFORMING)
