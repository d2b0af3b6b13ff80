"""The decode node: pulls KV, streams tokens; prefills for itself in co-located mode.

Who runs it: `pdserve.node.services` gives `DecodeNode` (service.py) all decode legs that arrive at
a node, and the steps of the engine that they share with prefill legs.

Read first:

    service.py            the life of a request here, in four numbered steps
    intake.py             how a handed-off request is taken over, from subscription to adoption

A handed-off request passes:

    service.start         the leg becomes a Request; its intake begins
    intake.py             subscribes to its handoff; beside the prefill it is prepared
                          (pdserve/node/preparation.py); several answers to one prompt take turns
    room.py               waits for a place in the batch and for blocks, in the policy's order
    arrival.py            pulls each part as it is announced, and renews old tickets; checks that
                          the parts fit together, and holds the blocks until adopted
    (pdserve/engine)      adopts it: it joins the batch at the next step
    service.add_tokens    its tokens go to the coordinator

A leg without a source goes through preparation to the engine, as on a prefill node.

Who is next, and whether there is a place: policies/, one file per policy; local_prompts.py gives
prompts that are computed here their share of a step.
"""
