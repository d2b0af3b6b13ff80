"""Servers elsewhere that speak OpenAI's API, and may be the last tier of a cascade."""
