"""The prefill node: turns prompts into KV and token 1, and holds the KV until it is pulled.

Who runs it: `pdserve.node.services` gives `PrefillNode` (service.py) all prefill legs that arrive
at a node, and the steps of the engine that they share with decode legs.

Read first:

    service.py      the life of a request here, in four numbered steps
    handoffs.py     all handoffs, from the first chunk until settled, and what may end them

A request passes:

    service.start         the leg becomes a Request; its handoff is opened
    (node/preparation)    its prefix is fetched where that is cheaper, its grammar compiled
    policies/             when it is begun, and with how many tokens a step: one file per policy
    service.step_done     after each chunk: handoffs.py announces its complete blocks,
    service.layers_done   during a large chunk, layer by layer
    service.add_tokens    token 1 goes to the coordinator at once
    handoffs.publish      the record goes to the decode node, with the last ticket
    handoffs.settle       the decode node has pulled: the blocks are free

The KV of one request:

    handoff.py      references to its blocks, and tickets for them; who is told of it, its lease
"""
