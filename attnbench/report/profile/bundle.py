"""Everything about one or two profiles in one zip file, for a bug report."""

from __future__ import annotations

import gzip
import os
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from attnbench.base.jsontext import dumps
from attnbench.errors import StoreError, UsageError
from attnbench.report.profile.page import MARKDOWN, PAGE
from attnbench.schema.profile import FILE, Profile
from attnbench.theory.flags import case_flags

# What can change a time of attention; of the environment of this process.
PACKAGES = ("attnbench", "torch", "triton", "numpy", "flash-attn", "xformers", "transformers",
            "intel-extension-for-pytorch")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Part:
    """A profile, the folder it lies in, and the user's own files as they were: name to text.

    `variables` name the interpreters that `repro.sh` is to be given, where others were profiled.
    """

    profile: Profile
    folder: Path
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Sequence[str] = ()


def check_target(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        UsageError: it exists, or its folder does not.
    """
    if file.exists():
        raise UsageError(f"{file} (--bundle) exists; name another file")
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent} (--bundle) is no folder")


def write_bundle(file: Path, folder: Path, parts: Sequence[Part]) -> Path:
    """Zip the page in `folder` with profiles, traces, environments, cells and a script to repeat.

    Everything has the place that it has in `folder`. The user's home folder is `~` in all of it.

    Raises:
        StoreError: something cannot be read, or the file not be written.
    """
    temporary = file.parent / f".{file.name}.{os.getpid()}"
    try:
        entries = {name: (folder / name).read_bytes() for name in (PAGE, MARKDOWN)}
        for part in parts:
            own = part.folder.relative_to(folder)
            for name in filter(None, (FILE, part.profile.trace)):
                entries[str(own / name)] = (part.folder / name).read_bytes()
            texts = {
                "cell.json": dumps(part.profile.cell.to_json(), indent=1),
                "environment.json": dumps(part.profile.environment, indent=1),
                "repro.sh": repro(part),
            }
            entries |= {str(own / k): v.encode() for k, v in {**part.files, **texts}.items()}
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, _homeless(name, data))
        temporary.replace(file)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {file} ({err.strerror}); choose another --bundle") from err
    return file


def repro(part: Part) -> str:
    """A shell script that measures and profiles the cell again, with the versions it met."""
    profile = part.profile
    known = profile.environment
    facts = [f"{name} {known[name]}" for name in ("device_name", "platform", "python", "torch",
                                                  "cuda") if known.get(name)]  # fmt: skip
    flags = case_flags(profile.cell.case, auto="auto")
    own = [text for name in part.files for text in ("--impl", name)]
    again = "".join(f' --python "${{{name}:?an interpreter}}"' for name in part.variables)
    sweep = shlex.join(["attnbench", "sweep", *own, "--impls", profile.impl, *flags])
    lines = [
        "#!/bin/sh",
        f"# {profile.label}: measured and profiled again. It was on:",
        *(f"#   {fact}" for fact in facts),
        *(f"#   {line}" for line in _versions(str(known.get("torch")))),
        "set -e",
        'cd "$(dirname "$0")"',
        *([] if part.variables else [sweep]),  # which runs in attnbench's own environment alone
        shlex.join(["attnbench", "profile", profile.impl, *own, *flags]) + again,
    ]
    return "\n".join(lines) + "\n"


def _versions(torch: str) -> list[str]:
    """As `pip freeze` has them; none where the profile is of another environment than ours."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if found.get("torch", "").partition("+")[0] != torch.partition("+")[0]:
        return []
    return [f"{name}=={version}" for name, version in found.items()]


def _homeless(name: str, data: bytes) -> bytes:
    home = str(Path.home()).encode()
    if len(home) < 2:
        return data
    if name.endswith(".gz"):
        plain = gzip.decompress(data)
        return gzip.compress(plain.replace(home, b"~")) if home in plain else data
    return data.replace(home, b"~")
