"""transformers' own server, answering with a strategy: the scheduler, its metrics, the app."""
