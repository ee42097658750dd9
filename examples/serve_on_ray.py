"""Replicas of the server on the machines of a Ray cluster, with autoscaling: `serve run examples.serve_on_ray:build model=tiny-code`.

Needs ``pip install 'ray[serve]' mmh3 '.[cli,gguf,serve]'``. Ray's proxy balances the load; an answer streams from its replica. Requests with
the same header ``x-session-id`` go to the same replica, which has the K and V of their conversation; without it, to any.
Alone, ``python examples/serve_on_ray.py tiny-code`` starts one machine's cluster, asks it something, and stops.
"""

from __future__ import annotations

import sys
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

import pdkernels as pd
from pdkernels.serve import create_app


@serve.deployment(
    request_router_config=RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
    ray_actor_options={"num_cpus": 1},
    max_ongoing_requests=64,
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 8},
    health_check_period_s=5,
    graceful_shutdown_timeout_s=30,
)
@serve.ingress()
class Replica:
    """One model with its engine. Ray passes it the requests as they arrive, and its answers on as they stream."""

    def __init__(self, model: str, name: str, method: str) -> None:
        self._engine = pd.Engine(pd.models.load(model))
        self._name, self._method = name, method

    def __serve_build_asgi_app__(self) -> Any:
        """The application, made in the replica."""
        return create_app(self._engine, self._name, method=self._method)

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has stopped."""
        if not self._engine.running:
            raise RuntimeError("the engine has stopped")


def build(arguments: dict[str, str]) -> Application:
    """The application that ``serve run`` starts; its arguments are ``model``, ``name`` and ``method``."""
    model = arguments.get("model", "smollm2-135m-instruct")
    bound: Application = Replica.bind(model, arguments.get("name", model), arguments.get("method", "autoregressive"))
    return bound


if __name__ == "__main__":
    import httpx

    chosen = sys.argv[1] if len(sys.argv) > 1 else "tiny-code"
    serve.run(build({"model": chosen, "method": "autoregressive"}))
    body = {"model": chosen, "prompt": "import os\n", "max_tokens": 12, "temperature": 0}
    print(httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=120).json())
    serve.shutdown()
