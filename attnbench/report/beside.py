"""A recurrent network drawn beside the layers of its width, in their panels."""

from __future__ import annotations

import pandas as pd

from attnbench.analysis.axes import AXES, slices

HOST, GUEST = "layer", "recurrent"
ALIKE = ("device", "dtype", "pass", "batch", "_width")  # what both must share
ALONG = ("seq_len", "kv_len")


def with_guests(rows: pd.DataFrame) -> pd.DataFrame:
    """Put the recurrent rows into every slice of layers that they are equal to in width.

    They take on the axes that only layers have (heads, mask, projection …), so that they share a
    panel. Those without such layers stay what they are.
    """
    hosts, guests = (_of(rows, workload) for workload in (HOST, GUEST))
    if hosts.empty or guests.empty:
        return rows
    own = [name for name in AXES if name not in ALONG]
    copies, seated = [], set()
    for _, part in slices(hosts, own):
        host = part.iloc[0]
        alike = guests[(guests[list(ALIKE)] == host[list(ALIKE)]).all(axis=1)]
        seated |= set(alike.index)
        copies.append(alike.assign(**{name: host[name] for name in own}))
    kept = rows[~rows.index.isin(list(seated))]
    found = pd.concat([kept, *copies], ignore_index=True)[list(rows.columns)]
    return found.astype(rows.dtypes.to_dict())


def _of(rows: pd.DataFrame, workload: str) -> pd.DataFrame:
    found = rows[rows["workload"] == workload]
    return found.assign(_width=found["width"].fillna(found["heads"] * found["head_dim"]))
