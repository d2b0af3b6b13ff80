"""A Ray cluster of some machines, all of them here.

    python -m tests.cluster.commands.ray_machines NUMBER PORT

It has a process of its own, since Ray takes over the signals of the one that starts it. It prints
the address of the cluster and the process id of each machine's Ray, the head's first; loses the
machine whose process id it reads, and ends all of them when there is no more to read.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster


def main(num_machines: int, client_port: int) -> None:
    """Run the machines; those who are on none of them can reach the head at `client_port`."""
    cluster = Cluster()
    try:
        machines = {}
        for number in range(num_machines):
            only_head = {} if number else {"ray_client_server_port": client_port}
            machine = cluster.add_node(
                **only_head,
                node_ip_address="127.0.0.1",
                num_cpus=1,
                num_gpus=0,
                memory=2**30,
                object_store_memory=2**27,
                include_dashboard=False,
            )
            (raylet,) = machine.all_processes["raylet"]
            machines[raylet.process.pid] = machine
        sys.stdout.write(json.dumps([cluster.address, *machines]) + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            cluster.remove_node(machines[int(line)], allow_graceful=False)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
