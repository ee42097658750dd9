"""Requirements of masked-diffusion decoders other than the members of the model."""

from __future__ import annotations

from pdkernels._validation import check_type, refuse
from pdkernels.generation.noise import checked_mask_token
from pdkernels.generation.session import Session
from pdkernels.models.capabilities import capabilities


def checked_masked_model(op: str, session: Session, mask_token: int | None) -> int:
    """The mask token of the session's model, which must be bidirectional."""
    model = session.model
    offered = capabilities(model)
    check_type("bidirectional" in offered, op, "model", "be bidirectional", ", ".join(sorted(offered)))
    return checked_mask_token(op, model, mask_token)


def check_keeps_rows(op: str, session: Session, remedy: str) -> None:
    """Checks that the model keeps other rows in its cache, for forwards over some rows of a text."""
    check_type(
        getattr(session.model, "keeps_rows", None) is True,
        op,
        "model",
        "have keeps_rows = True (`recompute` over some rows sees the others as the cache keeps them)",
        f"{type(session.model).__name__} without it",
        remedy,
    )


def check_alone(session: Session) -> None:
    """Checks that there is only one text, for a feature cache, whose refreshes are scheduled for all texts together, and no
    adapter, since such a cache runs the parts of the layers by itself."""
    remedy = "Leave out prompt_interval."
    refuse(session.adapters is not None, "decoding.generate", "a feature cache does not follow adapters", remedy)
    is_batch = session.tails is not None and session.batch > 1
    fault = f"infill=True on a feature cache takes one prompt, got {session.batch}"
    refuse(is_batch, "decoding.generate", fault, "Generate them one by one.")
