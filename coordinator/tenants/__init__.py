"""Who asks: API keys, what each tenant may use, and what it has used."""

from coordinator.tenants.identity import Tenant
from coordinator.tenants.tenants import Admitted, Tenants

__all__ = ["Admitted", "Tenant", "Tenants"]
