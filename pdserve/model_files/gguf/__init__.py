"""Models in GGUF files, as llama.cpp has them: read here, mapped, and never executed.

`container.py` reads one file, `model.py` all parts of a model. `blocks.py` decodes tensors; what
they are called is in `names.py`. `config.py` and `tokenizer.py` translate what the file says of
the model into what the checkpoints of others have in config.json and tokenizer.json.
"""
