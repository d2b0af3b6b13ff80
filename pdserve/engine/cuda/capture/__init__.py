"""What is captured as CUDA graphs: steps of decodes, and steps with prompts in pieces."""
