"""The OpenAI API over HTTP.

One call, told once: `middleware` traces it and answers for everything that goes wrong;
`chat`/`completions` read the body (`body`, `requests`, `parameters`) and make a plan of it
(`messages`, `prompts`, `sampling`); `answer` runs the plan as a `call`, whose `arrivals` are
token events and whose `choice`s are text; `formats` and `sse` put it on the wire.
"""

from coordinator.api.app import create_app
from coordinator.api.config import ApiConfig
from coordinator.api.observer import NullObserver, Observer, RequestSummary
from coordinator.api.server import HttpServer

__all__ = ["ApiConfig", "HttpServer", "NullObserver", "Observer", "RequestSummary", "create_app"]
