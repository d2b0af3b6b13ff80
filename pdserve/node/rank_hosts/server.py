"""`pdserve rank`: a further host of a node. It serves one node after another, until SIGTERM.

That kills it, whatever it waits for: it has nothing to put in order, and its ranks end with it.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from contextlib import closing, suppress

from kv_transfer.memory import ExportedPool
from kv_transfer.transports.tls import NodeTls
from pdserve import _native
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.ranks.processes import wait_ready
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.node.device_hosts.serving import serve_devices
from pdserve.node.rank_hosts.adapters import HostAdapters
from pdserve.node.rank_hosts.door import Door, ServedNode
from pdserve.node.rank_hosts.messages import HostAnswer, failure
from pdserve.node.rank_hosts.ordered_model import model_of
from pdserve.node.rank_hosts.stand_in import StandIn
from pdserve.node.start.cores import CorePlan, plan_cores, use_service_cores
from pdserve.node.start.model import packed_cache
from pdserve.node.start.ranks import start_ranks
from pdserve.settings.rank_host import RankHostConfig
from pdserve.shared.addresses import format_address, why_not_bound
from pdserve.shared.errors import PdserveError, PeerLost
from pdserve.shared.process.may_pass import config_error
from pdserve.wire.security import Security, check_exposure

log = logging.getLogger(__name__)


def run(config: RankHostConfig) -> None:
    """Listen, and serve.

    Raises:
        PdserveError: it cannot start; says why.
    """
    check_exposure(config.security, config.host)
    security = Security.of(config.security)
    named = config.checkpoint
    checkpoint = resolve_checkpoint(named.model or str(CHECKPOINT_PATH), named.revision)
    tls = None if security.tls_dir is None else NodeTls(security.tls_dir)
    # Once: afterwards, this process may use only those of its services.
    cores = plan_cores(config.engine, sorted(os.sched_getaffinity(0)))
    use_service_cores(cores)
    with closing(Door(_listen(config), security.token, tls)) as door:
        while True:
            gc.collect()  # the last node's KV, which the next one needs the memory for
            node = door.next_node()
            try:
                _serve(config, cores, node, security, checkpoint, tls)
            except PeerLost as error:
                log.info("the node at %s has ended: %s", node.peer, error)
            except (PdserveError, _native.RanksLost, OSError, ValueError) as error:
                log.error("the node at %s cannot go on: %s", node.peer, error)
                with suppress(PeerLost):
                    node.stream.send(failure(node.order, str(error)))
            finally:
                node.stream.close()


def _listen(config: RankHostConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        address = format_address(config.host, config.port)
        what = f"cannot listen on {address}: {why_not_bound(error)}"
        raise config_error(what, error) from error
    log.info("listens on %s", format_address(config.host, listener.getsockname()[1]))
    return listener


def _serve(
    config: RankHostConfig,
    cores: CorePlan,
    node: ServedNode,
    security: Security,
    checkpoint: Checkpoint,
    tls: NodeTls | None,
) -> None:
    """Load what the node asks for, and compute its steps until it ends."""
    order, stream = node.order, node.stream
    if order.devices is not None:
        serve_devices(config, cores, node, order.devices, checkpoint, tls)
        return
    model = model_of(order, checkpoint)
    log.info("ranks from %d on: %s", order.part.num_before, cores.describe())
    pool = ExportedPool(order.num_blocks, model.layout.block_bytes, is_sealed=False)
    cache = packed_cache(config.engine)
    ranks = start_ranks(model, cores, pool, cache, security)
    adapters = HostAdapters(node, ranks.adapters)

    def check_node() -> None:
        if not stream.is_silent(0.0):
            raise PeerLost("it did not wait until this host was ready")

    try:
        ranks.wait_mapped()
        steps = StepMemory(ranks.processes.memory, 0, ranks.processes.stages)
        steps.group.say_ready()
        wait_ready(steps.group, check_node, ranks.processes)
        stream.send(HostAnswer())
        log.info("ready")
        sizes = model.config.hidden_size, model.config.vocab_size
        StandIn(stream, ranks.processes, pool, model.layout, sizes, model.first_layer).run()
    finally:
        ranks.close()
        adapters.close()
        pool.close()
