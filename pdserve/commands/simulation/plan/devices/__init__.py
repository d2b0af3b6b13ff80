"""`pdserve plan --devices`: which devices serve a model, and how, before anybody has bought them.

`catalogue` has the devices, `roofline` makes a calibration of what a node of some of them would
take, `sizing` counts the nodes that a load needs, `search` compares architectures, and simulates
the best. `shown` and `plot` are the answer.
"""
