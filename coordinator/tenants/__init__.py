"""Tenants: their API keys, their limits, and their usage."""

from coordinator.tenants.identity import Tenant
from coordinator.tenants.readers import Readers
from coordinator.tenants.tenants import Admitted, Tenants

__all__ = ["Admitted", "Readers", "Tenant", "Tenants"]
