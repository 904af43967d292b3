"""Multi-head latent attention in decoding: what is kept of a token is one latent c of rank R.

k = wupk·c and v = wupv·c are never made: as (q·wupk)·c gives the score, and wupv times the weighted
sum of latents the output of a head, latents are to a core the keys and the values of a single head
(DeepSeek-V2, arXiv:2405.04434, whose rotary part is left out). `M` is a head's place in its group.
"""

from __future__ import annotations

import torch

from attnbench.worker.workloads.caches import STORES, DecodeLayer, KeysValues, Preallocated


class LatentLayer(DecodeLayer):
    """The layer with the matrices that make keys and values absorbed into its two ends."""

    def queries(self, first: int, end: int) -> torch.Tensor:
        """q_BHLR of tokens `first` to `end`, in the space of latents."""
        return self._by_group("bgmld,gdr->bgmlr", super().queries(first, end), "wupk")

    def keys_values(self, first: int, end: int) -> KeysValues:
        """The latents of tokens `first` to `end` as those of one head, (B, 1, S, R), twice."""
        c_B1SR = self._heads("wdown", 1, first, end)
        return c_B1SR, c_B1SR

    def output(self, o_BHLR: torch.Tensor) -> torch.Tensor:
        """Heads' values from their sums of latents, merged and projected: (B, L, E)."""
        return super().output(self._by_group("bgmlr,gvr->bgmlv", o_BHLR, "wupv"))

    def _by_group(self, product: str, x_BHLF: torch.Tensor, name: str) -> torch.Tensor:
        batch, _, queries, dims = x_BHLF.shape
        groups = self.case.kv_heads
        weight = self.tensors[name].view(groups, -1, self.tensors[name].shape[1])
        x_BGMLF = x_BHLF.reshape(batch, groups, -1, queries, dims)
        return torch.einsum(product, x_BGMLF, weight).flatten(1, 2)


class Latents(Preallocated):
    """One buffer for the latents of all n + T tokens, as keys and as values."""

    around = LatentLayer

    def __init__(self, layer: DecodeLayer, *, rank: int) -> None:
        super().__init__(layer, capacity=0)
        del self.buffers[1:]

    def extend(self, first: int, end: int) -> KeysValues:
        """A view of the buffer, twice."""
        (buffer,), (new, _) = self.buffers, self._layer.keys_values(first, end)
        self._layer.write(buffer, new, first)
        c_B1SR = buffer[:, :, :end]
        return c_B1SR, c_B1SR


STORES.add("latent", Latents)
