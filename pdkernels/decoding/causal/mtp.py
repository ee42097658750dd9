"""Multi-token prediction: the extra layer that comes with a model drafts from its last hidden state, and one forward of
the model verifies.

Source: "DeepSeek-V3" (arXiv 2412.19437), section 2.2. Drafts of several tokens take the one layer again on its own
rows, as EAGLE does.
"""

from __future__ import annotations

from typing import Any

from pdkernels.decoding.causal.eagle import EagleSteps
from pdkernels.decoding.costs import BlockSize
from pdkernels.decoding.steps import decoder
from pdkernels.generation.session import Session
from pdkernels.models import MtpHead


class MtpSteps(EagleSteps):
    """The steps of `eagle`, in chains.

    Args:
        drafter: the `MtpHead` of this model, or its folder, which is that of the model
            (`pdkernels.models.load_drafter`); None: the model's ``drafters["mtp"]``.
        block_size: tokens of a draft, the known first one included; 1 is autoregressive decoding, and 2 what the layer
            was trained for. "auto" chooses the length of each draft by the measured times of forwards and by what was
            accepted so far; then it is never much slower than decoding token by token.
        temperature: sampling temperature; 0 is greedy. Drafter and target draw with the same noise and the same
            filters, so the tokens are those that `autoregressive` samples with the same seed.
    """

    kind = MtpHead

    def __init__(
        self,
        session: Session,
        *,
        drafter: Any = None,
        block_size: BlockSize = 2,
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        super().__init__(
            session, drafter=drafter, block_size=block_size, allow_mask_token=allow_mask_token, page_size=page_size
        )


decode = decoder(MtpSteps)
