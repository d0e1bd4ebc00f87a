"""OpenAI-compatible server: transformers' handlers over continuous batching with a strategy.

A request passes through these modules:

1. `app` loads the model and starts uvicorn; `settings` has the limits.
2. `guard` checks host, origin, API key and body size, and cancels the request on a disconnect.
3. `routes` maps endpoints to handlers and has the types of their fields.
4. `handlers` reads the request in a thread with transformers' code; `checks` enforces the limits.
5. `manager` turns it into a prepared sequence and streams its text.
6. `scheduler` runs all sequences in one speculative batch on its thread.

`metrics` holds the counters of `/metrics`, `errors` the HTTP errors.
"""
