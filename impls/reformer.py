"""Reformer: attention within buckets of alike tokens, found by locality-sensitive hashing.

Kitaev, Kaiser & Levskaya 2020 (arXiv 2001.04451), section 2. Queries and keys are one: the key of a
token is its query at length 1, and the `k` that is given is not read. A round hashes tokens by the
largest entry of [xR; −xR], R a random rotation drawn from `seed`; tokens of a bucket in order of
their place are cut into chunks, and a chunk attends to itself and the one before. A token attends
to itself only where there is nothing else. The outputs of several rounds are joined by their
log-sum-exps, so that a pair that meets in two of them counts twice: its weight is 2·exp(score).

The paper divides the weight of a pair that meets in N rounds by N (its appendix A), so that it
counts once; that takes each round the buckets of all. Nor do chunks cross from one bucket into the
next here: there, a later token that changes its bucket shifts what earlier ones attend to, even
under `causal`.

Letters beyond the usual ones: `N` = B·H; `C` chunks of `M` slots, `P` = C·M, each for one token or
empty; `Z` = 2M, the slots of the chunk before and of the own one.
"""

import torch
from torch.nn.functional import normalize

from attnbench.api import AttentionCall, Case, Estimate, attention_builder, core_flops

ALONE = -1e5  # the score of a token with itself: of no weight beside any other


def draw(case: Case, buckets: int, rounds: int, seed: int) -> torch.Tensor:
    """Rotations (rounds, D, buckets/2), in float64: a tie that rounding decides is rare.

    By their FLOPs the hashes take as long as the rest where float64 runs at 1/64 of float32's rate.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = rounds, case.head_dim, buckets // 2
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(case.device)


def hashed(q: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The bucket of each token, (…, L); of one bucket there is no rotation."""
    turned = q.detach().double() @ rotation
    no_bucket = turned.new_zeros(*turned.shape[:-1], int(not rotation.numel()))
    return torch.cat((turned, -turned, no_bucket), dim=-1).argmax(-1)


def chunks_of(case: Case, buckets: int, chunk: int) -> int:
    """C, enough whatever the sizes of the buckets: all chunks but the last of each are full."""
    return case.seq_len // chunk + min(buckets, case.seq_len)


def sort(bucket_NL: torch.Tensor, buckets: int, chunks: int, chunk: int) -> list[torch.Tensor]:
    """The token of each slot, (N, P), L where it is empty; and the slot of each token, (N, L)."""
    slices, tokens = bucket_NL.shape
    sorted_NL, token_NL = bucket_NL.sort(dim=1, stable=True)
    size_NK = torch.zeros_like(bucket_NL[:, :1]).expand(-1, buckets).clone()
    size_NK.scatter_add_(1, bucket_NL, torch.ones_like(bucket_NL))
    chunks_NK = (size_NK + chunk - 1) // chunk
    # Where a bucket begins among the slots, less where it begins among the sorted tokens.
    shift_NK = (chunks_NK.cumsum(1) - chunks_NK) * chunk - (size_NK.cumsum(1) - size_NK)
    slot_NL = torch.arange(tokens, device=token_NL.device) + shift_NK.gather(1, sorted_NL)
    token_NP = token_NL.new_full((slices, chunks * chunk), tokens).scatter_(1, slot_NL, token_NL)
    return [token_NP, torch.empty_like(token_NL).scatter_(1, token_NL, slot_NL)]


def rows(x_NLD: torch.Tensor, index_NP: torch.Tensor) -> torch.Tensor:
    """The rows of x that the index names, (N, P, D)."""
    first_N1 = torch.arange(len(x_NLD), device=x_NLD.device).unsqueeze(1) * x_NLD.shape[1]
    index = (index_NP + first_N1).view(-1, 1).expand(-1, x_NLD.shape[2])
    return x_NLD.flatten(0, 1).gather(0, index).view(len(x_NLD), -1, x_NLD.shape[2])


def with_previous(x_NCMD: torch.Tensor) -> torch.Tensor:
    """Each chunk beside the one before it, (N, C, Z, D); of the first that is the last."""
    return torch.cat((x_NCMD.roll(1, dims=1), x_NCMD), dim=2)


def flops(case: Case, *, buckets: int, rounds: int, chunk: int, pairs: int = 0) -> int:
    """Executed: all slots of all chunks, with no scores made again; and the hashes, once."""
    pairs = rounds * (pairs or chunks_of(case, buckets, chunk) * chunk * 2 * chunk)
    hashes = case.batch * case.heads * case.seq_len * 2 * case.head_dim * rounds * (buckets // 2)
    return core_flops(case, pairs, recompute=False) + (hashes if case.pass_ != "backward" else 0)


def useful(case: Case, *, buckets: int, rounds: int, chunk: int) -> int:
    """The least that buckets of one size need, in whole chunks: of others the inputs decide."""
    size, causal = case.seq_len // buckets, case.mask.text == "causal"
    own = min(chunk, size)
    size -= size % own
    pairs = (size * (own + 1) // 2 if causal else size * own) + own * (size - own)
    return flops(case, buckets=buckets, rounds=rounds, chunk=chunk, pairs=buckets * pairs)


def workspace(case: Case, *, buckets: int, rounds: int, chunk: int) -> Estimate:
    """About the bytes of a round's slots, two matrices of scores and q and v in four forms.

    And the outputs of all rounds; where a backward pass follows, autograd keeps their slots, too.
    """
    slots = chunks_of(case, buckets, chunk) * chunk * (1 + rounds * (case.pass_ == "both"))
    of_slots = slots * 4 * (chunk + case.head_dim + case.value_dim)
    outputs = case.seq_len * rounds * (case.value_dim + 1)
    return Estimate(case.batch * case.heads * (of_slots + outputs) * max(4, case.element_bytes))


def definition(case: Case, *, buckets: int, rounds: int, chunk: int, seed: int) -> AttentionCall:
    """Softmax over the pairs that meet, each as often as it does, with itself but where alone."""
    rotations = draw(case, buckets, rounds, seed)

    def attend(q_BHLD: torch.Tensor, _k: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        v_BHSV = v_BGSV.repeat_interleave(case.heads // case.kv_heads, dim=1)
        wide = torch.promote_types(q_BHLD.dtype, torch.float32)
        q = q_BHLD.to(wide)
        meetings = torch.zeros_like(q[..., :1] @ q[..., :1].mT)
        for rotation in rotations:
            bucket = hashed(q, rotation)
            same = bucket.unsqueeze(-1) == bucket.unsqueeze(-2)
            number = same.tril(-1).sum(-1) // chunk  # of its chunk in the bucket
            behind = number.unsqueeze(-1) - number.unsqueeze(-2)
            meetings += same & (behind >= 0) & (behind <= 1)
        if case.mask.text == "causal":
            meetings = meetings.tril()
        scores = (q * case.softmax_scale) @ normalize(q, dim=-1).mT + meetings.log()
        own = torch.eye(case.seq_len, dtype=torch.bool, device=q.device)
        return (scores.masked_fill(own, ALONE).softmax(-1) @ v_BHSV.to(wide)).to(q_BHLD.dtype)

    return attend


def supports(case: Case, *, buckets: int) -> str | None:
    """Why there can be no such buckets, or none at all; None where there can."""
    if case.seq_len != case.kv_len:
        return "queries are the keys, too: there must be as many of the one as of the other"
    if case.position.name != "none":
        return "buckets are of queries as they are given: takes no position encoding"
    if buckets > case.kv_len:
        return f"more buckets than keys: {buckets} for {case.kv_len}"
    odd = buckets % 2 and buckets > 1
    return "buckets must be 1 or even: a direction and its opposite" if odd else None


@attention_builder(
    "reformer",
    family="sparse",
    time="n d",
    memory="O(n)",
    workloads=("attention",),  # queries that were computed in half precision hash differently
    definition=definition,
    flops=flops,
    useful=useful,
    workspace=workspace,
    supports=supports,
)
def reformer(
    case: Case, *, buckets: int = 8, rounds: int = 2, chunk: int = 64, seed: int = 0
) -> AttentionCall:
    """LSH attention: tokens of a bucket, queries as keys."""
    rotations, chunks = draw(case, buckets, rounds, seed), chunks_of(case, buckets, chunk)
    later_MZ = torch.ones(chunk, 2 * chunk, dtype=torch.bool, device=case.device)
    # In a bucket tokens stand in the order of their places.
    later_MZ = later_MZ.triu(chunk + 1 if case.mask.text == "causal" else 2 * chunk)

    def attend_round(
        q_NLD: torch.Tensor, v_NLV: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (N, L, V) and log-sum-exp (N, L, 1) of one round."""
        bucket_NL, tokens = hashed(q_NLD, rotation), q_NLD.shape[1]
        token_NP, slot_NL = sort(bucket_NL, buckets, chunks, chunk)
        filled_NP = token_NP.clamp(max=tokens - 1)
        q_NCMD, v_NCMV = (
            rows(x, filled_NP).view(len(x), chunks, chunk, -1) for x in (q_NLD, v_NLV)
        )
        # A slot is hidden that is empty, or whose chunk is of the bucket before.
        own_NCM = bucket_NL.gather(1, filled_NP).masked_fill(token_NP == tokens, -1)
        own_NCM = own_NCM.view(-1, chunks, chunk)
        other_NCZ = with_previous(own_NCM.unsqueeze(3)).squeeze(3)
        hidden_NCZ = (other_NCZ != own_NCM[:, :, :1]) | (other_NCZ < 0)
        hidden_NCZ[:, 0, :chunk] = True
        scores = (q_NCMD * case.softmax_scale) @ with_previous(normalize(q_NCMD, dim=-1)).mT
        scores += torch.zeros_like(scores[0, 0]).masked_fill_(later_MZ, -torch.inf)
        unseen_NC1Z = torch.zeros_like(scores[:, :, :1])
        scores += unseen_NC1Z.masked_fill_(hidden_NCZ.unsqueeze(2), -torch.inf)
        scores.diagonal(chunk, -2, -1).fill_(ALONE)
        lse_NCM1 = scores.logsumexp(-1, keepdim=True)
        o_NCMV = (scores - lse_NCM1).exp_() @ with_previous(v_NCMV)
        return rows(o_NCMV.flatten(1, 2), slot_NL), rows(lse_NCM1.flatten(1, 2), slot_NL)

    def attend(q_BHLD: torch.Tensor, _k: torch.Tensor, v_BGSV: torch.Tensor, /) -> torch.Tensor:
        wide = torch.promote_types(q_BHLD.dtype, torch.float32)
        v_BHSV = v_BGSV.repeat_interleave(case.heads // case.kv_heads, dim=1)
        q_NLD, v_NLV = (x.to(wide).flatten(0, 1) for x in (q_BHLD, v_BHSV))
        found = [attend_round(q_NLD, v_NLV, rotation) for rotation in rotations]
        shares = torch.stack([lse_NL1 for _, lse_NL1 in found]).softmax(0)
        o_NLV = (shares * torch.stack([o_NLV for o_NLV, _ in found])).sum(0)
        return o_NLV.view(v_BHSV.shape).to(q_BHLD.dtype)

    return attend
