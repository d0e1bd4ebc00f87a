"""`hf-spec serve`: OpenAI-compatible server with a strategy."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from hf_spec.cli import options
from hf_spec.serving.settings import ServeSettings, is_loopback


@options.from_settings
def serve(
    *,
    model: options.ModelArgument,
    strategy: Annotated[
        str | None, typer.Option(help=f"{options.ENTRY}. Default: the model's, or auto.")
    ] = None,
    assistant: options.Assistants = None,
    settings: ServeSettings,
    placement: options.Placement,
) -> None:
    """Serve a model through an OpenAI-compatible API.

    Requests share one continuous batch and use transformers' handlers. There are also /health and
    /metrics (Prometheus). Ctrl-C or SIGTERM stops the server after at most five seconds for running
    responses. By default only this machine can connect; with another --host, set an API key.

        hf-spec serve MODEL --strategy auto --assistant HEAD
        HF_SPEC_API_KEY=... hf-spec serve MODEL --host 0.0.0.0
        curl http://127.0.0.1:8000/metrics
    """
    from hf_spec.cli.loading import device_and_dtype
    from hf_spec.methods.entries import parse_entries
    from hf_spec.serving.app import check_packages, load_app, make_server
    from hf_spec.serving.manager import SpeculativeManager

    check_packages()
    [entry] = parse_entries([strategy or "auto"], assistant or ())
    config = None if strategy is None else entry.config
    if settings.api_key is None:
        settings = replace(settings, api_key=os.environ.get("HF_SPEC_API_KEY") or None)
    manager = SpeculativeManager(config, entry.assistant, settings)
    device, dtype = device_and_dtype(placement)
    app = load_app(model, manager, device=str(device), dtype=dtype)
    name = manager.scheduler.generation.config.strategy if manager.scheduler else ""
    url = f"http://{settings.host}:{settings.port}"
    typer.echo(f"{model} with strategy {name} at {url}/v1, metrics at {url}/metrics", err=True)
    if settings.api_key is None and not is_loopback(settings.host):
        typer.echo("warning: no authentication on a public address; set --api-key", err=True)
    try:
        make_server(app, manager, settings.host, settings.port).run()
    except SystemExit as stop:
        # uvicorn has printed the reason; its exit status has another meaning here.
        raise OSError(
            f"cannot listen on {settings.host}, port {settings.port}; choose another --host or "
            "--port"
        ) from stop
    finally:
        manager.stop()
