"""The simulator itself: correct kernels are correct under every schedule, each kind of mistake is found."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.cudasim.build import HERE, ROOT, SCHEDULES, CompilerNotFound, build_library, schedule


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    path = build_library(
        "fixtures",
        sources=[HERE / "kernels" / "correct.cu", HERE / "kernels" / "broken.cu"],
        include_dirs=[ROOT / "csrc" / "cuda"],
    )
    return ctypes.CDLL(str(path))


Run = Callable[..., "str | None"]


@pytest.fixture
def run(library: ctypes.CDLL) -> Run:
    """Calls a fixture by name; tensors become pointers. None, or what went wrong."""

    def call(name: str, *arguments: torch.Tensor | int) -> str | None:
        function = getattr(library, "run_" + name)
        function.restype = ctypes.c_char_p
        raw = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in arguments]
        message = function(*raw)
        return None if message is None else message.decode()

    return call


@pytest.fixture(params=SCHEDULES)
def scheduled(request: pytest.FixtureRequest, library: ctypes.CDLL):
    with schedule(library, request.param):
        yield request.param


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def random_ints(n: int) -> torch.Tensor:
    return torch.randint(-1000, 1000, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("scheduled")
class TestRightKernels:
    @pytest.mark.parametrize("threads", [32, 96, 1024])
    def test_block_sum_with_shuffles(self, run: Run, threads: int) -> None:
        values, sums = random_ints(5 * threads), ints(5)
        assert run("block_sum", values, sums, 5, threads) is None
        assert sums.tolist() == values.view(5, threads).sum(1).tolist()

    def test_compaction_with_ballots(self, run: Run) -> None:
        values = random_ints(3 * 128).float()
        out, counts = torch.zeros(3 * 128), ints(3)
        assert run("compact", values, out, counts, 3, 128) is None
        for block in range(3):
            kept = values.view(3, 128)[block]
            kept = kept[kept > 0]
            assert counts[block] == len(kept)
            assert torch.equal(out.view(3, 128)[block, : len(kept)], kept)

    def test_histogram_with_atomics(self, run: Run) -> None:
        values, bins = random_ints(1001), torch.zeros(16, dtype=torch.int32)
        assert run("histogram", values, 1001, bins, 3, 64) is None
        assert bins.tolist() == torch.bincount(values & 15, minlength=16).tolist()

    @pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 50), (5, 70)])
    def test_tiled_transposes(self, run: Run, shape: tuple[int, int]) -> None:
        values = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        for name, extra in (("transpose_static", ()), ("transpose_dynamic", (8,)), ("transpose_dynamic", (32,))):
            out = torch.zeros(shape[1], shape[0])
            assert run(name, values, out, *shape, *extra) is None
            assert torch.equal(out, values.T)

    def test_every_thread_of_a_3d_grid_runs_once(self, run: Run) -> None:
        out = torch.zeros(24, 30, dtype=torch.int32)
        assert run("coordinates", out) is None
        assert torch.equal(
            out, torch.arange(24, dtype=torch.int32)[:, None] * 1000 + torch.arange(30, dtype=torch.int32)
        )

    @pytest.mark.parametrize("n", [1, 31, 33, 64])
    def test_returned_threads_are_not_waited_for(self, run: Run, n: int) -> None:
        out = ints(64)
        assert run("early_return", out, n) is None
        left = sum(t % 3 != 0 for t in range(n))
        expected = [(t + 1) % n + (100 * left if t % 3 else 0) if t < n else -1 for t in range(64)]
        assert out.tolist() == expected

    @pytest.mark.parametrize("threads", [32, 96])
    def test_divergent_warps(self, run: Run, threads: int) -> None:
        out = ints(2, threads)
        assert run("divergent", out, 2, threads) is None
        values = [sum(range(lane // 8 * 8, lane // 8 * 8 + 8)) if lane < 16 else 31 for lane in range(32)]
        assert out[0].tolist() == [v + values[0] for v in values] * (threads // 32)

    def test_intrinsics_agree_with_their_definitions(self, run: Run) -> None:
        out = torch.zeros(32, 16, dtype=torch.int64)
        assert run("intrinsics", out) is None
        for lane, got in enumerate(out.tolist()):
            segment = lane // 8 * 8
            expected = [
                lane - 3 if lane - 3 >= segment else lane,
                lane + 3 if lane + 3 < segment + 8 else lane,
                segment + 1,
                2 * (lane ^ 5) + 1,
                (1 << 40) + 31 - lane,
                0x11111111 << lane % 4,
                0xFFFFFFFF + 1,
                496 + 31000,
                1 + 4,
                32 - lane.bit_length() + 100 * ((lane & -lane).bit_length()) + 10000 * lane.bit_count(),
                int(f"{lane:032b}"[::-1], 2),
                lane // 2 + min(lane, 3) + max(lane, 7),
                lane + lane % 2 + 0x3F800000,
                int(torch.tensor(lane + 0.0001).half().float() * 1024),
                int(torch.tensor(256.0 + lane).bfloat16().float()),
                0x07000100 + lane,
            ]
            assert got == expected, f"lane {lane}"

    def test_last_block_pattern(self, run: Run) -> None:
        values, out = random_ints(777), ints(1)
        assert run("grid_sum", values, 777, ints(6), torch.zeros(1, dtype=torch.int32), out, 6) is None
        assert out.item() == values.sum()

    @pytest.mark.parametrize("blocks", [1, 2, 5, 8])
    def test_clusters(self, run: Run, blocks: int) -> None:
        values, sums = random_ints(3 * blocks * 32), ints(3)
        assert run("cluster_sum", values, sums, 3, blocks) is None
        assert sums.tolist() == values.view(3, -1).sum(1).tolist()
        for threads, turns in ((32, 1), (96, 3)):
            out = ints(2, blocks, threads)
            assert run("cluster_turns", out, 2, blocks, threads, turns) is None
            expected = torch.arange(2 * blocks * threads, dtype=torch.int32).view(2, blocks, threads)
            assert torch.equal(out, expected.roll(-turns, 1))

    def test_vector_copy(self, run: Run) -> None:
        values, out = torch.randn(101, 4), torch.zeros(101, 4)
        assert run("copy_vectors", values, out, 101) is None
        assert torch.equal(out, values)


class TestMistakesAreFound:
    def results(self, library: ctypes.CDLL, run: Run, *arguments: object) -> set[tuple[int, ...]]:
        found = set()
        for text in SCHEDULES:
            out = ints(64)
            with schedule(library, text):
                assert run(*(out if a is Ellipsis else a for a in arguments)) is None
            found.add(tuple(out.tolist()))
        return found

    def test_missing_barriers_change_the_result(self, library: ctypes.CDLL, run: Run) -> None:
        assert len(self.results(library, run, "missing_barrier", random_ints(64), ..., 64)) > 1
        assert len(self.results(library, run, "missing_second_barrier", ...)) > 1

    def test_memory_of_other_blocks_of_a_cluster(self, library: ctypes.CDLL, run: Run) -> None:
        (right,) = self.results(library, run, "cluster_pair", ..., 0)
        assert right[:3] == (100, 102, 104) and right[32:35] == (100, 102, 104)
        for mistake in (1, 2, 3):
            assert len(self.results(library, run, "cluster_pair", ..., mistake)) > 1

    @pytest.mark.parametrize("kind", ["static", "template", "dynamic"])
    def test_shared_memory_starts_as_garbage(self, library: ctypes.CDLL, run: Run, kind: str) -> None:
        results = self.results(library, run, f"uninitialised_{kind}", ...)
        assert len(results) > 1
        assert all(0 not in result[:32] for result in results)

    @pytest.mark.parametrize("text", SCHEDULES)
    def test_deadlock_is_reported(self, library: ctypes.CDLL, run: Run, text: str) -> None:
        with schedule(library, text):
            message = run("deadlock")
        assert message is not None
        assert message.startswith("cudasim: kernel deadlock, block (0, 0, 0): deadlock: 32 of 64 live threads wait at ")
        assert "thread (16, 0, 0) waits at __syncwarp (tests/cudasim/kernels/broken.cu:" in message
        assert "with mask 0xffffffff for lanes 0x0000ffff of its warp, which never come" in message
        assert message.endswith(f"[schedule {text}]")

    @pytest.mark.parametrize(
        ("name", "arguments", "expected"),
        [
            ("two_barriers", [], "thread (32, 0, 0): threads meet at different barriers: __syncthreads ("),
            ("different_calls", [ints(32)], "lanes of mask 0xffffffff meet at different calls: __any_sync ("),
            ("foreign_mask", [ints(32)], "has mask 0x0000ffff, which lacks the calling lane 16"),
            ("bad_width", [ints(32)], "__shfl_sync has width 12; it must be a power of two up to 32"),
            ("overrun_dynamic", [0], "block (0, 0, 0) wrote outside its 128 bytes of dynamic shared memory"),
            ("overrun_dynamic", [-33], "block (0, 0, 0) wrote outside its 128 bytes of dynamic shared memory"),
            ("overrun_static", [1, ints(32)], "thread (31, 0, 0): index 32 is out of bounds of 'int [32]'"),
            ("misaligned", [torch.zeros(8), torch.zeros(4)], "misaligned access to 'const struct float4'"),
            ("wide_shift", [ints(1), 32], "a shift by a negative count, or by the width of its type or more"),
            ("trap", [], "block (0, 0, 0), thread (0, 0, 0): __trap() was called"),
            ("cluster_twice", [], "without __cluster_barrier_wait"),
            ("cluster_never", [], "without __cluster_barrier_arrive"),
            ("cluster_leaves", [], "without __cluster_barrier_wait"),
            (
                "cluster_alone",
                [],
                "deadlock: 48 of 64 live threads of the cluster have come to __cluster_barrier_arrive (",
            ),
            ("cluster_mapped", [2, 0], "names block 2 of a cluster of 2"),
            ("cluster_mapped", [0, ints(1)], "has an address outside the block's shared memory"),
        ],
    )
    def test_errors_name_the_location(
        self, run: Run, name: str, arguments: list[torch.Tensor | int], expected: str
    ) -> None:
        message = run(name, *arguments)
        assert message is not None and expected in message, message
        assert message.startswith(f"cudasim: kernel {name}, block (0, 0, 0)")
        # Half-run fibers are reset: the next kernel is unaffected.
        out = ints(64)
        assert run("early_return", out, 64) is None

    def test_reading_an_absent_lane_gives_garbage(self, run: Run) -> None:
        out = torch.ones(32, dtype=torch.int32)
        assert run("absent_source", out) is None
        assert 1 not in out[:16].tolist()


class TestLimits:
    KIB = 1024

    @pytest.mark.parametrize(
        ("grid", "block", "shared_bytes", "opt_in", "message"),
        [
            ((1, 1, 1), (1024, 1), 0, 0, None),
            ((1, 1, 1), (1025, 1), 0, 0, "invalid configuration argument"),
            ((1, 1, 1), (8, 64), 0, 0, None),
            ((1, 1, 1), (8, 65), 0, 0, "invalid configuration argument"),
            ((0, 1, 1), (32, 1), 0, 0, "invalid configuration argument"),
            ((1, 1, 1), (0, 1), 0, 0, "invalid configuration argument"),
            ((1, 65536, 1), (1, 1), 0, 0, "invalid configuration argument"),
            ((1, 1, 65536), (1, 1), 0, 0, "invalid configuration argument"),
            ((1, 65535, 1), (1, 1), 0, 0, None),
            ((1, 1, 1), (1, 1), 48 * KIB, 0, None),
            ((1, 1, 1), (1, 1), 48 * KIB + 1, 0, "invalid argument"),
            ((1, 1, 1), (1, 1), 227 * KIB + 1, 227 * KIB + 1, "invalid argument"),
            ((1, 1, 1), (1, 1), 227 * KIB, 227 * KIB, None),
        ],
    )
    def test_launches_a_device_would_refuse(
        self,
        run: Run,
        grid: tuple[int, int, int],
        block: tuple[int, int],
        shared_bytes: int,
        opt_in: int,
        message: str | None,
    ) -> None:
        out = ints(1)
        assert run("fill", out, *grid, *block, shared_bytes, opt_in) == message
        assert out.item() == (1 if message is None else -1)
        assert run("coordinates", torch.zeros(24, 30, dtype=torch.int32)) is None  # the error was not sticky

    @pytest.mark.parametrize(("cluster", "grid"), [(0, 1), (3, 8), (9, 9)])
    def test_clusters_a_device_would_refuse(self, run: Run, cluster: int, grid: int) -> None:
        assert run("cluster_shape", ints(16), cluster, grid) == "cluster misconfiguration"


class TestUse:
    def test_python_threads_can_launch_at_once(self, run: Run) -> None:
        values = random_ints(8 * 256)
        expected = values.view(8, 256).sum(1).tolist()
        failures = []

        def launch() -> None:
            for _ in range(20):
                sums = ints(8)
                if run("block_sum", values, sums, 8, 256) is not None or sums.tolist() != expected:
                    failures.append(sums)

        threads = [threading.Thread(target=launch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_it_is_fast_enough(self, run: Run) -> None:
        values, sums = random_ints(64 * 256), ints(64)
        run("block_sum", values, sums, 64, 256)
        start = time.thread_time()
        assert run("block_sum", values, sums, 64, 256) is None
        assert time.thread_time() - start < 0.5  # typically 0.03

    def test_schedules_have_names(self, library: ctypes.CDLL) -> None:
        for wrong in ("", "backward", "random", "random:", "random:x"):
            with pytest.raises(ValueError, match="must be forward, reverse or random:SEED"), schedule(library, wrong):
                pass

    @pytest.mark.parametrize(("wanted", "found"), [("reverse", "reverse"), (None, "forward")])
    def test_environment_chooses_the_schedule(self, library: ctypes.CDLL, wanted: str | None, found: str) -> None:
        code = (
            "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).cudasim_schedule; f.restype = ctypes.c_char_p; print(f())"
        )
        environment = {k: v for k, v in os.environ.items() if k != "PDKERNELS_CUDASIM_SCHEDULE"}
        if wanted is not None:
            environment["PDKERNELS_CUDASIM_SCHEDULE"] = wanted
        command = [sys.executable, "-c", code, library._name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"b'{found}'"

    def test_no_compiler_is_a_clear_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(CompilerNotFound, match=r"no C\+\+ compiler 'no-such-compiler'\. Install g\+\+ 11"):
            build_library("fixtures", sources=[HERE / "kernels" / "correct.cu"])

    def test_a_failing_compilation_says_why(self) -> None:
        with pytest.raises(RuntimeError, match=r"launch\.h: No such file"):
            build_library("fixtures", sources=[HERE / "kernels" / "correct.cu"])
