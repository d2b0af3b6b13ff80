"""`pdserve bench serve`: any OpenAI-compatible servers, in turns under the same load."""
