"""The models that can be served: one decoder architecture, parameterised by config.json.

config.json is read by `config.py` with the help of `families.py` (what each architecture fixes),
`rope_config.py` and `json_fields.py`, all without torch. The plan (`pdserve/engine/plan`) follows
from it; `parameters.py` allocates what that lists. `decoder.py` is the interface that the compute
backends implement.
"""
