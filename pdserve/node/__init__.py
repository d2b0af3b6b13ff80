"""What prefill and decode nodes share. A process is both: its role is a label that may change.

Who runs it: `pdserve prefill` and `pdserve decode` (`commands/cli/node.py`) give `lives.run` the
constructors of the two services, `prefill_node.service` and `decode_node.service`.

Read first:

    runtime.py            the life of the process: listen, join, load, profile, serve, drain
    roles.py              NodeParts, what the services share; the interface of a service
    services.py           hands legs and finished steps to the service that they concern
    assembly.py           builds the parts

A request passes:

    coordinator_link.py   the stream to a coordinator: legs come in, answers go out
    services.py           checks a leg, and starts it
    preparation.py        what it waits for before the engine has it; the one cancel
    (pdserve/engine)      computes it, in steps that the role's policy plans (role_policy.py)
    legs.py               a leg as the engine's Request, and whose it is; its tokens, one message
                          per step and coordinator

Folders:

    sessions/             one node's session with another: subscriptions, tickets, queries
    prefixes/             KV of prompts' beginnings: fetched from other nodes or the host tier, and
                          given to other nodes
    start/                before anything is served: cores, model, weights
    split_cores/          multiplexed mode: both phases side by side, on shares of the cores
    device_ranks/         steps on several GPUs, and device_hosts/ on those of several hosts
    rank_hosts/           steps on the CPUs of several hosts
    profiling/            what steps cost on this machine
    memory/               the machine's memory, and the pool for KV
    reports/              what coordinators and Prometheus are told
"""
