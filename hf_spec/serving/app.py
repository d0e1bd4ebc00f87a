"""The server: transformers' handlers behind checks, with `/metrics` and OpenAI's error objects."""

from __future__ import annotations

import asyncio
from typing import Any

from transformers.utils.import_utils import is_serve_available

from hf_spec.common.errors import OptionError
from hf_spec.common.installing import how_to_install
from hf_spec.serving.manager import SpeculativeManager

# After a signal: seconds until answers that go on end with an error, and until connections are
# closed whatever they do.
DRAIN_SECONDS, CLOSE_SECONDS = 5, 8


def check_packages() -> None:
    """Raise `OptionError` where transformers' server cannot run for lack of packages."""
    if not is_serve_available():
        raise OptionError(
            "transformers' server needs fastapi, uvicorn and openai: " + how_to_install("serve")
        )


def load_app(name: str, manager: SpeculativeManager, **options: Any) -> Any:
    """Load the model to serve and return the FastAPI app that answers with it.

    Args:
        name: folder or Hub id of the model, also the name that clients give it.
        manager: generates the answers; opens the model here.
        options: further arguments of transformers' `ModelManager`, such as `device` and `dtype`.

    Raises:
        SpecError: if the model cannot be served.
    """
    from hf_spec.serving.handlers import ServedModel
    from hf_spec.serving.routes import build_app

    model = ServedModel(name, **options)
    [loaded] = model.loaded_models.values()
    manager.open(loaded.model, loaded.processor)
    return build_app(model, manager)


def make_server(app: Any, manager: SpeculativeManager, host: str, port: int) -> Any:
    """Return the uvicorn server that runs the app until a signal ends it.

    Answers that go on may take `DRAIN_SECONDS` then. After that they end with an error.
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
