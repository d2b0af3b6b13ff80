"""PostgreSQL tables in which the coordinators of one cluster share what they store.

`tables` has the schema and the statements, `link` the connections. `entries` is what the store
writes to (`writes`) and looks at; `membership` says which coordinators live, so that what a dead
one was making is made by another; `remote_log` reads the events of a response made elsewhere.
"""
