"""Train `tiny-trimode`: `tiny-code` taught to fill in masks too, and an adapter that drafts what the causal model would say.

    python examples/train_tiny_trimode.py

takes about an hour on a CPU core with bfloat16 products and writes tiny-trimode.safetensors into the current folder. One set of weights then
decodes token by token, as block diffusion, and by speculating on itself.

Stage 1 of the paper, next tokens alone, is `tiny-code`, the start. The joint stage trains next-token prediction on a clean copy of each text and the filling of masks on a noisy copy,
packed in one sequence under a dual-stream mask; in every other step the noisy copy already holds what the model is sure of. The last one trains only the low-rank adapter of the draft pass, on texts the model
wrote itself: there the causal model's own predictions show how much of each draft would have been accepted. Nine of ten drafts are
sampled, the others greedy.

The defaults are the paper's alpha, and otherwise what small models learn fast with: Muon, a cosine, no weight decay. The paper's other
settings, as far as they have a meaning here, are --no-muon --schedule wsd --weight-decay 0.1 and, for its fine-tuning, --answers-alone.

Source: Nemotron-Labs-Diffusion, sections 2, 3.3, 5.1 and 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor
from train_tiny_code import score as score_of
from training_run import (
    HAS_BF16,
    DraftTemperature,
    Output,
    Resume,
    Run,
    SampledDrafts,
    Score,
    console,
    save,
    start_model,
)

from pdkernels.decoding import generate
from pdkernels.models import ByteTokenizer, Transformer
from pdkernels.training import (
    DualStreamBatch,
    DualStreamSample,
    arithmetic,
    as_ids,
    attach_drafter_,
    count_accepted,
    drafter_loss,
    draw_drafts,
    draw_masks,
    dual_stream_loss,
    pack_drafts,
    pack_dual_stream,
    standard_library,
)

MASK_TOKEN = ByteTokenizer.vocab_size
WIDTHS = (4, 8, 16)
"""Tokens of a block: one of them for each step."""
TILE = 64
WINDOW = 256
"""Bytes of a piece of source."""
MIN_MASKED = 0.2
"""0.001 in the paper's code. In a batch of a few short texts single masks would then have weights of up to a thousand; here up to 5."""
ADAPTER_RANK = 8
ADAPTER_SCALE = 4.0


def with_mask_token(model: Transformer) -> Transformer:
    """The same model without its adapter, with an id for the mask, which starts as the mean of the others where it is new."""
    config = replace(model.config, vocab_size=MASK_TOKEN + 1)
    wider = Transformer(config, tokenizer=model.tokenizer, end_tokens=model.end_tokens, mask_token=MASK_TOKEN)
    state = {name: tensor for name, tensor in model.state_dict().items() if "adapter" not in name}
    known = state["embedding"]
    if len(known) < config.vocab_size:
        state["embedding"] = torch.cat([known, known.mean(0, keepdim=True)])
    wider.load_state_dict(state)
    return wider


# ---- batches


def masked_positions(
    tokens: int, prompt_len: int, width: int, generator: torch.Generator, first_block: int = 0
) -> tuple[Tensor, float]:
    """Which tokens of a text are masked in its noisy copy, and with what probability; never those of the prompt. Blocks start at `first_block`.

    A quarter of the texts are masked entirely (what a group of masks after a draft sees), a quarter except for the first token of each
    block (a draft pass), a quarter at random, and a quarter at random except for the first token of each block (half-finished blocks).
    """
    kind = int(torch.randint(4, (), generator=generator))
    positions = torch.arange(tokens)
    masked, share = torch.ones(tokens, dtype=torch.bool), 1.0
    if kind >= 2:
        masked, share = draw_masks(tokens, generator, min_p_mask=MIN_MASKED)
    if kind % 2:
        masked, share = masked & ((positions - first_block) % width != 0), share * (1 - 1 / width)
    return masked & (positions >= prompt_len), share


def whole_blocks(ids: Tensor, width: int, first_block: int = 0) -> Tensor:
    """The text with end tokens up to the end of a block: a decoder's last block holds masks after the end, too."""
    return torch.cat([ids, ids.new_full(((first_block - len(ids)) % width,), int(ids[-1]))])


def joint_batches(sums: int, windows: int, seed: int, answers_alone: bool = False) -> Iterator[DualStreamBatch]:
    """Endless batches of `sums` problems and `windows` pieces of source, in blocks of one of the widths. With `answers_alone` prompts are
    not labels of the autoregressive loss either, and blocks start after them (the paper's fine-tuning)."""
    generator = torch.Generator().manual_seed(seed)
    problems, source = arithmetic(seed + 1), as_ids(standard_library()[0])
    while True:
        width = WIDTHS[int(torch.randint(len(WIDTHS), (), generator=generator))]
        texts = [
            (as_ids([(problem.prompt + problem.steps).encode()]), len(problem.prompt))
            for problem in islice(problems, sums)
        ]
        texts = [(whole_blocks(ids, width, prompt_len * answers_alone), prompt_len) for ids, prompt_len in texts]
        for start in torch.randint(len(source) - WINDOW, (windows,), generator=generator).tolist():
            texts.append((source[start : start + WINDOW], 0))
        samples = []
        for ids, prompt_len in texts:
            first = prompt_len * answers_alone
            masks = masked_positions(len(ids), prompt_len, width, generator, first)
            samples.append(DualStreamSample(ids.long(), *masks, prefix_len=first))
        yield pack_dual_stream(samples, width, MASK_TOKEN)


def own_texts(model: Transformer, sums: int, windows: int, seed: int) -> list[tuple[Tensor, int]]:
    """Texts written by the model: ids, and how many of them were given."""
    problems = list(islice(arithmetic(seed), sums))
    source, generator = as_ids(standard_library()[0]), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - WINDOW, (windows,), generator=generator).tolist()
    prompts = [as_ids([problem.prompt.encode()])[:-1].long() for problem in problems]
    prompts += [source[start : start + WINDOW // 2].long() for start in starts]
    texts = []
    for first in range(0, len(prompts), 32):
        batch = prompts[first : first + 32]
        limit = WINDOW // 2 if first >= sums else 400
        for prompt, tokens in zip(batch, generate(model, batch, max_new_tokens=limit).tokens, strict=True):
            texts.append((torch.cat([prompt, tokens]), len(prompt)))
    return texts


# ---- steps


def joint_step(model: Transformer, batch: DualStreamBatch, alpha: float) -> tuple[Tensor, dict[str, float]]:
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
    loss = dual_stream_loss(
        model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch, masked_weight=alpha
    )
    return loss.total, {"autoregressive": loss.autoregressive.item(), "masked": loss.masked.item()}


@torch.no_grad()
def without_easy_masks(model: Transformer, batch: DualStreamBatch, generator: torch.Generator) -> DualStreamBatch:
    """The batch after a decoder's first step: where the model is confident, its noisy copies hold the hidden token itself.

    What a decoder fills in later is what it was not sure of, which masks drawn at random seldom leave over.
    """
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
    sure = model.logits(hidden[batch.masked_rows]).float().softmax(-1).amax(-1)
    left = sure < 0.5 + 0.5 * torch.rand((), generator=generator)
    tokens = batch.tokens.clone()
    tokens[batch.masked_rows[~left]] = batch.masked_labels[~left]
    return batch._replace(
        tokens=tokens,
        masked_rows=batch.masked_rows[left],
        masked_labels=batch.masked_labels[left],
        masked_weights=batch.masked_weights[left],
        masked_samples=batch.masked_samples[left],
    )


def judged_drafts(
    model: Transformer,
    texts: list[tuple[Tensor, int]],
    width: int,
    generator: torch.Generator | None = None,
    *,
    sampled_share: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts of the whole blocks after the prompts of texts that the model wrote, and how far it agrees with them.

    Returns:
        Logits of the draft and of the verifier, each (blocks, width - 1, ids but the mask token), and the accepted tokens, (blocks,).
    """
    batch = pack_drafts(texts, width, MASK_TOKEN)
    plan = batch.mask.plan(TILE, TILE)
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=plan, adapted=batch.drafting)[0]
    draft = model.logits(hidden[batch.draft_rows])[..., :MASK_TOKEN]
    verifier = model.logits(hidden[batch.verifier_rows])[..., :MASK_TOKEN].detach()
    drafts = draw_drafts(draft, generator, sampled_share=sampled_share, temperature=temperature)
    return draft, verifier, count_accepted(drafts, verifier)


def drafter_step(
    model: Transformer, texts: list[tuple[Tensor, int]], width: int, generator: torch.Generator, **drawn: float
) -> tuple[Tensor, dict[str, float]]:
    draft, verifier, accepted = judged_drafts(model, texts, width, generator, **drawn)
    return drafter_loss(draft, verifier, accepted).total, {"accepted": accepted.float().mean().item()}


def cosine(steps: int, lr: float) -> Callable[[int], float]:
    """The learning rate of each step: a linear warm-up, and a cosine to 1 %."""
    warmup = max(1, steps // 30)

    def rate(number: int) -> float:
        done = max(0.0, (number - warmup) / max(1, steps - warmup))
        return lr * min(1.0, (number + 1) / warmup) * (0.495 * (1 + math.cos(math.pi * done)) + 0.01)

    return rate


def wsd(steps: int, lr: float, last: float = 0.1) -> Callable[[int], float]:
    """The learning rate of each step: a linear warm-up, a constant rate, and in the last fifth a linear decay to the share `last` of it.

    The paper names the schedule (WSD), the first rate and the last, 0.3 of it in pretraining and 0.1 in fine-tuning; the fifth is not from it.
    """
    warmup = max(1, steps // 30)

    def rate(number: int) -> float:
        left = min(1.0, (steps - number) / max(1.0, 0.2 * steps))
        return lr * min(1.0, (number + 1) / warmup) * (last + (1 - last) * left)

    return rate


# ---- scores


def report(
    model: Transformer, problems: int, width: int = 8, advance: Callable[[int], None] = lambda count: None
) -> str:
    held_out = list(islice(arithmetic(0, held_out=True), problems))
    right, _ = score_of(model, "autoregressive", held_out, advance)
    _, linear = score_of(model, "linear_self_speculation", held_out, advance, block_size=width)
    _, quadratic = score_of(model, "quadratic_self_speculation", held_out, advance, block_size=width)
    diffused, diffusion = score_of(model, "block_diffusion", held_out, advance, block_size=width)
    return (
        f"held-out sums: {right:.0%} right, by block diffusion {diffused:.0%}; tokens per forward at width {width}: linear "
        f"{linear:.2f} ({2 * linear:.2f} per cycle), quadratic {quadratic:.2f}, block diffusion {diffusion:.2f}"
    )


def main(
    output: Output = Path("tiny-trimode.safetensors"),
    start: Annotated[
        str, typer.Option(help="Name, folder or file of the autoregressive model to start from.")
    ] = "tiny-code",
    steps: Annotated[int, typer.Option(help="Steps of the joint stage.")] = 4000,
    drafter_steps: Annotated[int, typer.Option(help="Steps of the adapter's stage.")] = 400,
    sums: Annotated[int, typer.Option(help="Problems per step.")] = 8,
    windows: Annotated[int, typer.Option(help="Pieces of source per step.")] = 1,
    alpha: Annotated[
        float, typer.Option(help="Weight of the masked loss; the paper's. The shipped weights had 1.0.")
    ] = 0.3,
    answers_alone: Annotated[bool, typer.Option(help="No loss on prompts, as in the paper's fine-tuning.")] = False,
    schedule: Annotated[
        Literal["cosine", "wsd"], typer.Option(help="Of the joint stage; the paper's is WSD.")
    ] = "cosine",
    weight_decay: Annotated[float, typer.Option(help="In the joint stage; the paper's is 0.1.")] = 0.0,
    muon: Annotated[
        bool, typer.Option(help="Muon for matrices in the joint stage; the paper trains with AdamW.")
    ] = True,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the joint stage.")] = 1.5e-3,
    drafter_lr: Annotated[float, typer.Option(help="Peak learning rate of the adapter.")] = 2e-3,
    sampled_drafts: SampledDrafts = 0.9,
    draft_temperature: DraftTemperature = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of masks, texts, order and sampled drafts.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    fast: Annotated[
        bool, typer.Option(help="bfloat16 in the joint stage, where the CPU multiplies it itself.")
    ] = HAS_BF16,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out sums.")] = 500,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-trimode and save it, rounded to bf16."""
    settings = {"start": start, "steps": steps, "drafter_steps": drafter_steps, "sums": sums, "windows": windows}
    settings |= {"alpha": alpha, "lr": lr, "drafter_lr": drafter_lr, "seed": seed, "fast": fast}
    settings |= {"answers_alone": answers_alone, "schedule": schedule, "weight_decay": weight_decay, "muon": muon}
    settings |= {"sampled_drafts": sampled_drafts, "draft_temperature": draft_temperature}
    run = Run(output, resume, settings, threads)
    torch.manual_seed(seed)
    model = with_mask_token(start_model(start))
    batches, generator = joint_batches(sums, windows, seed, answers_alone), torch.Generator().manual_seed(seed)

    def joint(number: int) -> tuple[Tensor, dict[str, float]]:
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            if number % 2:
                batch = without_easy_masks(model, batch, generator)
            return joint_step(model, batch, alpha)

    def look() -> str:
        return report(model, 50)

    with run.stoppable():
        rates, weights = (wsd if schedule == "wsd" else cosine)(steps, lr), list(model.parameters())
        streams = {"skip": lambda number: next(batches), "generators": [generator]}
        looks, kind = {"look": look, "look_every": look_every}, {"muon": muon, "weight_decay": weight_decay}
        run.optimise("joint", model, weights, steps, rates, joint, **streams, **looks, **kind)
        model.requires_grad_(False)
        if drafter_steps:
            if score:
                console.print(report(model, 100))
            texts = own_texts(model, 640, 64, seed + 2)
            adapter = list(attach_drafter_(model, ADAPTER_RANK, scale=ADAPTER_SCALE))
            chance = torch.Generator().manual_seed(seed + 3)
            drawn = {"sampled_share": sampled_drafts, "temperature": draft_temperature}

            def draft(number: int) -> tuple[Tensor, dict[str, float]]:
                chosen = torch.randperm(len(texts), generator=generator)[: sums + windows].tolist()
                width = WIDTHS[int(torch.randint(1, len(WIDTHS), (), generator=generator))]
                return drafter_step(model, [texts[index] for index in chosen], width, chance, **drawn)

            rates = cosine(drafter_steps, drafter_lr)
            run.optimise("drafter", model, adapter, drafter_steps, rates, draft, generators=[generator, chance])
        model.to(torch.bfloat16).float().requires_grad_(False)
        facts: dict[str, str] = {}
        if score:
            with run.scoring(4 * 200) as advance:
                facts = {"held_out": report(model, 200, advance=advance)}
        save(run, model, "byte-level, tri-mode, Python's standard library and arithmetic", **facts)


if __name__ == "__main__":
    typer.run(main)
