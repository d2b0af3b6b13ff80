"""Adapters of a model: which there are, under which names, and which nodes have them.

    known.py      the versions that names stand for, and those that they stood for
    bounds.py     how many there may be, of whom, and under which names
    orders.py     orders to nodes, and their answers
    life.py       load, serve, unload; nodes that join; adapters that no node has now
    table.py      the names in the database, for the next process and for other coordinators
    generator.py  generates with one version

A version is known by its digest, and each request names that of the version it began with. So a
name that is loaded again or unloaded changes nothing for what runs, and no node can compute a
request with anything else.
"""
