"""Drafts: tokens that a stream may say next, computed in one step, and kept where they are right.

A token is a function of logits, parameters, seed, position and what came before. So each row behind
a draft draws the very token that the stream would have drawn there, and what is right is known by
comparing: whatever the options, tokens are those of one token a step.
"""
