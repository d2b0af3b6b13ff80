"""The life of a request in the coordinator, from a generation to its last event.

`flow` knows all requests in flight, and is the only place where one fails or is cancelled. Read
next, in the order in which a request meets them:

    dispatcher    asks the router for nodes, and sends the `legs`: first, again, for siblings;
                  token 1 is shown to the client or held back (`showing`)
    line_keeper   serves the line of those that admission lets wait
    running       one request: its events, in order
    journey       its way through the cluster, for traces and the page
    surroundings  what a flow is given: times, nodes that may come, and its process

And what happens to those that are disturbed:

    departures    a node is lost, sick, drains or leaves its pool
    resumes       they are sent again, and go on elsewhere (`quarantine`: what nodes die of)
    moves         running streams move to another node
    claims        streams of a coordinator that is gone
"""
