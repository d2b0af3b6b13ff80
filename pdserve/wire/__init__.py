"""Everything that touches gRPC's wire format: generated stubs, conversion, channels, servers.

The schema is `proto/pdserve/wire`; `make proto` regenerates the stubs beside this file.
"""
