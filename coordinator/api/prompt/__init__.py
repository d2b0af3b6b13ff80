"""From a request's text, chat or token ids to the tokens of its prompts.

`chat` renders a conversation, `parameter` reads the four forms of a prompt, and `fit` checks that
the context holds a prompt and its answer.
"""
