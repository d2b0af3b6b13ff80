"""The OpenAI API over HTTP.

The path of a call: `middleware` traces it and turns every failure into an error response;
`chat`/`completions` read the body (`body`, `requests`, `parameters`) and turn it into a plan
(`messages`, `prompts`, `sampling`); `answer` runs the plan as a `call`, which receives token
events (`arrivals`) and converts them to text (`choice`); `formats` and `sse` encode the answer.
"""

from coordinator.api.app import create_app
from coordinator.api.config import ApiConfig
from coordinator.api.observer import NullObserver, Observer, RequestSummary
from coordinator.api.server.server import HttpServer

__all__ = ["ApiConfig", "HttpServer", "NullObserver", "Observer", "RequestSummary", "create_app"]
