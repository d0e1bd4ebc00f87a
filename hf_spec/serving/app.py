"""Start of the server: package check, model loading and uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

from transformers.utils.import_utils import is_serve_available

from hf_spec.common.errors import OptionError
from hf_spec.common.installing import how_to_install
from hf_spec.serving.manager import SpeculativeManager

# Seconds after a signal until running responses end with an error, and until all connections are
# closed.
DRAIN_SECONDS, CLOSE_SECONDS = 5, 7


def check_packages() -> None:
    """Raise `OptionError` if packages of transformers' server are missing."""
    if not is_serve_available():
        raise OptionError(
            "transformers' server needs fastapi, uvicorn and openai: " + how_to_install("serve")
        )


def load_app(name: str, manager: SpeculativeManager, **options: Any) -> Any:
    """Load the model `name`, a folder or Hub id, and return the FastAPI app.

    Requests use the same name. `options` are further arguments of transformers' `ModelManager`,
    such as `device` and `dtype`. Raises `SpecError` if the model is unsupported.
    """
    from hf_spec.serving.handlers import ServedModel
    from hf_spec.serving.routes import build_app

    model = ServedModel(name, **options)
    [loaded] = model.loaded_models.values()
    manager.open(loaded.model, loaded.processor)
    return build_app(model, manager)


def make_server(app: Any, manager: SpeculativeManager, host: str, port: int) -> Any:
    """Return the uvicorn server that runs the app until a signal.

    Running responses then have `DRAIN_SECONDS` to finish before they end with an error.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            loop = asyncio.get_running_loop()
            interrupt = loop.call_later(DRAIN_SECONDS, manager.stop, 0.0)
            await super().shutdown(sockets)
            interrupt.cancel()

    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=CLOSE_SECONDS
    )
    return Server(config)
