"""A made-up hub cache in the layout of huggingface_hub: blobs, snapshots of links to them, and the newest revision."""

from collections.abc import Mapping
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def cached(hub: Path, model: str, files: Mapping[str, bytes], revision: str = REVISION) -> Path:
    """Put a model's files into the cache `hub`, as the newest revision; the snapshot's folder."""
    folder = hub / f"models--{model.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    for path in (folder / "blobs", folder / "refs", snapshot):
        path.mkdir(parents=True, exist_ok=True)
    for number, (name, content) in enumerate(files.items()):
        blob = folder / "blobs" / f"{revision}-{number}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    (folder / "refs" / "main").write_text(revision)
    return snapshot
