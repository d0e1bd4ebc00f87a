"""`hf-spec serve`: transformers' OpenAI-compatible server with a strategy."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from hf_spec.cli import options
from hf_spec.serving.settings import ServeSettings


@options.from_settings
def serve(
    *,
    model: options.ModelArgument,
    strategy: Annotated[
        str | None,
        typer.Option(
            help=f"{options.ENTRY}; the one stored in the model's generation config by default, "
            "or else auto."
        ),
    ] = None,
    assistant: options.Assistants = None,
    settings: ServeSettings,
    placement: options.Placement,
) -> None:
    """Answer requests of OpenAI's API with transformers' own handlers, speculatively.

    Requests share one continuous batch. /health and /metrics (Prometheus) exist, too. Ctrl-C or
    SIGTERM ends it: running answers may take five more seconds. It listens to this machine alone
    unless --host says otherwise; then set an API key.

        hf-spec serve MODEL --strategy auto --assistant HEAD
        HF_SPEC_API_KEY=... hf-spec serve MODEL --host 0.0.0.0
        curl http://127.0.0.1:8000/metrics
    """
    from hf_spec.cli.loading import device_and_dtype
    from hf_spec.evaluation.bench.entries import parse_entries
    from hf_spec.serving.app import check_packages, load_app, make_server
    from hf_spec.serving.manager import SpeculativeManager

    check_packages()
    [entry] = parse_entries([strategy or "auto"], assistant or ())
    chosen = None if strategy is None else entry.config
    if settings.api_key is None:
        settings = replace(settings, api_key=os.environ.get("HF_SPEC_API_KEY") or None)
    manager = SpeculativeManager(chosen, entry.assistant, settings)
    device, dtype = device_and_dtype(placement)
    app = load_app(model, manager, device=str(device), dtype=dtype)
    name = manager.scheduler.generation.config.strategy if manager.scheduler else ""
    where = f"http://{settings.host}:{settings.port}"
    typer.echo(f"{model} with strategy {name} at {where}/v1, metrics at {where}/metrics", err=True)
    if settings.api_key is None and not settings.is_loopback:
        typer.echo("anyone who reaches this address may use it; set --api-key", err=True)
    try:
        make_server(app, manager, settings.host, settings.port).run()
    except SystemExit as stop:
        # uvicorn has said what the system answered; its status is one of ours for something else.
        raise OSError(
            f"no server can listen at {settings.host}, port {settings.port}; choose another "
            "--host or --port"
        ) from stop
    finally:
        manager.stop()
