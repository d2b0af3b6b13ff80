"""UCX, through NIXL. The puller's end is puller.py, the exporter's server.py."""
