"""The server's process."""

from __future__ import annotations

from typing import Any

from pdkernels._validation import sentence
from pdkernels.serve.app import Limits


def run(app: Any, *, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None) -> None:
    """Serves an application until SIGTERM or SIGINT; running requests may finish within `limits.shutdown` seconds.

    Raises:
        ImportError: without uvicorn.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as missing:
        remedy = "Install it with `pip install 'pdkernels[serve]'`."
        raise ImportError(sentence("serve", "a server needs uvicorn", remedy)) from missing
    seconds = int((limits or Limits()).shutdown)
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=seconds, timeout_keep_alive=30)
