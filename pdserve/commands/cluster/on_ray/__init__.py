"""The processes of a cluster on the machines of a Ray cluster; only this imports Ray."""
