"""The OpenAI-style HTTP server over an engine.

errors.py     every refusal in OpenAI's shape
protocol.py   request bodies, checked
text.py       chat templates, tool calls, reasoning
answer.py     answers and chunks as JSON
routes.py     the endpoints
metrics.py    Prometheus names
app.py        the application: keys, limits, life cycle
playground.html  the page at /
"""

from headrace.serve.api.app import ServerOptions, build_app, run_server

__all__ = ["ServerOptions", "build_app", "run_server"]
