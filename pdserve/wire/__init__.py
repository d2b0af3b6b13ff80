"""gRPC: generated stubs, conversion of messages, channels and servers.

The schema is in `proto/pdserve/wire`; `make proto` regenerates the stubs in this directory.
"""
