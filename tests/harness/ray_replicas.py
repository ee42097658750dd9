"""Two replicas under Ray Serve, one of which is killed while it answers: `python -m tests.harness.ray_replicas`, in an environment with Ray.

Conversations go on for some turns, each with a header that names it. A second turn must find the prompt of the first in its replica, and
every answer must be that of `generate` alone, whatever is killed; a request that was on the replica that died may end with an error, and
is asked again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ray
from ray import serve

import pdkernels as pd
from examples.serve_on_ray import Replica
from pdkernels.decoding import generate

ADDRESS = "http://127.0.0.1:8000/v1/completions"
TURNS, CONVERSATIONS, LIMIT = 6, 8, 24


def main() -> None:
    model = pd.models.load("tiny-code")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    sizes = {"min_replicas": 2, "max_replicas": 2}
    deployment: Any = Replica
    serve.run(deployment.options(autoscaling_config=sizes).bind("tiny-code", "tiny-code", "autoregressive"))
    counts, lock, half = {"right": 0, "error": 0, "kept": 0, "lost": 0}, threading.Lock(), threading.Event()

    def converse(number: int) -> None:
        text = f"def f{number}(x):\n    return x\n\n" * 4
        for turn in range(TURNS):
            body = {"model": "tiny-code", "prompt": text, "max_tokens": LIMIT, "temperature": 0}
            expected: Any = generate(model, text, "autoregressive", max_new_tokens=LIMIT).text
            while True:
                try:
                    answer = httpx.post(ADDRESS, json=body, headers={"x-session-id": str(number)}, timeout=60)
                except httpx.TransportError:
                    answer = None
                if answer is not None and answer.status_code == 200:
                    break
                assert answer is None or answer.status_code >= 500, answer.text
                with lock:
                    counts["error"] += 1
                time.sleep(0.5)
            found: Any = answer.json()
            assert found["choices"][0]["text"] == expected
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            with lock:
                counts["right"] += 1
                counts["kept" if cached else "lost"] += turn > 0
                if counts["right"] >= CONVERSATIONS * TURNS // 3:
                    half.set()
            text += expected + "\n\nclass A:"

    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        running = [pool.submit(converse, number) for number in range(CONVERSATIONS)]
        assert half.wait(300)
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "Replica" in one["name"]]
        ray.kill(ray.get_actor(names[0], namespace="serve"))
        for one in running:
            one.result()
    print(f"{len(names)} replicas, one killed: {counts}")
    assert counts["right"] == CONVERSATIONS * TURNS and counts["kept"] >= CONVERSATIONS * (TURNS - 2)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
