"""A real model beside transformers and llama.cpp: `make real`, outside CI.

It fetches Gemma 3 270M, serves it in two modes, holds tokens, log-probabilities and perplexity to
transformers in float32, measures speed beside llama.cpp, and writes docs/MEASUREMENTS.md's section.
"""
