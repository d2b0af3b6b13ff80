"""Pools in several parts, some of which are on other hosts than the node.

The node has sessions, tickets, leases and block tables for all parts. What touches a part's memory
is on its host: an `Agent` there serves it to pullers, pulls into it, and keeps its host tier, as
the node says over one connection (`far_host.py` is the node's end). So KV goes from GPU to GPU, and
never by way of the node.

    far_host.py       one later host, as the node sees it
    part_elsewhere.py its part of the pool
    agent.py          what it asks of an agent, and what becomes of it
    messages.py       what they say to each other
    conversation.py   how they say it
"""
