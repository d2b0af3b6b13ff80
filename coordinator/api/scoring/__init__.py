"""Rerank and score: how well documents meet a query, by one prefill each."""
