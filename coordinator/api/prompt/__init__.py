"""From a request's text, chat or token ids to the tokens of its prompts."""
