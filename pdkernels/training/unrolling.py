"""Training of recurrent depth: how often the core runs in a step, and a forward whose graph has the last runs only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from pdkernels._validation import check, check_choice, check_number, check_type, integer
from pdkernels.models.architectures.recurrent_depth import STATE_STD, RecurrentDepth

Law = Literal["lognormal_poisson", "exponential"]


def draw_recurrences(
    mean: float, generator: torch.Generator, *, law: Law = "lognormal_poisson", spread: float = 0.5
) -> int:
    """A number of recurrences for a training step, at least 1 and `mean` on average.

    Args:
        mean: at least 1.
        generator: on the CPU.
        law: "lognormal_poisson", for pretraining: 1 plus a draw from a Poisson distribution whose own mean is drawn
            from a log-normal one. "exponential", for fine-tuning: an exponential draw, rounded up; its rate is the one
            at which that has this mean.
        spread: standard deviation of the logarithm of the Poisson distribution's mean.

    Raises:
        ValueError: a mean below 1, a negative spread, an unknown law.
        TypeError: other types.

    Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 3.3; "Efficient parallel
    samplers for recurrent-depth models", section 3.1 and appendix A.3.

    Example:
        >>> import torch
        >>> from pdkernels.training import draw_recurrences
        >>> generator = torch.Generator().manual_seed(0)
        >>> draws = [draw_recurrences(16, generator, law="exponential") for _ in range(2000)]
        >>> min(draws), round(sum(draws) / 2000)
        (1, 16)
    """
    op = "training.draw_recurrences"
    check_number(op, "mean", mean, 1, 1e6, "be from 1 to 1e6")
    check_number(op, "spread", spread, 0, 10, "be from 0 to 10")
    check_choice(op, "law", law, get_args(Law))
    check_type(
        isinstance(generator, torch.Generator), op, "generator", "be a torch.Generator", type(generator).__name__
    )
    if law == "exponential":
        if mean == 1:
            return 1
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64, device="cpu"))
        return max(1, math.ceil(math.log1p(-uniform) / math.log1p(-1 / mean)))
    rate = math.exp(
        spread * float(torch.randn((), generator=generator, dtype=torch.float32, device="cpu")) - spread**2 / 2
    ) * (mean - 1)
    return 1 + int(torch.poisson(torch.tensor(rate, dtype=torch.float32, device="cpu"), generator=generator))


def unrolled_logits(
    model: RecurrentDepth,
    tokens: Tensor,
    recurrences: int,
    generator: torch.Generator,
    *,
    backward_recurrences: int = 8,
    rows: Tensor | Sequence[int] | slice | None = None,
) -> Tensor:
    """Logits after a number of recurrences; gradients go through the last of them (truncated backpropagation).

    The states begin as normal numbers, truncated at three times their standard deviation. Every recurrence reads the
    embedding, so the prelude has gradients from each of the last ones.

    Args:
        model: whose weights are trained.
        tokens: ``(batch, T)`` ids.
        recurrences: for all sequences of the batch, such as from `draw_recurrences`.
        generator: of the states, on the model's device.
        backward_recurrences: how many of the last recurrences keep a graph; memory grows with them alone. 0: the coda
            alone is trained.
        rows: of each sequence, that need logits; None: all.

    Returns:
        ``(batch, T, vocab_size)``, or the rows.

    Raises:
        ValueError: fewer than 1 recurrence, a negative number with a graph.
        TypeError: a model of another kind, numbers that are no ints.

    Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 3.3, which keeps 8.

    Example:
        >>> import torch, pdkernels as pd
        >>> from pdkernels.training import unrolled_logits
        >>> model = pd.models.load("tiny-recurrent").requires_grad_(True)
        >>> ids = torch.tensor([[49, 43, 49]])
        >>> logits = unrolled_logits(model, ids, 12, torch.Generator().manual_seed(0), backward_recurrences=2)
        >>> torch.nn.functional.cross_entropy(logits[0], torch.tensor([43, 49, 61])).backward()
        >>> logits.shape
        torch.Size([1, 3, 257])
    """
    op = "training.unrolled_logits"
    check_type(isinstance(model, RecurrentDepth), op, "model", "be a RecurrentDepth", type(model).__name__)
    integer(op, "recurrences", recurrences, 1)
    integer(op, "backward_recurrences", backward_recurrences, 0)
    check(tokens.dim() == 2 and tokens.shape[1] > 0, op, "tokens", "have shape (batch, T)", tuple(tokens.shape))
    context = model.context(tokens.shape[1])
    embedding = model.prelude(tokens, context)
    term = model.embedding_term(embedding)
    state = torch.empty_like(embedding, requires_grad=False)
    torch.nn.init.trunc_normal_(state, std=STATE_STD, a=-3 * STATE_STD, b=3 * STATE_STD, generator=generator)
    with torch.no_grad():
        for _ in range(recurrences - backward_recurrences):
            state = model.core(state, term, context)
    for _ in range(min(recurrences, backward_recurrences)):
        state = model.core(state, term, context)
    return model.coda(state, context, rows)
