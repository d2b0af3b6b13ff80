"""The OpenAI API over HTTP: it answers one request at a time.

Each endpoint is a file here (`chat`, `completions`, `tokens`, `information`, `admin`) or a folder
(`embeddings`); `routes` has their paths, `app` builds the application. A call goes through these
folders, and enters each once:

    server   connections, callers, headers, errors: what every request meets
    read     bytes -> a typed request, checked as far as it can be without the model
    prompt   text, chat or token ids -> the tokens of prompts that fit the context
    plan     parts of the answer and their grammar, sampling -> generation requests
    answer   a running call: token events -> text -> JSON or server-sent events

`responses` translates the Responses API to chats; what it keeps between requests is in
`coordinator/stateful`, of which this package knows nothing. `openapi` describes all routes.
"""

from coordinator.api.app import create_app
from coordinator.api.config import ApiConfig
from coordinator.api.observer import NullObserver, Observer, RequestSummary
from coordinator.api.server.server import HttpServer

__all__ = ["ApiConfig", "HttpServer", "NullObserver", "Observer", "RequestSummary", "create_app"]
