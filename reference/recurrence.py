"""The parts of a recurrent-depth sampler step that are not the model, in plain PyTorch: input, exit test, and freezing of rows.

Source: "Efficient Parallel Samplers for Recurrent-Depth Models" (arXiv 2510.14961), Algorithms 1 and 2, equations 1 to 3.
Arguments and results are those of `pdkernels.recurrence_inject`, `recurrence_exit` and `recurrence_advance_`. In float64 all
arithmetic is float64; only the random numbers remain the float32 ones of the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .philox import WORD, as_seeds, key_of, philox4x32

SCHEDULES = ("constant", "linear", "harmonic", "root")
MIXERS = ("linear", "sqrt")
NEW_STATES = ("fresh", "copied")
RULES = ("prefix", "last")

# The fourth word of a counter: latent noise is independent of sampled tokens, which use 0.
LATENT = 1

# Phi^-1(1/2 + t (Phi(3) - 1/2)) = t P(y) / Q(y) with y = 1 - t^2, a minimax fit of degree 6 over 6: 2.8e-7, rising powers of y.
NUMERATOR = (2.9999998, 693.8183, 43711.816, 825518.44, 4248849.0, 4712873.5, 526904.5)
DENOMINATOR = (1.0, 249.5244, 17557.633, 389758.62, 2551655.8, 4191461.0, 1136600.5)


def _powers(coefficients: tuple[float, ...], y: Tensor) -> Tensor:
    """Horner's rule, rounded after each multiplication and each addition."""
    result = torch.full_like(y, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * y
        result = result + coefficient
    return result


def quantile(words: Tensor) -> Tensor:
    """A random word as a number of the normal distribution truncated at +-3, float32.

    The upper 24 bits of the word are ``t = 2 u - 1`` in steps of 2**-23, offset by half a step: odd in the word, never 0, and
    exact in float32. Every operation is rounded separately, so that all devices get the same bits. The error is below 1e-6.

    Example:
        >>> quantile(torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1]))
        tensor([-3.0000e+00, -7.4502e-08,  7.4502e-08,  3.0000e+00])
    """
    t = (2 * (words >> 8) + (1 - 2**24)).to(torch.float32) * 2.0**-24
    size = t.abs()
    y = (1 - size) * (1 + size)
    return t * (_powers(NUMERATOR, y) / _powers(DENOMINATOR, y))


def initial_state(
    steps: Tensor, positions: Tensor, size: int, seed: int | Tensor = 0, init_std: float = 0.4**0.5
) -> Tensor:
    """What InitState draws for a step and a position: truncated normal numbers, ``(..., size)`` float32.

    Step 0 gives initial states. The noise of the algorithms' step t, which they count from 1, is that of step t. Component ``e`` comes from word ``e % 4`` of ``philox4x32((e // 4, position, step, 1), (seed low, seed high))``.

    Args:
        steps, positions: integer tensors that broadcast; so does `seed` where it is a tensor.
        init_std: of the normal distribution before truncation at three times that. The published model has sqrt(2 / 5).

    Example:
        >>> initial_state(torch.tensor(0), torch.tensor([7, 8]), 3).shape
        torch.Size([2, 3])
    """
    steps, positions, seeds = torch.broadcast_tensors(
        steps.to(torch.int64) & WORD, positions.to(torch.int64) & WORD, as_seeds(seed, positions.device)
    )
    quads = torch.arange((size + 3) // 4, device=positions.device)
    steps, positions, quads = torch.broadcast_tensors(steps[..., None], positions[..., None], quads)
    counter = torch.stack([quads, positions, steps, torch.full_like(quads, LATENT)], dim=-1)
    numbers = quantile(philox4x32(counter, key_of(seeds)[..., None, :])).flatten(-2)[..., :size]
    return numbers * torch.full_like(numbers, init_std)


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded also in float32, which torch's may not be."""
    return x.to(torch.float64).sqrt().to(x.dtype)


def noise_share(counts: Tensor, noise: float, schedule: str, horizon: int, dtype: torch.dtype) -> Tensor:
    """beta: the fraction of a state that becomes noise after `counts` recurrences."""
    # Tensors instead of numbers: torch divides by a number via its reciprocal, which rounds twice.
    counts = counts.to(dtype)
    share = torch.full_like(counts, noise)
    if schedule == "linear":
        return share * (1 - counts / torch.full_like(counts, horizon)).clamp(min=0)
    if schedule == "harmonic":
        return share / (1 + counts)
    return share / _root(1 + counts) if schedule == "root" else share


def _check_rows(op: str, width: Tensor, max_width: int, **numbers: Tensor) -> None:
    for b, value in enumerate(width.tolist()):
        if not 0 <= value <= max_width:
            raise ValueError(f"pdkernels.{op}: width must be in [0, {max_width}], got {value} for sequence {b}.")
        for name, tensor in numbers.items():
            if int(tensor[b]) < 0:
                raise ValueError(f"pdkernels.{op}: {name} must not be negative, got {int(tensor[b])} for sequence {b}.")


def _shifted(rows: Tensor, count: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Row ``i + offset[b]`` for each row ``i < count``, and whether there is one."""
    source = torch.arange(count, device=rows.device) + offset[:, None]
    there = (source >= 0) & (source < rows.shape[1])
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], count, rows.shape[2]), there
    source = source.clamp(0, rows.shape[1] - 1)
    return rows.gather(1, source[..., None].expand(-1, -1, rows.shape[2])), there


def recurrence_inject(
    state: Tensor | None,
    embedding: Tensor,
    previous_embedding: Tensor | None,
    recurrences: Tensor,
    cursor: Tensor,
    width: Tensor,
    advance: Tensor,
    steps: Tensor,
    seed: int = 0,
    seeds: Tensor | None = None,
    noise: float = 0.0,
    schedule: str = "linear",
    horizon: int = 32,
    mixer: str = "linear",
    momentum: float = 0.0,
    init_std: float = 0.4**0.5,
    new_state: str = "fresh",
    damp_new: bool = False,
) -> Tensor:
    """``(B, R, 2 E)``: noisy state and blended embedding; see `pdkernels.recurrence_inject`."""
    _check_rows("recurrence_inject", width, embedding.shape[1], advance=advance, cursor=cursor)
    batch, rows, size = embedding.shape
    wide = torch.float64 if embedding.dtype == torch.float64 else torch.float32
    index = torch.arange(rows, device=embedding.device)
    inside = index < width[:, None]
    counts = recurrences[:, :rows]
    positions = cursor[:, None] + index
    own = seed if seeds is None else seeds[:, None]
    z = initial_state(torch.zeros_like(positions), positions, size, own, init_std).to(wide)
    e = embedding.to(wide)
    keep = 1 - torch.full_like(e, momentum)
    blended = keep * e if damp_new else e
    if state is not None:
        last, there = _shifted(state, rows, advance)
        old = inside & (counts > 0)
        for b, i in (old & ~there).nonzero().tolist():
            actual = f"{state.shape[1]} rows, and row {i} of sequence {b} was row {i + int(advance[b])}"
            raise ValueError(
                f"pdkernels.recurrence_inject: state must have the rows that recurrences counts, got {actual}."
            )
        if new_state == "copied":
            newest = torch.where(old, index, -1).amax(1) if rows else index.new_zeros(batch)
            copy = last.gather(1, newest.clamp(min=0)[:, None, None].expand(-1, -1, size)) if rows else last
            z = torch.where((newest >= 0)[:, None, None], copy.to(wide), z)
        z = torch.where(old[..., None], last.to(wide), z)
        if previous_embedding is not None:
            before = _shifted(previous_embedding, rows, advance)[0].to(wide)
            mixed = e if momentum == 0 else keep * e + torch.full_like(e, momentum) * before
            blended = torch.where(old[..., None], mixed, blended)
    if noise != 0:  # Algorithms 1 and 2, line 7: of every row, new ones too
        beta = noise_share(counts, noise, schedule, horizon, wide)[..., None]
        drawn = initial_state(steps[:, None].long() + 1, positions, size, own, init_std).to(wide)
        if mixer == "sqrt":
            mixed = _root((1 - beta).clamp(min=0)) * z + _root(beta) * drawn
        else:
            mixed = (1 - beta) * z + beta * drawn
        z = torch.where(beta != 0, mixed, z)
    result = torch.cat([z, blended], dim=-1).to(embedding.dtype)
    return torch.where(inside[..., None], result, torch.zeros_like(result))


def recurrence_exit(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    previous: Tensor | None,
    recurrences: Tensor,
    width: Tensor,
    advance: Tensor,
    threshold: float,
    older: Tensor | None = None,
    older_advance: Tensor | None = None,
    min_recurrences: int = 1,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(state, distance, converged)``; see `pdkernels.recurrence_exit`. In float64 the distance is float64 too."""
    offsets = {"advance": advance} if older_advance is None else {"advance": advance, "older_advance": older_advance}
    _check_rows("recurrence_exit", width, x.shape[1], **offsets)
    rows = x.shape[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    inside = torch.arange(rows, device=x.device) < width[:, None]
    total = x.to(wide) + residual.to(wide)
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    state = normed.to(x.dtype) * weight
    state = torch.where(inside[..., None], state, torch.zeros_like(state))
    distance = torch.full(x.shape[:2], torch.inf, dtype=wide, device=x.device)
    if previous is not None:
        now = state.to(wide)
        before, known = _shifted(previous, rows, advance)
        change = now - before.to(wide)
        if older is not None and older_advance is not None:
            first, there = _shifted(older, rows, advance + older_advance)
            known = known & there
            change = now - 2 * before.to(wide) + first.to(wide)
        moved, length = change.square().sum(-1).sqrt(), now.square().sum(-1).sqrt()
        known = known & inside & (recurrences[:, :rows].long() >= min_recurrences)
        relative = torch.where((moved == 0) & (length == 0), torch.zeros_like(moved), moved / length)
        distance = torch.where(known, relative, distance)
    return state, distance, distance < threshold


def recurrence_advance_(
    tokens: Tensor,
    predictions: Tensor,
    recurrences: Tensor,
    unchanged_steps: Tensor,
    width: Tensor,
    cursor: Tensor,
    advance: Tensor,
    steps: Tensor,
    remaining: Tensor,
    converged: Tensor | None = None,
    inner_recurrence: int = 1,
    max_wavefront: int = 0,
    max_recurrences: int = 0,
    stability: int = 0,
    rule: str = "prefix",
    headway: int = 1,
    filler: Tensor | None = None,
    end_tokens: Tensor | None = None,
    keep_changed: bool = True,
    keep_last: bool = False,
) -> None:
    """Freezes rows and starts new ones, in place; see `pdkernels.recurrence_advance_`. `max_wavefront` 0: the capacity."""
    capacity = recurrences.shape[1]
    cap = max_wavefront or capacity
    _check_rows("recurrence_advance_", width, min(predictions.shape[1], cap), cursor=cursor, remaining=remaining)
    ends = set() if end_tokens is None else set(end_tokens.tolist())
    for b, w in enumerate(width.tolist()):
        advance[b] = 0
        if w == 0:
            continue
        inputs, guesses = tokens[b].tolist(), predictions[b].tolist()
        counts, unchanged = recurrences[b].tolist(), unchanged_steps[b].tolist()
        done = [False] * w if converged is None else converged[b].tolist()
        ready = []
        for i in range(w):
            unchanged[i] = unchanged[i] + 1 if counts[i] > 0 and guesses[i] == inputs[i + 1] else 0
            counts[i] += inner_recurrence
            out_of_time = max_recurrences > 0 and counts[i] >= max_recurrences
            ready.append(done[i] or out_of_time or (stability > 0 and unchanged[i] >= stability))
        if rule == "last":
            k = max((i + 1 for i in range(w) if ready[i]), default=0)
        else:
            k = next((i for i in range(w) if not ready[i]), w)
        if keep_changed:
            k = min(k, next((i for i in range(1, w) if guesses[i - 1] != inputs[i]), w))
        if keep_last:
            k = max(k - 1, 0)
        n = min(k, int(remaining[b]))
        n = next((i + 1 for i in range(n) if guesses[i] in ends), n)
        steps[b] += 1
        advance[b] = n
        cursor[b] += n
        remaining[b] -= n
        ended = n > 0 and guesses[n - 1] in ends
        left = int(remaining[b])
        wave = 0 if ended or left == 0 else min(w - n + headway, cap, left)
        if wave > 0:
            new = [inputs[0], *guesses[:w]]
            guessed = [0] * min(headway - 1, capacity) if filler is None else filler[b].tolist()
            row = new[n:] + guessed[: max(wave - 1 - (w - n), 0)]
            tokens[b, : len(row)] = torch.tensor(row, device=tokens.device).to(
                tokens.dtype
            )  # truncated to its bits, as in the kernels
            kept = min(w - n, wave)
            counts = counts[n : n + kept] + [0] * (capacity - kept)
            unchanged = unchanged[n : n + kept] + [0] * (capacity - kept)
        width[b] = wave
        recurrences[b] = torch.tensor(counts, dtype=recurrences.dtype, device=recurrences.device)
        unchanged_steps[b] = torch.tensor(unchanged, dtype=unchanged_steps.dtype, device=unchanged_steps.device)
