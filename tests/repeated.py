"""Twenty calls of SDPA in a row: `make gpu` has the gate hold them against 20, and against 21."""

from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import AttentionCall, Case, attention_builder

TIMES = 20


@attention_builder("repeated", masks=("full", "causal"))
def repeated(case: Case) -> AttentionCall:
    """SDPA, `TIMES` times over; the last output counts."""

    def call(q, k, v, /):  # type: ignore[no-untyped-def]
        for _ in range(TIMES):
            o = scaled_dot_product_attention(
                q, k, v, is_causal=not case.unmasked, scale=case.softmax_scale
            )
        return o

    return call
