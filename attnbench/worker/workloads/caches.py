"""What decoding computes around its core, and where the keys and values are kept between steps.

`A` in names of axes: the tokens of one step, of which each batch item writes one beside the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from attnbench.base.parameters import base_name
from attnbench.base.registry import Registry
from attnbench.schema.case import Case
from attnbench.theory.caches import DEFAULT, cache_of, context_lengths, pages_of_items
from attnbench.worker.inputs import Tensors
from attnbench.worker.positions import addition, rotation

KeysValues = tuple[torch.Tensor, torch.Tensor]  # k_BGSD, v_BGSV


class DecodeLayer:
    """The projections of one layer around its n + T tokens; rotary tables are shared.

    Where batch items differ in length, an item of m < n tokens has them in the first m places of x,
    what follows there is padding, and its new tokens stand in the last T places, as all items' do.
    """

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case, self.tensors = case, tensors
        self.context, self.total = case.seq_len, case.seq_len + (case.new_tokens or 1)
        self.lengths = torch.tensor(context_lengths(case), device=case.device)
        self._items = torch.arange(case.batch, device=case.device)
        self._rotation = rotation(case, 0, self.total, self.total)
        self._added_LE = addition(case, self.total)
        self._x_BLE, self._first = tensors["x"], 0
        # What depends on the step alone is made in the untimed check.
        self._rotate = functools.cache(self._rotation_of)
        self.places = functools.cache(self._places_of)

    def place(self, first: int, end: int) -> None:
        """Add to tokens `first` to `end` what their places add; the others are not to be used."""
        if self._added_LE is None:
            return
        added = self._added_LE[first:end]
        if self._placed_apart(first):
            added = self._added_LE[self.places(first, end - first)]
        self._x_BLE, self._first = self.tensors["x"][:, first:end] + added, first

    def queries(self, first: int, end: int) -> torch.Tensor:
        """q_BHLD of tokens `first` to `end`, rotated to their places."""
        return self._rotated(self._heads("wq", self.case.heads, first, end), first)

    def keys_values(self, first: int, end: int) -> KeysValues:
        """k_BGSD, rotated to its places, and v_BGSV of tokens `first` to `end`."""
        k, v = (self._heads(name, self.case.kv_heads, first, end) for name in ("wk", "wv"))
        return self._rotated(k, first), v

    def output(self, o_BHLV: torch.Tensor) -> torch.Tensor:
        """Heads merged and projected: (B, L, E)."""
        return linear(o_BHLV.transpose(1, 2).flatten(2), self.tensors["wo"])

    def write(self, buffer_BGSD: torch.Tensor, new_BGAD: torch.Tensor, first: int) -> None:
        """Put the tokens from `first` on into their places, each batch item's behind its own."""
        if self.case.mask.lengths:
            buffer_BGSD[self._items, :, self.places(first, 1)[:, 0]] = new_BGAD[:, :, 0]
        else:
            buffer_BGSD[:, :, first : first + new_BGAD.shape[2]] = new_BGAD

    def _placed_apart(self, first: int) -> bool:
        """Whether tokens from `first` on have another place in each batch item."""
        return bool(self.case.mask.lengths) and first >= self.context

    def _places_of(self, first: int, count: int) -> torch.Tensor:
        """Places (B, A) of the new tokens from `first` on: each item's follow its own context."""
        steps = torch.arange(count, device=self.case.device) + (first - self.context)
        return self.lengths.unsqueeze(1) + steps

    def _heads(self, weight: str, heads: int, first: int, end: int) -> torch.Tensor:
        x_BLE = self._x_BLE[:, first - self._first : end - self._first]
        batch, tokens, _ = x_BLE.shape
        # A model's x is whole; of a slice torch makes a batched product, 50 times slower in
        # bfloat16 on a CPU (torch 2.13). As rows it is the product that a model has.
        x = x_BLE.flatten(0, 1) if 1 in (batch, tokens) else x_BLE
        return linear(x, self.tensors[weight]).view(batch, tokens, heads, -1).transpose(1, 2)

    def _rotation_of(self, first: int, count: int) -> Any:
        assert self._rotation is not None
        if self._placed_apart(first):
            return self._rotation.at(self.places(first, count))
        return self._rotation.window(first, count)

    def _rotated(self, x_BHLD: torch.Tensor, first: int) -> torch.Tensor:
        if self._rotation is None:
            return x_BHLD
        rotated: torch.Tensor = self._rotate(first, x_BHLD.shape[2])(x_BHLD)
        return rotated


class Store(Protocol):
    """Keys and values between the steps of a generation.

    Made from the context, untimed and again whenever the inputs change; what follows is timed.
    """

    def extend(self, first: int, end: int) -> KeysValues:
        """Take in the tokens `first` to `end`; k_BGSD and v_BGSV of what a query may see."""

    def restore(self) -> None:
        """After a generation: as it was before, for the next one.

        Nothing is to be done where a place is written before it is read, in every generation.
        """
        return


STORES: Registry[Any] = Registry("cache", "--caches")


def layer_of(case: Case, tensors: Tensors) -> DecodeLayer:
    """The layer as the case's cache goes about it."""
    store = STORES.get(base_name(case.cache or DEFAULT))
    layer: DecodeLayer = getattr(store, "around", DecodeLayer)(case, tensors)
    return layer


def with_wk_and_wv(tensors: Tensors) -> Tensors:
    """The same with wk and wv, where these stand as products by way of a latent."""
    if "wdown" not in tensors:
        return tensors
    made = {f"w{name}": tensors[f"wup{name}"] @ tensors["wdown"] for name in "kv"}
    return tensors | made


def store_of(layer: DecodeLayer) -> Store:
    """The case's cache with the layer's context in it."""
    (_, values), name = cache_of(layer.case), base_name(layer.case.cache or DEFAULT)
    store: Store = STORES.get(name)(layer, **values)
    return store


class Recomputed(Store):
    """Keeps nothing."""

    def __init__(self, layer: DecodeLayer) -> None:
        self._layer = layer

    def extend(self, first: int, end: int) -> KeysValues:
        """Of all tokens anew."""
        return self._layer.keys_values(0, end)


class Concatenated(Store):
    """Exactly as long as there are tokens: copied whole at each step."""

    def __init__(self, layer: DecodeLayer) -> None:
        k, v = layer.keys_values(0, layer.context)
        self._layer = layer
        self._prefilled = self._now = k.contiguous(), v.contiguous()

    def extend(self, first: int, end: int) -> KeysValues:
        """The old and the new ones, copied."""
        (k, v), (k_new, v_new) = self._now, self._layer.keys_values(first, end)
        self._now = torch.cat((k, k_new), dim=2), torch.cat((v, v_new), dim=2)
        return self._now

    def restore(self) -> None:
        """Let go of what grew."""
        self._now = self._prefilled


def _with_room(x_BGLD: torch.Tensor, tokens: int) -> torch.Tensor:
    """A buffer for so many tokens, zero, and x at its beginning."""
    buffer = x_BGLD.new_zeros(*x_BGLD.shape[:2], tokens, x_BGLD.shape[3])
    buffer[:, :, : x_BGLD.shape[2]] = x_BGLD
    return buffer


class Preallocated(Store):
    """Buffers for all n + T tokens, or for `capacity`, of which the core is then given all."""

    def __init__(self, layer: DecodeLayer, *, capacity: int) -> None:
        context = layer.keys_values(0, layer.context)
        self._layer, self._whole = layer, bool(capacity)
        self.buffers = [_with_room(x, capacity or layer.total) for x in context]

    def extend(self, first: int, end: int) -> KeysValues:
        """Views of the buffers."""
        for buffer, new in zip(self.buffers, self._layer.keys_values(first, end), strict=True):
            self._layer.write(buffer, new, first)
        k, v = self.buffers
        return (k, v) if self._whole else (k[:, :, :end], v[:, :, :end])


class Ring(Store):
    """The last W tokens: token j in place j mod W (Mistral 7B's rolling buffer, arXiv:2310.06825).

    Softmax does not mind the order, and keys were rotated to their places before.
    """

    def __init__(self, layer: DecodeLayer) -> None:
        window = (layer.case.mask.before or 0) + 1
        self._layer, self._size = layer, min(window, layer.total)
        tokens = torch.arange(layer.total, device=layer.case.device)
        kept = tokens[: layer.context][-self._size :]
        context = layer.keys_values(0, layer.context)
        self.buffers = [x.new_zeros(*x.shape[:2], self._size, x.shape[3]) for x in context]
        for buffer, x in zip(self.buffers, context, strict=True):
            buffer[:, :, kept % self._size] = x[:, :, kept]
        # Only here a generation overwrites what the next one reads: at most T places.
        new = min(layer.total - layer.context, self._size)
        self._overwritten = tokens[layer.context :][:new] % self._size
        self._before = [buffer[:, :, self._overwritten] for buffer in self.buffers]

    def extend(self, first: int, end: int) -> KeysValues:
        """All that the ring holds."""
        place, held = first % self._size, min(end, self._size)
        for buffer, new in zip(self.buffers, self._layer.keys_values(first, end), strict=True):
            buffer[:, :, place : place + 1] = new
        k, v = self.buffers
        return (k, v) if held == self._size else (k[:, :, :held], v[:, :, :held])

    def restore(self) -> None:
        """Put back what the new tokens took the places of."""
        for buffer, before in zip(self.buffers, self._before, strict=True):
            buffer.index_copy_(2, self._overwritten, before)


class Paged(Store):
    """Pages of a pool, (pages, G, page, D), in no order, and a block table of those of each item.

    As in vLLM (Kwon et al. 2023, arXiv:2309.06180), with heads before tokens as in FlashInfer. The
    cores take k and v as one tensor, so that pages are gathered into a buffer made beforehand,
    which a whole model could share. A kernel that reads pages saves that copy.
    """

    def __init__(self, layer: DecodeLayer, *, page: int) -> None:
        case, self._layer, self._page = layer.case, layer, page
        counts, most = pages_of_items(case, page), -(-layer.total // page)
        shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
        self.table_BP = torch.zeros(case.batch, most, dtype=torch.int32)  # hidden ones are page 0
        for own, pages in zip(self.table_BP, torch.split(shuffled, counts), strict=True):
            own[: len(pages)] = pages
        self.table_BP = self.table_BP.to(case.device)
        heads = torch.arange(case.kv_heads, device=case.device).unsqueeze(1)
        rows_BGP = self.table_BP.unsqueeze(1) * case.kv_heads + heads
        self._rows = rows_BGP.flatten()
        self._slots = functools.cache(self._slots_of)
        context = layer.keys_values(0, layer.context)
        self.pools = [x.new_zeros(sum(counts), x.shape[1], page, x.shape[3]) for x in context]
        self._gathered = [x.new_empty(len(self._rows), page * x.shape[3]) for x in context]
        places = torch.arange(layer.context, device=case.device)
        for pool, x in zip(self.pools, context, strict=True):
            for pages, own, length in zip(self.table_BP, x, layer.lengths.tolist(), strict=True):
                at = places[:length]
                pool[pages[at // page], :, at % page] = own[:, :length].transpose(0, 1)

    def extend(self, first: int, end: int) -> KeysValues:
        """Write the new tokens into their pages, and copy all pages side by side."""
        pages_BA, slots_BA = self._slots(first, end - first)
        new, case = self._layer.keys_values(first, end), self._layer.case
        for pool, x_BGAD in zip(self.pools, new, strict=True):
            pool[pages_BA, :, slots_BA] = x_BGAD.transpose(1, 2)
        for pool, gathered in zip(self.pools, self._gathered, strict=True):
            torch.index_select(pool.view(-1, gathered.shape[1]), 0, self._rows, out=gathered)
        dims, sizes = (pool.shape[-1] for pool in self.pools), (case.batch, case.kv_heads, -1)
        k, v = (x.view(*sizes, d) for x, d in zip(self._gathered, dims, strict=True))
        return k[:, :, :end], v[:, :, :end]

    def _slots_of(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages (B, A) of the new tokens from `first` on, and their places within."""
        places_BA = self._layer.places(first, count)
        pages_BA = self.table_BP.long().gather(1, places_BA // self._page)
        return pages_BA, places_BA % self._page


class EightBits(Store):
    """Whole numbers from -127 to 127 times a scale; made wide at each step, for the core to read.

    The wide copy lies in a buffer made beforehand, which a whole model could share.
    """

    dims: tuple[int, ...] = (3,)  # over which a scale is taken: one for each token and head

    def __init__(self, layer: DecodeLayer) -> None:
        context = layer.keys_values(0, layer.context)
        self._layer = layer
        scales = [self.scale(x) for x in context]
        self.codes = [
            _with_room(self._rounded(x, scale), layer.total)
            for x, scale in zip(context, scales, strict=True)
        ]
        self.scales = scales if 2 in self.dims else [_with_room(x, layer.total) for x in scales]
        self._wide = [_with_room(x, layer.total) for x in context]

    @classmethod
    def scale(cls, x_BGLD: torch.Tensor) -> torch.Tensor:
        """What 1 stands for: the largest magnitude / 127."""
        largest = x_BGLD.abs().amax(cls.dims, keepdim=True) / 127
        return largest.clamp_min_(torch.finfo(x_BGLD.dtype).tiny)

    def extend(self, first: int, end: int) -> KeysValues:
        """Round the new ones, and multiply all by their scales."""
        new = self._layer.keys_values(first, end)
        for x, codes, scales in zip(new, self.codes, self.scales, strict=True):
            own = scales if 2 in self.dims else self.scale(x)
            self._layer.write(codes, self._rounded(x, own), first)
            if own is not scales:
                self._layer.write(scales, own, first)
        for codes, scales, wide in zip(self.codes, self.scales, self._wide, strict=True):
            wide[:, :, :end].copy_(codes[:, :, :end]).mul_(scales[:, :, :end])
        k, v = self._wide
        return k[:, :, :end], v[:, :, :end]

    @staticmethod
    def _rounded(x_BGLD: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x_BGLD.dtype, torch.float32)
        return (x_BGLD.to(wide) / scale).round_().clamp_(-127, 127).to(torch.int8)


class EightBitsByHead(EightBits):
    """The same with the scale of the context for all tokens of a head, beyond which is cut off."""

    dims = (2, 3)


# Keys or values (B, G, S, D) as a cache gives them back, by its definition, in their dtype; the
# first tokens, so many, are the context.
AsRead = Callable[[torch.Tensor, int], torch.Tensor]


def as_read_of(case: Case, later: int = 0) -> AsRead | None:
    """What the case's cache makes of keys and values; None where they come back as they were.

    Each is read with the scale of the token so many places `later`.
    """
    store = STORES.get(base_name(case.cache or DEFAULT))
    dims: tuple[int, ...] | None = getattr(store, "dims", None)

    def as_read(x_BGSD: torch.Tensor, context: int) -> torch.Tensor:
        assert dims is not None
        wide = x_BGSD.to(torch.promote_types(x_BGSD.dtype, torch.float32))
        measured = wide if dims == (3,) else wide[:, :, :context]
        step = measured.abs().amax(dims, keepdim=True) / 127
        codes, places = (wide / step).round().clamp(-127, 127), torch.arange(step.shape[2]) + later
        return (codes * step[:, :, places.clamp(0, len(places) - 1)]).to(x_BGSD.dtype)

    return as_read if dims else None


for _name, _store in {
    "rerun": Recomputed,
    "none": Recomputed,
    "concat": Concatenated,
    "static": Preallocated,
    "shared": lambda layer, **_: Preallocated(layer, capacity=0),
    "sliding": Ring,
    "paged": Paged,
    "int8": EightBits,
    "int8-head": EightBitsByHead,
}.items():
    STORES.add(_name, _store)
