"""Trains the demo model that comes with pdserve: `make demo-model`.

`corpus` mixes the text that the `skills/` generate, `tokenizer` is learned from it, `train` fits
the model and writes its checkpoint to `pdserve/demo_model/checkpoint`. None of this is installed.
"""
