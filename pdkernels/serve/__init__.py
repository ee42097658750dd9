"""An HTTP server with OpenAI's interface, on `pdkernels.Engine`. It needs the optional libraries FastAPI and
uvicorn."""

from pdkernels.serve.app import Limits, create_app
from pdkernels.serve.run import run

__all__ = ["Limits", "create_app", "run"]
