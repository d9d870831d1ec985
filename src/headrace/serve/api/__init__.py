"""The OpenAI-style HTTP server over an engine.

errors.py     every refusal in OpenAI's shape
protocol.py   request bodies, checked
text.py       chat templates, tool calls, reasoning
answer.py     answers and chunks as JSON
service.py    what endpoints share: model ids, bodies, clients that leave
routes.py     completions and chat
pooling.py    embeddings and classification
models.py     models, tokens there and back, adapters
metrics.py    Prometheus names
openapi.py    /openapi.json
app.py        the application: routes, keys, limits
server.py     sockets, slow clients, signals
head.html, then playground.html or pooling.html  the page at /
"""

from headrace.serve.api.app import ServerOptions, build_app
from headrace.serve.api.server import build_server, run_server

__all__ = ["ServerOptions", "build_app", "build_server", "run_server"]
