"""`hf-spec serve`: transformers' OpenAI-compatible server with a strategy."""

from __future__ import annotations

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
    """Answer requests of OpenAI's API with transformers' own server, speculatively.

    Requests share one continuous batch. /health and /metrics (Prometheus) are there, too; Ctrl-C
    ends it. It asks nobody for a key, so it listens to this machine alone unless told otherwise.

        hf-spec serve MODEL --strategy auto --assistant HEAD
        curl http://127.0.0.1:8000/metrics
    """
    from transformers.cli.serving.model_manager import ModelManager

    from hf_spec.bench.entries import parse_entries
    from hf_spec.cli.loading import device_and_dtype
    from hf_spec.serving.app import build_app, check_packages, make_server
    from hf_spec.serving.manager import SpeculativeManager

    check_packages()
    [entry] = parse_entries([strategy or "auto"], assistant or ())
    chosen = None if strategy is None else entry.config
    manager = SpeculativeManager(chosen, entry.assistant, settings)
    device, dtype = device_and_dtype(placement)
    app = build_app(ModelManager(device=str(device), dtype=dtype, force_model=model), manager)
    name = manager.scheduler.generation.config.strategy
    where = f"http://{settings.host}:{settings.port}"
    typer.echo(f"{model} with strategy {name} at {where}/v1, metrics at {where}/metrics", err=True)
    try:
        make_server(app, settings.host, settings.port).run()
    except SystemExit as stop:
        # uvicorn has said what the system answered; its status is one of ours for something else.
        raise OSError(
            f"no server can listen at {settings.host}, port {settings.port}; choose another "
            "--host or --port"
        ) from stop
    finally:
        manager.stop()
