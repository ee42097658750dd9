"""A small network that decides which guesses of a block are final, in place of a confidence threshold.

Source: Nemotron-Labs-Diffusion, section 3.2 and appendix A. Features and shapes are those of the released sampler (the
SGLang fork's ``learned_sampler``); its checkpoints load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels._validation import check, check_shape, check_type, fail
from pdkernels.models.architectures.fused import linear
from pdkernels.ops.token_statistics import TokenStatistics

_OP = "models.SamplerHead"
SCALARS = 16
"""Number of features other than token vectors: 12 before and 4 after them."""


@dataclass(frozen=True)
class SamplerConfig:
    """Sizes of a `SamplerHead`. The paper's has width 384, feed_forward 768 and 4.8 M parameters.

    Attributes:
        semantics: size of a token's vector.
        width: of the network.
        feed_forward: of its layers; the hidden width of a "pointwise" network.
        layers: how many; linear ones in a "pointwise" network.
        heads: of attention.
        norm_heads: whether queries and keys are normalised.
        pre_encoder: whether two linear layers precede the others, instead of one.
        kind: "attention": every position sees the whole block. "pointwise": each is scored alone, the paper's ablation.
    """

    semantics: int = 32
    width: int = 192
    feed_forward: int = 384
    layers: int = 4
    heads: int = 8
    norm_heads: bool = True
    pre_encoder: bool = False
    kind: Literal["attention", "pointwise"] = "attention"

    def __post_init__(self) -> None:
        for name in ("semantics", "width", "feed_forward", "layers", "heads"):
            check(getattr(self, name) >= 1, "models.SamplerConfig", name, "be at least 1", getattr(self, name))
        check(
            self.kind in ("attention", "pointwise"),
            "models.SamplerConfig",
            "kind",
            "be 'attention' or 'pointwise'",
            self.kind,
        )
        size = self.width // self.heads
        valid = self.kind == "pointwise" or (self.width % self.heads == 0 and size % 2 == 0)
        check(
            valid, "models.SamplerConfig", "width", "be an even number for each of the heads", (self.width, self.heads)
        )
        check(
            self.kind == "attention" or self.layers >= 2, "models.SamplerConfig", "layers", "be at least 2", self.layers
        )

    @property
    def features(self) -> int:
        """Features per position.

        >>> SamplerConfig().features, SamplerConfig(semantics=16).features
        (144, 80)
        """
        return SCALARS + 4 * self.semantics


def semantic_table(embedding: Tensor, width: int = 32) -> Tensor:
    """``(ids, width)`` fp16: the first principal components of centred embeddings, each with its largest entry
    positive.

    Components missing from a small vocabulary or embedding are 0.

    Args:
        embedding: ``(ids, hidden)``.

    Example:
        >>> table = semantic_table(torch.eye(6), 4)
        >>> table.shape, table.dtype
        (torch.Size([6, 4]), torch.float16)
    """
    check(embedding.dim() == 2, _OP, "embedding", "have shape (ids, hidden)", tuple(embedding.shape))
    centred = embedding.detach().double() - embedding.detach().double().mean(0)
    u, values, _ = torch.linalg.svd(centred, full_matrices=False)
    scores = (u * values)[:, :width]
    # The sign of a component is arbitrary.
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    return F.pad(scores * largest.sign(), (0, width - scores.shape[1])).half()


def sampler_features(statistics: TokenStatistics, tokens: Tensor, active: Tensor, table: Tensor) -> Tensor:
    """The input of the network for every position of a block: ``(batch, size, 16 + 4 * width)`` float32.

    ======================  ==================================================================================
    features                of a position
    ======================  ==================================================================================
    0 .. 4                  the five largest probabilities p1 .. p5
    5 .. 8                  p1, p1 - p2, p1 + p2 + p3, the entropy of the five
    9 .. 11                 1 if active, 0, share of active positions
    12 ..                   vectors of the token (the mask's, if masked) and of the three best guesses
    the last four           log p1, 1 - sum of p², index / (size - 1), log(1 + active positions)
    ======================  ==================================================================================

    Args:
        statistics: `token_statistics` of the block's rows, ``(batch, size)``, at least its `top_ids` and `top_probs`
            for ``top_k=5``, without suppressed tokens; fewer for a smaller vocabulary.
        tokens: ``(batch, size)`` the block as the forward saw it.
        active: ``(batch, size)`` bool: masks that may be filled.
        table: ``(ids, width)``, see `semantic_table`; higher ids use its last row.

    Raises:
        ValueError: shapes that do not fit.

    Example: four positions with probabilities 1/2, 1/4, 1/8, 1/16, 1/16, of which two are active.
        >>> import pdkernels as pd
        >>> logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log().expand(1, 4, 5)
        >>> active = torch.tensor([[False, True, True, False]])
        >>> features = sampler_features(pd.token_statistics(logits), torch.zeros(1, 4, dtype=int), active, torch.zeros(5, 32))
        >>> [round(float(number), 4) for number in features[0, 1, [0, 6, 7, 8, 11, 140, 141, 142, 143]]]
        [0.5, 0.25, 0.875, 1.2997, 0.5, -0.6931, 0.6641, 0.3333, 1.0986]
    """
    op = "models.sampler_features"
    check_shape(op, "active", active, tuple(tokens.shape))
    batch, size = tokens.shape
    check(
        statistics.top_ids.shape[:-1] == tokens.shape,
        op,
        "statistics",
        f"be about {batch} blocks of {size}",
        tuple(statistics.ids.shape),
    )
    top_count = statistics.top_ids.shape[-1]
    check(top_count >= min(2, len(table)), op, "statistics", "have top_k=5", f"top_k={top_count}")
    probs = (
        F.pad(statistics.top_probs.float(), (0, 5 - top_count))[..., :5]
        if top_count < 5
        else statistics.top_probs[..., :5].float()
    )
    first = probs[..., 0]
    count = active.sum(1, keepdim=True).float().expand(batch, size)
    entropy = -(probs * (probs + 1e-10).log()).sum(-1)
    scalars = [first, first - probs[..., 1], probs[..., :3].sum(-1), entropy, active.float(), torch.zeros_like(first)]
    ids = torch.cat([tokens.unsqueeze(-1), statistics.top_ids[..., :3]], -1).clamp(0, len(table) - 1)
    vectors = F.pad(table[ids].float().flatten(-2), (0, table.shape[1] * (4 - ids.shape[-1])))
    index = torch.arange(size, device=tokens.device, dtype=torch.float32).expand(batch, size) / max(size - 1, 1)
    last = [(first + 1e-10).log(), 1 - (probs**2).sum(-1), index, (count + 1).log()]
    return torch.cat([probs, torch.stack([*scalars, count / size], -1), vectors, torch.stack(last, -1)], -1)


class _Attention(nn.Module):
    """Every position of a block sees all of it. Names of submodules here and below are those of the released
    checkpoints."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__()
        self.heads, self.size = config.heads, config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.q_norm = nn.LayerNorm(self.size) if config.norm_heads else nn.Identity()
        self.k_norm = nn.LayerNorm(self.size) if config.norm_heads else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = _apply(self.qkv, x).view(batch, length, 3, self.heads, self.size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = _rotated(self.q_norm(q)), _rotated(self.k_norm(k))
        # Written out, so that sums over a block are the same for a sequence alone and in a batch.
        weights = (q @ k.transpose(-1, -2) * self.size**-0.5).softmax(-1)
        return _apply(self.proj, (weights @ v).transpose(1, 2).reshape(batch, length, width))


def _rotated(x: Tensor) -> Tensor:
    """RoPE with base 10,000 on adjacent pairs, ``(batch, heads, length, size)``."""
    length, size = x.shape[-2:]
    index = torch.arange(length, device=x.device, dtype=torch.float32)
    rates = 10000.0 ** -(torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angles = index[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class _Layer(nn.Module):
    def __init__(self, config: SamplerConfig) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(config.width), _Attention(config), nn.LayerNorm(config.width)
        # The released modules have dropout at 2 and 4, which have no weights.
        modules = {"0": nn.Linear(config.width, config.feed_forward), "3": nn.Linear(config.feed_forward, config.width)}
        self.ff = nn.ModuleDict(modules)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + _apply(self.ff["3"], F.gelu(_apply(self.ff["0"], self.norm2(x))))


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    return linear(x, weight, bias)


class SamplerHead(nn.Module):
    """Scores for the guesses of a block; `generate(..., "block_diffusion", sampler=head, threshold=...)` fills in
    guesses that score at least the threshold.

    Args:
        config: sizes.
        table: ``(ids, config.semantics)``, a vector for every token; `semantic_table` makes one from a model's
            embeddings.

    Features are normalised by the buffers `mean` and `std`, which training sets.

    Example:
        >>> head = SamplerHead(SamplerConfig(semantics=8, width=32, feed_forward=64, layers=2, heads=4), torch.zeros(300, 8))
        >>> sum(parameter.numel() for parameter in SamplerHead(SamplerConfig(width=384, feed_forward=768), torch.zeros(9, 32)).parameters())
        4793089
        >>> head(torch.zeros(1, 4, head.config.features)).shape
        torch.Size([1, 4])
    """

    mean: Tensor
    std: Tensor
    table: Tensor

    def __init__(self, config: SamplerConfig, table: Tensor) -> None:
        super().__init__()
        check_type(isinstance(config, SamplerConfig), _OP, "config", "be a SamplerConfig", type(config).__name__)
        check(
            table.dim() == 2 and table.shape[1] == config.semantics and len(table) > 0,
            _OP,
            "table",
            f"have shape (ids, {config.semantics})",
            tuple(table.shape),
        )
        self.config = config
        size, width = config.features, config.width
        if config.kind == "pointwise":
            widths = [size, *[config.feed_forward] * (config.layers - 1)]
            layers = {str(2 * i): nn.Linear(a, b) for i, (a, b) in enumerate(zip(widths, [*widths[1:], 1]))}
            self.net = nn.ModuleDict(layers)
        else:
            middle = max(width, size)
            encoder = {"0": nn.Linear(size, middle), "2": nn.LayerNorm(middle), "4": nn.Linear(middle, width)}
            self.input_proj = nn.ModuleDict(encoder) if config.pre_encoder else nn.Linear(size, width)
            self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 1)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.register_buffer("table", table.clone())

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, features: Tensor) -> Tensor:
        """``(batch, size)`` logits of normalised `features` ``(batch, size, config.features)``."""
        x = features.to(self.dtype)
        if self.config.kind == "pointwise":
            *inner, last = self.net.values()
            for layer in inner:
                x = F.gelu(_apply(layer, x))
            return _apply(last, x).squeeze(-1)
        if isinstance(self.input_proj, nn.ModuleDict):
            first, norm, second = self.input_proj.values()
            x = _apply(second, norm(F.gelu(_apply(first, x))))
        else:
            x = _apply(self.input_proj, x)
        for layer in self.layers:
            x = layer(x)
        return _apply(self.head, self.norm(x)).squeeze(-1)

    def normalised(self, features: Tensor) -> Tensor:
        """Standardised features. A feature that was constant in training is 0 at that value."""
        return (features - self.mean.float()) / self.std.float().clamp(min=1e-6)

    def scores(self, statistics: TokenStatistics, tokens: Tensor, active: Tensor) -> Tensor:
        """``(batch, size)`` float32: the probability that each guess is final. Arguments are those of
        `sampler_features`."""
        features = sampler_features(statistics, tokens, active, self.table)
        scores: Tensor = self(self.normalised(features)).float().sigmoid()
        return scores


def save_sampler(head: SamplerHead, folder: str | Path) -> None:
    """Writes a head in the released format: ``checkpoint.pt`` and ``token_semantics_32d.pt`` (whatever its width),
    tensors and numbers.

    Example:
        >>> import tempfile
        >>> head = SamplerHead(SamplerConfig(semantics=4, width=16, feed_forward=8, layers=1, heads=2), torch.zeros(9, 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_sampler(head, folder)
        ...     load_sampler(folder).config == head.config
        True
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    buffers = {"mean", "std", "table"}
    config = head.config
    storable = config.kind == "pointwise" or config.norm_heads or config.heads == 8
    check(
        storable,
        "models.save_sampler",
        "head",
        "have 8 heads without norms, which the format takes for granted",
        config.heads,
    )
    state = {name: value for name, value in head.state_dict().items() if name not in buffers}
    checkpoint: dict[str, Any] = {"f_dim": config.features, "feat_mean": head.mean, "feat_std": head.std}
    if config.kind == "pointwise":
        checkpoint |= {"arch": "pointwise_mlp", "hidden_dim": config.feed_forward, "n_layers": config.layers}
    else:
        checkpoint |= {"arch": "transformer", "d_model": config.width}
    torch.save({"state_dict": state, **checkpoint}, folder / "checkpoint.pt")
    torch.save(head.table.half(), folder / "token_semantics_32d.pt")


def load_sampler(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> SamplerHead:
    """A head from a folder with ``checkpoint.pt`` and ``token_semantics_32d.pt``, the released format.

    Only tensors are read, and nothing in the folder is run: checkpoints of the second version, which come with code,
    are refused.

    Raises:
        ValueError: another format, or weights of other shapes.
        FileNotFoundError: no such files.
    """
    op, folder = "models.load_sampler", Path(folder)
    checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    table = torch.load(folder / "token_semantics_32d.pt", map_location="cpu", weights_only=True)
    valid = (
        isinstance(checkpoint, dict)
        and {"state_dict", "feat_mean", "feat_std"} <= checkpoint.keys()
        and isinstance(table, Tensor)
    )
    check(
        valid,
        op,
        "checkpoint.pt",
        "hold state_dict, feat_mean and feat_std",
        "others",
        "Version 2 needs code and is not loaded.",
    )
    state: dict[str, Tensor] = checkpoint["state_dict"]
    head = SamplerHead(_config_of(op, checkpoint, state), table)
    expected = {name: value.shape for name, value in head.state_dict().items() if name not in ("mean", "std", "table")}
    for name in sorted(expected.keys() | state.keys()):
        expected_shape, actual_shape = expected.get(name), state[name].shape if name in state else None
        if expected_shape != actual_shape:
            fail(
                op,
                f"checkpoint.pt: {name}",
                f"have shape {tuple(expected_shape) if expected_shape else 'none'}",
                tuple(actual_shape) if actual_shape else "none",
            )
    for name in ("mean", "std"):
        check_shape(op, f"checkpoint.pt: feat_{name}", checkpoint[f"feat_{name}"], (head.config.features,))
    head.load_state_dict({**state, "mean": checkpoint["feat_mean"], "std": checkpoint["feat_std"], "table": table})
    return head.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _config_of(op: str, checkpoint: dict[str, Any], state: dict[str, Tensor]) -> SamplerConfig:
    features = int(checkpoint["feat_mean"].shape[0])
    check(
        features > SCALARS and (features - SCALARS) % 4 == 0,
        op,
        "checkpoint.pt: feat_mean",
        "have 16 + 4 n numbers",
        features,
    )
    semantics = (features - SCALARS) // 4
    if checkpoint.get("arch", "transformer") == "pointwise_mlp":
        hidden, layers = int(checkpoint["hidden_dim"]), int(checkpoint["n_layers"])
        return SamplerConfig(semantics=semantics, feed_forward=hidden, layers=layers, kind="pointwise")
    for name in ("layers.0.ff.0.weight", "head.weight"):
        check(name in state, op, "checkpoint.pt", f"hold {name}", "none")
    width = int(checkpoint["d_model"])
    norm = state.get("layers.0.attn.q_norm.weight")
    return SamplerConfig(
        semantics=semantics,
        width=width,
        feed_forward=len(state["layers.0.ff.0.weight"]),
        layers=sum(name.endswith(".attn.qkv.weight") for name in state),
        heads=8 if norm is None else width // len(norm),
        norm_heads=norm is not None,
        pre_encoder="input_proj.0.weight" in state,
    )
