"""The models that can be served: one decoder architecture, parameterised by config.json.

config.json is read by `config.py` with the help of `families.py` (what each architecture fixes),
`rope_config.py` and `json_fields.py`, all without torch. `parameters.py` lays the weights out in
memory; `decoder.py` is the interface that the compute backends implement.
"""
