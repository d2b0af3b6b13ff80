"""The models that a coordinator serves: a catalogue of them, and the nodes of each.

`Model` is what the API knows of a model, `ModelCluster` who computes for it. What is shared by all
models (tenants, bounds, bodies, stored answers, HTTP) is not here.
"""
